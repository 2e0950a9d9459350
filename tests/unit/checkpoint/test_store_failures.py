"""Stores that fail during saves and loads: nothing is lost, torn or silently replaced."""

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtruntime.checkpoint.manager import CheckpointManager
from dtruntime.checkpoint.store.catalog import Catalog
from dtruntime.checkpoint.store.writer_lock import WriterLock
from dtruntime.errors import (
    CheckpointDamagedError,
    ConnectionError,
    StorageError,
    StorageThrottledError,
    SyncError,
)
from dtruntime.storage import StorageBackend, open_backend
from dtruntime.testing import FaultRates, FaultyBackend, RecordingBackend


def state(step: int) -> dict[str, Any]:
    frozen = np.random.default_rng(0).standard_normal(150_000)
    return {"frozen": frozen, "head": np.random.default_rng(step).random(500), "step": step}


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left["step"] == right["step"] and all(
        np.array_equal(left[key], right[key]) for key in ("frozen", "head")
    )


def check_everything(manager: CheckpointManager) -> list[int]:
    """Every checkpoint that is listed loads and is right."""
    for step in manager.steps():
        assert same(manager.load_state(step), state(step)), step
    return manager.steps()


RATES = FaultRates(throttle=0.04, disconnect=0.04, lost_reply=0.06, partial_write=0.04)


