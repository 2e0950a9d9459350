"""Two managers that do not know of each other save to one place: what is listed can be loaded."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dtruntime.checkpoint import place
from dtruntime.checkpoint.manager import CheckpointManager
from dtruntime.errors import StorageError
from dtruntime.storage import StorageBackend, open_backend
from dtruntime.testing import RecordingBackend
from tests.unit.checkpoint.tiers import Run, same, state


class BeforeCommit(RecordingBackend):
    """Lets something happen when the manifest of a step is about to be created."""

    def __init__(self, inner: StorageBackend, step: int, happen: Callable[[], None]) -> None:
        super().__init__(inner)
        self._ending = f"-{step:012d}.json"
        self._happen = happen

    def record(self, operation: str, name: str, size: int = 0) -> None:
        super().record(operation, name, size)
        if operation == "create" and name.endswith(self._ending):
            self._happen()


def remove_packs(folder: Path, step: int) -> None:
    for path in (folder / "packs").glob(f"{step:012d}-*"):
        path.unlink()


def test_checkpoint_whose_packs_another_manager_removes_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CheckpointManager(tmp_path, keep_count=1) as other:

        def save_others() -> None:
            for step in (10, 11, 12):
                other.save(state(step), step).wait()
                other.wait()

        other.newest_step()
        monkeypatch.setattr(
            place, "open_backend", lambda url, **o: BeforeCommit(open_backend(url), 2, save_others)
        )
        with CheckpointManager(tmp_path, keep_count=1) as manager:
            manager.save(state(1), 1).wait()
            manager.wait()
            with pytest.raises(StorageError, match=r"was removed while .* is not committed"):
                manager.save(state(2), 2, is_full=False).wait()
            assert manager.steps() == [12]
            assert same(manager.load_state(), state(12))
            manager.save(state(3), 3, is_full=False).wait()
            manager.wait()
            assert manager.steps() == [3]
            assert same(manager.load_state(), state(3))


def test_manifest_that_cannot_be_taken_back_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class KeepsAll(BeforeCommit):
        def _delete_many(self, names):  # type: ignore[no-untyped-def]
            return [(name, StorageError("it stays")) for name in names]

    monkeypatch.setattr(
        place,
        "open_backend",
        lambda url, **o: KeepsAll(open_backend(url), 2, lambda: remove_packs(tmp_path, 1)),
    )
    with CheckpointManager(tmp_path) as manager:
        manager.save(state(1), 1).wait()
        with pytest.raises(StorageError, match=r"manifests/.*-000000000002\.json.*: delete it"):
            manager.save(state(2), 2, is_full=False).wait()


def test_copy_whose_packs_are_removed_from_the_main_storage_is_copied_again(run: Run) -> None:
    removals = [1]

    def remove_once() -> None:
        if removals:
            remove_packs(run.main, removals.pop())

    run.wrap_main(lambda backend: BeforeCommit(backend, 2, remove_once))
    with run.manager(incremental=True) as manager:
        for step in (1, 2):
            manager.save(state(step), step).wait_uploaded(30)
    assert not removals
    assert run.steps(run.main) == [1, 2]


def test_checkpoints_without_their_packs_cost_no_other_its_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with CheckpointManager(tmp_path, keep_count=2) as manager:
        for step in (1, 2, 3):
            manager.save(state(step), step).wait()
        manager.wait()
        remove_packs(tmp_path, 3)
        manager.save(state(4), 4)
        manager.wait()
        assert manager.steps() == [2, 3, 4], "two that load are kept"
        assert "checkpoint.damaged" in caplog.text
        manager.save(state(5), 5)
        manager.wait()
        assert manager.steps() == [4, 5], "the damaged one goes in its turn"


def test_last_checkpoint_that_loads_is_never_dropped(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(state(step), step).wait()
    for step in (2, 3):
        remove_packs(tmp_path, step)
    with CheckpointManager(tmp_path, keep_count=1) as manager:
        manager._pipeline.upkeep.clean()
        assert manager.steps() == [1, 3]
        assert same(manager.load_state(), state(1))
