"""Commits of checkpoints: one writer, or all ranks together."""

from typing import Any

import pytest

from dtruntime.coordinator.state import commands as c
from dtruntime.coordinator.state.checkpoints import attempts as module
from dtruntime.coordinator.state.checkpoints import history
from dtruntime.coordinator.state.effects import Put
from dtruntime.coordinator.state.records import CRASH_SAFE_KINDS
from tests.support.machine_bench import Bench, refusal


def test_single_writer_commits_at_once(bench: Bench) -> None:
    a, _ = bench.world(2)
    call = bench.save(a, "one", partial=False, step=7, path="/one")
    assert call.reply == c.Committed("one", 1)
    record = bench.job.checkpoints.latest
    assert (record.step, record.path, record.parts) == (7, "/one", 1)


def test_partial_checkpoint_commits_when_every_member_has_sent_its_part(bench: Bench) -> None:
    a, b, d = bench.world(3)
    calls = [bench.save(a), bench.save(b)]
    assert all(call.held for call in calls)
    assert bench.job.checkpoints.latest is None
    last = bench.save(d, path="/c")
    assert {call.reply for call in (*calls, last)} == {c.Committed("ckpt", 1)}
    record: Any = bench.job.checkpoints.latest
    assert (record.parts, record.size_bytes) == (3, 30)


def test_partial_commit_is_one_atomic_change_that_waits_for_the_disk(bench: Bench) -> None:
    a, b = bench.world(2)
    bench.save(a)
    bench.save(b)
    kinds = {effect.kind for effect in bench.effects if isinstance(effect, Put)}
    assert kinds == {"checkpoint"}
    assert not kinds & CRASH_SAFE_KINDS
    assert not [key for key in bench.rows if key[0] in ("part", "pending")]


def test_part_sent_twice_counts_once(bench: Bench) -> None:
    a, b = bench.world(2)
    first, again = bench.save(a), bench.save(a)
    assert first.held
    assert again.held
    bench.save(b)
    assert first.reply == again.reply == c.Committed("ckpt", 1)


def test_part_sent_again_after_the_commit_is_told_of_the_commit(bench: Bench) -> None:
    a, b = bench.world(2)
    bench.save(a)
    bench.save(b)
    bench.restart()
    assert bench.save(a).reply == c.Committed("ckpt", 1)


def test_partial_checkpoint_survives_a_restart_between_parts(bench: Bench) -> None:
    a, b = bench.world(2)
    bench.save(a)
    bench.restart()
    assert isinstance(bench.save(b).reply, c.Committed)
    assert bench.job.checkpoints.latest.parts == 2


def test_member_lost_before_sending_its_part_aborts_the_checkpoint(bench: Bench) -> None:
    a, b, d = bench.world(3)
    calls = [bench.save(a), bench.save(b)]
    bench.leave(d)
    for call in calls:
        assert isinstance(call.reply, c.Aborted)
        assert d.worker_id in call.reply.detail
    assert bench.job.checkpoints.latest is None
    assert not [key for key in bench.rows if key[0] in ("part", "pending")]
    assert "checkpoint.aborted" in bench.kinds_of_events()


def test_member_lost_after_sending_its_part_does_not_abort(bench: Bench) -> None:
    a, b = bench.world(2)
    bench.beat(a, b)
    bench.save(b)
    bench.leave(b)
    assert isinstance(bench.save(a).reply, c.Committed), "also for one who has not been told"


def test_replaced_member_aborts_and_its_successor_cannot_fill_in(bench: Bench) -> None:
    a, b = bench.world(2)
    bench.beat(a, b)
    call = bench.save(a)
    bench.register(world_size=2, rank=1)
    assert isinstance(call.reply, c.Aborted)


def test_newcomer_cannot_join_a_checkpoint_that_was_begun_before(bench: Bench) -> None:
    a, b = bench.elastic(2)
    bench.save(a)
    newcomer = bench.register()
    assert refusal(bench.save, newcomer).reason == "checkpoint_conflict"
    bench.save(b)
    refused = refusal(bench.save, newcomer)
    assert refused.reason == "checkpoint_conflict", "its part is not in the commit"


def test_part_made_before_a_loss_does_not_begin_a_checkpoint(bench: Bench) -> None:
    a, b, d = bench.world(3)
    bench.beat(a, b, d)
    bench.leave(d)
    assert isinstance(bench.save(a).reply, c.Aborted)
    assert bench.save(a, told=bench.roster.generation).held


def test_part_made_before_a_loss_is_not_mixed_with_parts_made_after_it(bench: Bench) -> None:
    """One has recovered and saves the step again; the other has not been told yet."""
    a, b, d = bench.world(3)
    bench.beat(a, b, d)
    bench.leave(d)
    now = bench.roster.generation
    again = bench.save(a, told=now)
    assert isinstance(bench.save(b).reply, c.Aborted)
    assert again.held, "the checkpoint itself goes on"
    bench.save(b, told=now)
    assert isinstance(again.reply, c.Committed)


