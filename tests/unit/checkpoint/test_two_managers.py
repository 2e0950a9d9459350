"""Two managers that do not know of each other save to one place: what is listed can be loaded."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from dtruntime.checkpoint.manager import CheckpointManager
from dtruntime.errors import StorageError
from dtruntime.storage import StorageBackend, open_backend
from dtruntime.testing import RecordingBackend
from tests.support.checkpoint_tiers import Run, same, state


class BeforeCommit(RecordingBackend):
    """Lets something happen when the manifest of a step is about to be created."""

    def __init__(self, inner: StorageBackend, step: int, happen: Callable[[], object]) -> None:
        super().__init__(inner)
        self._ending = f"-{step:012d}.json"
        self._happen = happen

    def record(self, operation: str, name: str, size: int = 0) -> None:
        super().record(operation, name, size)
        if operation == "create" and name.endswith(self._ending):
            self._happen()


class BeforeRemoval(RecordingBackend):
    """Lets something happen once, when the pack of a step is about to be deleted."""

    def __init__(self, inner: StorageBackend, step: int, happen: Callable[[], object]) -> None:
        super().__init__(inner)
        self._start = f"packs/{step:012d}-"
        self._happen = [happen]

    def _delete_many(self, names):
        if self._happen and any(name.startswith(self._start) for name in names):
            self._happen.pop()()
        return super()._delete_many(names)


def remove_packs(folder: Path, step: int) -> None:
    for path in (folder / "packs").glob(f"{step:012d}-*"):
        path.unlink()


def test_checkpoint_whose_packs_another_manager_removes_is_taken_back(
    tmp_path: Path,
) -> None:
    with CheckpointManager(tmp_path, keep_count=1) as other:

        def save_others() -> None:
            for step in (10, 11, 12):
                other.save(state(step), step).wait()
                other.wait()

        other.newest_step()
        storage = BeforeCommit(open_backend(tmp_path), 2, save_others)
        with CheckpointManager(storage, keep_count=1) as manager:
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


def test_retention_drops_each_of_two_checkpoints_that_were_committed_at_the_same_moment(
    tmp_path: Path,
) -> None:
    with CheckpointManager(tmp_path, keep_count=2) as other:
        other.newest_step()
        storage = BeforeCommit(open_backend(tmp_path), 2, lambda: other.save(state(10), 10).wait())
        with CheckpointManager(storage, keep_count=2) as manager:
            for step in (1, 2):
                manager.save(state(step), step).wait()
                manager.wait()
            other.wait()
            names = sorted(path.name for path in (tmp_path / "manifests").iterdir())
            assert [name.split("-")[0] for name in names] == ["00000002", "00000002"]
            for step in (3, 4):
                manager.save(state(step), step).wait()
                manager.wait()
            assert manager.steps() == [3, 4]


def test_checkpoint_committed_while_another_manager_removes_its_packs_is_not_believed(
    tmp_path: Path,
) -> None:
    """The other one has looked at what is needed, and not deleted anything yet."""
    reached, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def hold() -> None:
        reached.set()
        assert go_on.wait(60)

    def let_commit() -> None:
        go_on.set()
        ended.wait(1)  # it waits in its turn, or else it ends at once

    def opened() -> StorageBackend:
        return BeforeCommit(BeforeRemoval(open_backend(tmp_path), 1, let_commit), 2, hold)

    with (
        CheckpointManager(opened(), keep_count=1) as manager,
        CheckpointManager(opened(), keep_count=1) as other,
    ):
        manager.save(state(1), 1).wait()
        manager.wait()
        handle = manager.save(state(2), 2, is_full=False)
        handle.future.add_done_callback(lambda _: ended.set())
        assert reached.wait(60)
        for step in (10, 11):
            other.save(state(step), step).wait()
            other.wait()
        assert go_on.is_set(), "the packs of step 1 were removed"
        with pytest.raises(StorageError, match=r"was removed while .* is not committed"):
            handle.wait(60)
        assert manager.steps() == [11]
        assert same(manager.load_state(), state(11))


def test_manifest_that_cannot_be_taken_back_is_named(
    tmp_path: Path,
) -> None:
    class KeepsAll(BeforeCommit):
        def _delete_many(self, names):
            return [(name, StorageError("it stays")) for name in names]

    storage = KeepsAll(open_backend(tmp_path), 2, lambda: remove_packs(tmp_path, 1))
    with CheckpointManager(storage) as manager:
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
        manager.engine.cleanup.clean()
        assert manager.steps() == [1, 3]
        assert same(manager.load_state(), state(1))


def test_writer_on_another_machine_is_not_judged_by_locks(tmp_path: Path) -> None:
    """Some network file systems show the locks of one machine to nobody else."""
    elsewhere = CheckpointManager(tmp_path, keep_count=1)
    elsewhere.save(state(1), 1).wait()
    (lock,) = (tmp_path / "locks").iterdir()
    name = lock.stem
    elsewhere.close()
    lock.write_text("17 another-host\n")
    unfinished = tmp_path / "packs" / f"{5:012d}-s{name}-00000000.pack"
    unfinished.write_bytes(b"being written")
    with CheckpointManager(tmp_path, keep_count=1) as manager:
        assert manager.other_writers() == []
        for step in (2, 3):
            manager.save(state(step), step).wait()
    assert unfinished.exists()
    assert lock.exists()
    assert same(CheckpointManager(tmp_path).load_state(), state(3))
