"""How long the next save will take."""

from typing import Any

import numpy as np
import pytest

from dtruntime.checkpoint.manager import CheckpointManager
from dtruntime.checkpoint.save.handle import SaveEstimates


def test_nothing_is_known_before_the_first_save():
    estimates = SaveEstimates()
    assert estimates.seconds(is_full=True) is None
    assert estimates.seconds(is_full=False) is None


def test_estimate_follows_the_size_and_the_throughput():
    estimates = SaveEstimates()
    for _ in range(3):
        estimates.add(1000, 1000, 2.0, is_full=True)
    assert estimates.seconds(is_full=True) == pytest.approx(2.0)
    estimates.add(2000, 2000, 4.0, is_full=True)
    assert estimates.seconds(is_full=True) == pytest.approx(4.0)
    for _ in range(20):
        estimates.add(2000, 2000, 8.0, is_full=True)
    assert estimates.seconds(is_full=True) == pytest.approx(8.0, rel=0.01)


def seconds_of(estimates: SaveEstimates) -> float:
    """How long a full save is expected to take."""
    seconds = estimates.seconds(is_full=True)
    assert seconds is not None
    return seconds


def test_newer_saves_count_more():
    slowing, recovering = SaveEstimates(), SaveEstimates()
    for seconds in (1.0, 1.0, 9.0):
        slowing.add(100, 100, seconds, is_full=True)
    for seconds in (9.0, 1.0, 1.0):
        recovering.add(100, 100, seconds, is_full=True)
    assert seconds_of(slowing) > seconds_of(recovering)


def test_increments_are_estimated_by_increments():
    estimates = SaveEstimates()
    estimates.add(1000, 1000, 10.0, is_full=True)
    assert estimates.seconds(is_full=False) == 10.0, "rather too long than too short"
    estimates.add(1000, 10, 1.0, is_full=False)
    assert estimates.seconds(is_full=False) == 1.0
    assert estimates.seconds(is_full=True) == 10.0


def test_full_save_is_estimated_by_what_increments_wrote_if_there_is_nothing_else():
    estimates = SaveEstimates()
    estimates.add(1000, 0, 1.0, is_full=False)
    assert estimates.seconds(is_full=True) is None
    estimates.add(1000, 100, 1.0, is_full=False)
    assert seconds_of(estimates) > 10.0


def test_empty_states_take_as_long_as_they_took():
    estimates = SaveEstimates()
    estimates.add(0, 0, 0.5, is_full=True)
    assert estimates.seconds(is_full=True) == 0.5


def test_handles_and_managers_tell_what_was_measured(tmp_path):
    state = {"frozen": np.random.default_rng(0).random(300_000), "step": 1}
    with CheckpointManager(tmp_path) as manager:
        assert manager.estimate_seconds() is None
        first: Any = manager.save(state, 1)
        saved = first.wait()
        assert (first.size_bytes, first.bytes_written) == (saved.size_bytes, saved.written_bytes)
        assert first.size_bytes >= 2_400_000
        assert first.bytes_written >= 2_400_000
        assert 0 < first.stall_seconds < first.seconds == saved.durable_seconds
        assert saved.stall_seconds == first.stall_seconds
        assert 0 < (manager.estimate_seconds() or 0) <= first.seconds
        second: Any = manager.save(state, 2, is_full=False)
        second.wait()
        assert second.bytes_written == 0
        expected = manager.estimate_seconds(is_full=False)
        assert expected is not None
        assert expected < first.seconds + second.seconds
        plain = manager.save(b"x" * 1000, 3)
        assert plain.wait().stall_seconds > 0


def test_handle_of_a_save_that_failed_has_measured_nothing(tmp_path, monkeypatch):
    with CheckpointManager(tmp_path) as manager:
        monkeypatch.setattr(manager.engine.store.backend, "writer", None)
        handle = manager.save(b"x", 1)
        with pytest.raises(OSError, match="step 1 failed"):
            handle.wait()
        assert (handle.seconds, handle.size_bytes, handle.bytes_written) == (None, None, None)
        assert manager.estimate_seconds() is None