def test_late_part_of_an_aborted_attempt_is_not_taken_into_the_next(bench: Bench) -> None:
    ghost = bench.register()
    a, b = bench.elastic(2)
    told = bench.roster.generation
    bench.save(a, told=told)
    bench.kill(ghost, among=[ghost, a, b])
    assert isinstance(bench.save(a, told=told).reply, c.Aborted), "although it knew no ghost"
    now = bench.roster.generation
    bench.save(b, told=now)
    assert isinstance(bench.save(a, told=told).reply, c.Aborted)
    assert isinstance(bench.save(a, told=now).reply, c.Committed)


def test_part_retried_after_a_restart_is_not_told_that_it_was_aborted(bench: Bench) -> None:
    ghost = bench.register()
    a, b = bench.elastic(2)
    bench.kill(ghost, among=[ghost, a, b])
    bench.save(a, told=a.generation)
    bench.restart()
    assert bench.save(a, told=a.generation).held
    assert isinstance(bench.save(b, told=bench.roster.generation).reply, c.Committed)


def test_wait_for_a_commit_ends_with_the_ranks_that_lack_and_the_part_stays(bench: Bench) -> None:
    a, b = bench.world(2)
    call = bench.save(a, timeout=1.0)
    bench.wait(1.0, a, b)
    assert call.reply == c.Pending("ckpt", 1, (1,))
    assert isinstance(bench.save(b).reply, c.Committed)


def test_caller_that_does_not_wait_gets_pending_at_once(bench: Bench) -> None:
    a, _ = bench.world(2)
    assert bench.save(a, timeout=0.0).reply == c.Pending("ckpt", 1, (1,))


def test_hangup_ends_the_wait_and_the_part_stays(bench: Bench) -> None:
    a, b = bench.world(2)
    bench.hang_up(bench.save(a))
    assert bench.job.held_calls == set()
    assert isinstance(bench.save(b).reply, c.Committed)


def test_partial_checkpoint_cannot_begin_before_all_ranks_have_registered(bench: Bench) -> None:
    refused = refusal(bench.save, bench.register(world_size=2))
    assert refused.reason == "not_ready"
    assert refused.retry_after


def test_partial_checkpoint_needs_a_generation(bench: Bench) -> None:
    assert refusal(bench.save, bench.register(), told=0).reason == "invalid"


@pytest.mark.parametrize("other", [{"step": 2}, {"path": "/other"}])
def test_commit_is_never_changed_by_another_of_the_same_id(
    bench: Bench, other: dict[str, object]
) -> None:
    a, b = bench.world(2)
    bench.save(a, "one", partial=False, path="/one")
    before = bench.job.checkpoints.latest
    again = bench.save(b, "one", partial=False, path="/one", size_bytes=99)
    assert isinstance(again.reply, c.Committed), "the same again is no conflict"
    refused = refusal(bench.save, b, "one", partial=False, **{"path": "/one", **other})
    assert refused.reason == "checkpoint_conflict"
    assert bench.job.checkpoints.latest == before


def test_one_writer_and_all_ranks_do_not_share_an_id(bench: Bench) -> None:
    a, b = bench.world(2)
    bench.save(a, "one", partial=False)
    assert refusal(bench.save, b, "one").reason == "checkpoint_conflict"
    bench.save(a, "all")
    assert refusal(bench.save, b, "all", partial=False).reason == "checkpoint_conflict"
    bench.save(b, "all")
    assert refusal(bench.save, b, "all", partial=False).reason == "checkpoint_conflict"


def test_parts_of_different_steps_do_not_mix(bench: Bench) -> None:
    a, b = bench.world(2)
    bench.save(a, step=1)
    assert refusal(bench.save, b, step=2).reason == "checkpoint_conflict"


def test_latest_is_the_newest_commit_also_of_a_lower_step(bench: Bench) -> None:
    a = bench.register()
    for name, step in (("b", 5), ("c", 9), ("d", 9), ("a", 7)):
        bench.save(a, name, partial=False, step=step)
    assert bench.job.checkpoints.latest.checkpoint_id == "a"
    bench.save(a, "c", partial=False, step=9)
    assert bench.job.checkpoints.latest.checkpoint_id == "a", "the same again is no newer commit"
    bench.restart()
    assert bench.job.checkpoints.latest.checkpoint_id == "a"


def test_oldest_commits_are_forgotten_beyond_the_bound(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "CHECKPOINTS_KEPT", 3)
    a = bench.register()
    bench.save(a, "first", partial=False, step=100)
    for step in range(5):
        bench.save(a, f"s{step}", partial=False, step=step)
    assert list(bench.job.checkpoints.committed) == ["s2", "s3", "s4"]


def test_oldest_pending_checkpoint_is_aborted_beyond_the_bound(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PENDING_LIMIT", 2)
    a, _ = bench.world(2)
    calls = [bench.save(a, f"c{number}") for number in range(3)]
    assert isinstance(calls[0].reply, c.Aborted)
    assert calls[1].held
    assert calls[2].held


def test_checkpoints_of_different_jobs_do_not_mix(bench: Bench) -> None:
    bench.save(bench.register(), "one", partial=False)
    other = bench.register(job="other")
    bench.save(other, "one", partial=False, step=5, path="/elsewhere")
    latest = bench.machine.jobs["other"].checkpoints.latest
    assert latest is not None
    assert latest.step == 5
    assert bench.job.checkpoints.latest.step == 1
