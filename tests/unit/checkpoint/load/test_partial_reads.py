"""What there is, told cheaply, and reading only what is wanted."""

from pathlib import Path

import numpy as np
import pytest

from dtruntime.checkpoint.manager import CheckpointManager
from dtruntime.errors import CheckpointNotFoundError
from dtruntime.storage import open_backend
from dtruntime.testing import RecordingBackend

MEGABYTE = 2**20


@pytest.fixture
def recorded(tmp_path: Path) -> RecordingBackend:
    """A folder with a large state, and what is asked of it."""
    with CheckpointManager(tmp_path) as manager:
        rng = np.random.default_rng(0)
        state = {
            "shared": {"model": rng.bytes(3 * MEGABYTE), "step": 7},
            "own": {"optimizer": rng.bytes(5 * MEGABYTE), "loader": {"position": 12}},
        }
        manager.save(state, 7, epoch=2, metadata={"run": "a"}).wait()
    return RecordingBackend(open_backend(tmp_path))


def read_from_packs(backend: RecordingBackend) -> int:
    return sum(
        call.size
        for call in backend.calls
        if call.operation.startswith("read") and call.name.startswith("packs/")
    )


def test_newest_is_told_without_reading_packs(recorded: RecordingBackend) -> None:
    with CheckpointManager(recorded) as manager:
        assert manager.newest_step() == 7
        assert recorded.counts == {"list": 1}
        info = manager.latest()
        assert info is not None
        assert (info.step, info.epoch, info.metadata, info.parts) == (7, 2, {"run": "a"}, 1)
        assert manager.ranks() == [0]
        assert manager.ranks(7) == [0]
        assert read_from_packs(recorded) == 0
        assert recorded.counts["read"] == 1, "the manifest"


def test_nothing_is_no_error_to_those_who_look(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "empty") as manager:
        assert manager.latest() is None
        assert manager.newest_step() is None
        with pytest.raises(CheckpointNotFoundError):
            manager.ranks()


def test_pending_save_and_roll_back_are_seen(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(b"x" * 10 * MEGABYTE, 9)
        assert manager.newest_step() == 9
        manager.save(b"y", 4)
        assert manager.latest().step == 4  # type: ignore[union-attr]


def test_damaged_manifest_is_passed_over(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(b"x", 1)
        manager.save(b"y", 2)
    max((tmp_path / "manifests").iterdir()).write_bytes(b"{}")
    with CheckpointManager(tmp_path) as manager:
        assert manager.latest().step == 1  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("keys", "most"),
    [
        (["shared"], 3 * MEGABYTE),
        (["shared/model"], 3 * MEGABYTE),
        (["own/optimizer"], 5 * MEGABYTE),
        (["own/loader"], 0),
        (["shared/step", "own/loader"], 0),
    ],
)
def test_only_chunks_of_the_wanted_keys_are_read(
    recorded: RecordingBackend, keys: list[str], most: int
) -> None:
    with CheckpointManager(recorded) as manager:
        loaded = manager.load_state(keys=keys)
        assert sorted(loaded) == sorted(keys)
        if "shared" in loaded:
            assert loaded["shared"]["step"] == 7
            assert len(loaded["shared"]["model"]) == 3 * MEGABYTE
        assert most <= read_from_packs(recorded) <= most + 4096
        with pytest.raises(KeyError, match="nothing/such"):
            manager.load_state(keys=["nothing/such"])


def test_part_of_a_rank_that_saved_none_is_not_found(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save({"x": 1}, 1)
        assert manager.load_state(rank=0) == {"x": 1}
        with pytest.raises(CheckpointNotFoundError, match=r"no part of rank 3 \(there: 0\)"):
            manager.load_state(rank=3)
        with pytest.raises(ValueError, match="rank"):
            manager.load_state(rank=-1)