@pytest.mark.parametrize("options", [{}, {"incremental": True}, {"delta": True}], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_failing_store_never_breaks_what_is_listed(
    tmp_path: Path, seed: int, options: dict[str, Any]
) -> None:
    storage = FaultyBackend(open_backend(tmp_path), seed, RATES)
    succeeded = 0
    errors: list[str] = []
    with CheckpointManager(storage, keep_count=3, **options) as manager:
        for step in range(1, 16):
            handle = manager.save(state(step), step)
            try:
                handle.wait(30)
            except StorageError as exc:
                errors.append(str(exc))
            else:
                succeeded = step
            manager.wait(30)  # nothing is removed while the reader looks
            with CheckpointManager(tmp_path) as reader:
                steps = check_everything(reader)
            assert max(steps, default=0) >= succeeded
        assert errors
        assert all("on purpose" in error for error in errors)
        storage.armed = False
        for step in (16, 17, 18):
            manager.save(state(step), step)
        manager.wait(30)
        assert check_everything(manager) == [16, 17, 18]
        # What they need, what the one dropped last needed, and, of differences, what those are of.
        most = 14 if options else 5
        assert len(list((tmp_path / "packs").glob("*.pack"))) <= most


def only_once(folder: Path, operation: str, start: str) -> StorageBackend:
    """The first such operation is carried out, and its answer is lost."""
    return FaultyBackend(
        open_backend(folder),
        rates=FaultRates(lost_reply=1.0),
        only=lambda what, name: what == operation and name.startswith(start),
        limit=1,
    )


def test_manifest_whose_creation_was_not_answered_is_a_commit(tmp_path: Path) -> None:
    with CheckpointManager(only_once(tmp_path, "create", "manifests/")) as manager:
        manager.save(state(1), 1).wait()
        assert check_everything(manager) == [1]


def test_pack_whose_end_was_not_answered_fails_and_goes(tmp_path: Path) -> None:
    with CheckpointManager(only_once(tmp_path, "writer.finish", "packs/")) as manager:
        with pytest.raises(StorageError, match="answer was lost"):
            manager.save(state(1), 1).wait()
        assert not list(tmp_path.glob("packs/*"))
        manager.save(state(2), 2).wait()
        assert check_everything(manager) == [2]


class DownAfterCommit(RecordingBackend):
    """Creates the manifest, does not say so, and answers nothing for a while."""

    down = False

    def record(self, operation: str, name: str, size: int = 0) -> None:
        if self.down:
            raise StorageError("the store is down")

    def _create(self, name: str, views: Any) -> bool:
        super()._create(name, views)
        self.down = True
        raise StorageError("the store is down")


def test_store_that_dies_in_the_moment_of_the_commit_keeps_the_checkpoint(
    tmp_path: Path,
) -> None:
    storage = DownAfterCommit(open_backend(tmp_path))
    with CheckpointManager(storage) as manager:
        with pytest.raises(StorageError, match="is down"):
            manager.save(state(1), 1).wait()
        storage.down = False
        assert check_everything(manager) == [1], "it was committed, and nothing of it is deleted"
        with pytest.raises(StorageError, match="is down"):
            manager.save(state(2), 2).wait()
        storage.down = False
        assert check_everything(manager) == [1, 2]


def test_throttled_store_is_no_reason_to_load_an_older_checkpoint(tmp_path: Path) -> None:
    numbers = np.arange(1_000_000, dtype=np.float32)
    with CheckpointManager(tmp_path, delta=True) as manager:
        for step in (1, 2):
            noise = np.frombuffer(np.random.default_rng(step).bytes(2**20), np.uint8)
            saved = manager.save({"a": numbers + step, "b": noise, "step": step}, step).wait()
    assert 2**20 < saved.written_bytes < numbers.nbytes, "some of it should be differences"
    # A chunk that is a difference is read by itself, with the one that it differs from.
    for operation in ("list", "read", "read_ranges", "read_into"):
        throttled = FaultyBackend(
            open_backend(tmp_path),
            rates=FaultRates(throttle=1.0),
            only=lambda what, name, operation=operation: what == operation,  # type: ignore[misc]
            limit=1,
        )
        with CheckpointManager(throttled) as manager:
            with pytest.raises(StorageThrottledError):
                manager.load_state()
            assert manager.load_state()["step"] == 2


def test_increments_do_not_build_upon_packs_that_are_gone_or_cut_off(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, incremental=True) as manager:
        for step in (1, 2):
            manager.save(state(step), step).wait()
        (first,) = (tmp_path / "packs").glob("000000000001-*")
        first.write_bytes(first.read_bytes()[:9000])
        assert manager.save(state(3), 3).wait().written_bytes > 1_000_000
        assert same(manager.load_state(3), state(3))
        (third,) = (tmp_path / "packs").glob("000000000003-*")
        third.unlink()
        manager.save(state(4), 4).wait()
        assert same(manager.load_state(), state(4))


def test_pack_removed_during_an_incremental_save_fails_it_and_the_next_one_works(
    tmp_path: Path,
) -> None:
    class Removing(RecordingBackend):
        on = False

        def record(self, operation: str, name: str, size: int = 0) -> None:
            if self.on and operation == "writer.finish":
                self.on = False
                for path in (tmp_path / "packs").glob("000000000001-*"):
                    path.unlink()

    storage = Removing(open_backend(tmp_path))
    with CheckpointManager(storage, incremental=True) as manager:
        manager.save(state(1), 1).wait()
        storage.on = True
        with pytest.raises(StorageError, match=r"packs/000000000001-.* was removed while"):
            manager.save(state(2), 2).wait()
        manager.save(state(3), 3).wait()
        assert manager.steps() == [1, 3]
        assert same(manager.load_state(), state(3))


class Refusing:
    """A coordinator that does not take a commit."""

    rank = 0

    def __init__(self, error: Exception) -> None:
        self.error = error

    def begin_checkpoint(self, step: int) -> str:
        raise NotImplementedError

    def latest_checkpoint(self) -> None:
        return None

    def commit_checkpoint(self, *_: object, **__: object) -> None:
        raise self.error

    def report_checkpoints(self, *_: object, **__: object) -> int:
        raise self.error


def test_checkpoint_stays_when_the_coordinator_cannot_be_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    away = Refusing(ConnectionError("nobody answers"))
    with CheckpointManager(tmp_path, orchestrator=away) as manager:
        manager.save(state(1), 1).wait()
        assert check_everything(manager) == [1]
    assert "checkpoint.not_announced" in caplog.text


def test_replaced_writer_takes_its_checkpoint_back(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(state(1), 1).wait()
    fenced = Refusing(SyncError("registered again by another", reason="superseded"))
    with CheckpointManager(tmp_path, orchestrator=fenced) as manager:
        with pytest.raises(StorageError, match="registered again"):
            manager.save(state(2), 2).wait()
        assert check_everything(manager) == [1]
    with CheckpointManager(tmp_path) as manager:
        manager.save(state(3), 3)
        manager.wait()
        assert not list((tmp_path / "packs").glob("000000000002-*"))


def test_damaged_manifest_does_not_stop_retention_by_metric(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep_count=1, keep_best=1) as manager:
        manager.save(state(1), 1, metrics={"loss": 0.1}).wait()
    (first,) = (tmp_path / "manifests").iterdir()
    first.write_bytes(b"{}")
    with CheckpointManager(tmp_path, keep_count=1, keep_best=1) as manager:
        for step in (2, 3, 4):
            manager.save(state(step), step, metrics={"loss": 1 / step}).wait()
        assert check_everything(manager) == [4]
        assert len(list((tmp_path / "packs").iterdir())) <= 2


def test_retention_drops_nothing_before_the_next_one_is_durable(tmp_path: Path) -> None:
    """Durable 10, in flight 20, current 30, incomplete 40, keep 1."""
    gate, arrived = threading.Event(), threading.Event()

    class Slow(RecordingBackend):
        def record(self, operation: str, name: str, size: int = 0) -> None:
            if operation == "writer.finish" and "000000000020-" in name:
                arrived.set()
                assert gate.wait(30)
            super().record(operation, name, size)

    with CheckpointManager(tmp_path, keep_count=1) as manager:
        manager.save(state(10), 10).wait()
    storage = Slow(open_backend(tmp_path))
    with (
        CheckpointManager(storage, keep_count=1) as manager,
        CheckpointManager(tmp_path) as other,
    ):
        incomplete = f"packs/{other.engine.store.session.tag('000000000040')}x.pack"
        other.engine.store.backend.write(incomplete, b"of a live writer")
        in_flight = manager.save(state(20), 20)
        current = manager.save(state(30), 30)
        assert arrived.wait(30)
        assert check_everything(other) == [10]
        gate.set()
        in_flight.wait()
        current.wait()
        assert check_everything(manager) == [30]
        assert (tmp_path / incomplete).exists()
        calls = storage.calls
        commit = [call.name for call in calls].index("manifests/00000002-000000000020.json")
        deletions = [call for call in calls if call.operation == "delete_many" and call.size]
        assert deletions
        assert not [call for call in calls[:commit] if call in deletions]


@pytest.mark.parametrize("jump", [-(10**8), 10**8])
def test_clock_that_jumps_changes_neither_order_nor_what_is_swept(
    jump: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"memory://clock{jump}"
    true_time = time.time
    with CheckpointManager(url) as manager, CheckpointManager(url) as other:
        manager.save(b"1", 1).wait()
        backend = manager.engine.store.backend
        under_way = f"packs/{other.engine.store.session.tag('000000000009')}x.pack"
        backend.write(under_way, b"of a live writer")
        monkeypatch.setattr(time, "time", lambda: true_time() + jump)
        catalog = Catalog(backend)
        catalog.sweep(WriterLock(backend).is_dead)
        monkeypatch.undo()
        assert backend.exists(under_way), "by this machine's clock it may look old"
        monkeypatch.setattr(time, "time", lambda: true_time() + jump)
        manager.save(b"2", 2).wait()
        monkeypatch.undo()
        assert manager.load_bytes() == b"2"
        assert [info.step for info in manager.checkpoints()] == [1, 2]


@pytest.mark.parametrize("damage", [b"", b"{}", b"garbage", None])
def test_pointer_is_a_hint_that_may_be_damaged_or_gone(
    tmp_path: Path, damage: bytes | None
) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(b"1", 1).wait()
        pointer = tmp_path / "latest.json"
        pointer.unlink() if damage is None else pointer.write_bytes(damage)
        assert manager.load_bytes() == b"1"
        manager.save(b"2", 2).wait()
        assert b'"step":2' in pointer.read_bytes()


def test_loading_writes_nothing(tmp_path: Path) -> None:
    missing = tmp_path / "typo"
    with CheckpointManager(missing) as manager:
        assert manager.steps() == []
        with pytest.raises(FileNotFoundError):
            manager.load_state()
    assert not missing.exists()
    with CheckpointManager(tmp_path / "ckpt") as manager:
        manager.save(b"1", 1).wait()
    before = sorted(tmp_path.rglob("*"))
    with CheckpointManager(tmp_path / "ckpt") as manager:
        assert manager.load_bytes() == b"1"
        assert sorted(tmp_path.rglob("*")) == before


def test_lost_file_of_the_only_checkpoint_is_damage_and_not_an_empty_place(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(b"1" * 100, 1).wait()
        (pack,) = (tmp_path / "packs").iterdir()
        pack.unlink()
        with pytest.raises(CheckpointDamagedError) as caught:
            manager.load_bytes()
        assert not isinstance(caught.value, FileNotFoundError)
        assert caught.value.file == str(pack)


def test_save_that_stores_nothing_is_incremental(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(state(1), 1).wait()
        manager.save(state(1), 2, is_full=False).wait()
        manager.save({}, 3).wait()
        assert [info.is_full for info in manager.checkpoints()] == [True, False, True]
