"""When a checkpoint is due."""

import pytest

from dtruntime import CheckpointManager
from dtruntime.checkpoint.save.handle import SavePolicy


def due(policy, steps):
    found = []
    for step in steps:
        if policy.should_save(step):
            policy.saved(step)
            found.append(step)
    return found


def test_every_so_many_steps():
    assert due(SavePolicy(10), range(35)) == [10, 20, 30]


def test_steps_that_are_jumped_over_are_made_up_for():
    assert due(SavePolicy(10), range(0, 100, 7)) == [14, 21, 35, 42, 56, 63, 70, 84, 91]


def test_resumed_run_does_not_save_what_it_has_just_loaded():
    policy = SavePolicy(10)
    policy.saved(40)
    assert due(policy, range(40, 61)) == [50, 60]


def test_every_so_many_seconds():
    now = [0.0]
    policy = SavePolicy(None, 30, clock=lambda: now[0])
    found = []
    for step in range(1, 100):
        now[0] += 7
        if policy.should_save(step):
            policy.saved(step)
            found.append(step)
    assert found[:3] == [5, 10, 15]


def test_nothing_asked_for_is_never_due():
    assert due(SavePolicy(None), range(100)) == []


@pytest.mark.parametrize("bad", [(0, None), (None, 0)])
def test_bad_intervals_are_refused(bad):
    with pytest.raises(ValueError, match="interval"):
        SavePolicy(*bad)


def test_manager_goes_on_from_what_it_has_loaded(tmp_path):
    with CheckpointManager(tmp_path, interval_steps=10) as manager:
        for step in (15, 25):
            manager.save({"step": step}, step)
    with CheckpointManager(tmp_path, interval_steps=10) as manager:
        assert manager.load_state()["step"] == 25
        assert due(manager.policy, range(25, 41)) == [30, 40]
        assert manager.load_state(15)["step"] == 15  # a roll-back
        assert due(manager.policy, range(15, 31)) == [20, 30]


def test_seconds_alone_leave_the_steps_of_the_configuration_out(tmp_path):
    with CheckpointManager(tmp_path, interval_seconds=3600) as manager:
        assert not any(manager.should_save(step) for step in range(5000))
    with CheckpointManager(tmp_path) as manager:
        assert manager.should_save(1000)
