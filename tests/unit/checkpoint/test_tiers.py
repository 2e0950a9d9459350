"""Two tiers: saves are committed in a local folder and copied to the main storage."""

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtruntime.checkpoint import CheckpointWriter, place, upload_queue
from dtruntime.checkpoint.manager import CheckpointManager
from dtruntime.errors import (
    CheckpointDamagedError,
    ConfigError,
    StorageError,
    StorageThrottledError,
)
from dtruntime.retry import Backoff
from dtruntime.storage import StorageBackend, open_backend
from dtruntime.testing import FaultRates, FaultyBackend, RecordingBackend

Make = Callable[[StorageBackend], StorageBackend]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload_queue, "BACKOFF", Backoff(first=0.005, longest=0.01))


def state(step: int) -> dict[str, Any]:
    frozen = np.random.default_rng(0).standard_normal(150_000)
    return {"frozen": frozen, "head": np.random.default_rng(step).random(500), "step": step}


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left["step"] == right["step"] and all(
        np.array_equal(left[key], right[key]) for key in ("frozen", "head")
    )


class Run:
    """The two folders of a run."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.main = folder / "main"
        self.local = folder / "local"
        self._monkeypatch = monkeypatch

    def manager(self, **options: Any) -> CheckpointManager:
        return CheckpointManager(self.main, local_tier=self.local, **options)

    def wrap_main(self, make: Make) -> None:
        """Put something in front of the main storage of managers that are made from here on."""

        def opened(url: str, **options: Any) -> StorageBackend:
            backend = open_backend(url, **options)
            return make(backend) if str(url) == str(self.main) else backend

        self._monkeypatch.setattr(place, "open_backend", opened)

    def unwrap_main(self) -> None:
        """Put nothing in front of it any more."""
        self._monkeypatch.setattr(place, "open_backend", open_backend)

    def steps(self, where: Path) -> list[int]:
        """What is in one of the places; everything that is listed loads and is right."""
        self.unwrap_main()
        with CheckpointManager(where) as reader:
            for step in reader.steps():
                assert same(reader.load_state(step), state(step)), step
            return reader.steps()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(tmp_path, monkeypatch)


class Gate(RecordingBackend):
    """Lets nobody look for packs or write before it is opened."""

    def __init__(self, inner: StorageBackend) -> None:
        super().__init__(inner)
        self.open = threading.Event()
        self.waiting = threading.Event()

    def record(self, operation: str, name: str, size: int = 0) -> None:
        super().record(operation, name, size)
        if operation in ("create", "writer") or (operation, name) == ("list", "packs"):
            self.waiting.set()
            assert self.open.wait(30)


@pytest.fixture
def gate(run: Run) -> Iterator[Gate]:
    made = Gate(open_backend(run.main))
    run.wrap_main(lambda _: made)
    yield made
    made.open.set()


def test_saves_are_durable_in_the_local_tier_before_the_main_storage_has_them(
    run: Run, gate: Gate
) -> None:
    with run.manager() as manager:
        handle = manager.save(state(1), 1)
        handle.wait(30)
        assert gate.waiting.wait(30)
        assert manager.steps() == [1]
        assert manager.latest().path.startswith(str(run.local))  # type: ignore[union-attr]
        assert not (run.main / "manifests").exists()
        with pytest.raises(TimeoutError, match="not in"):
            handle.wait_uploaded(0.05)
        with pytest.raises(TimeoutError):
            manager.wait(0.05)
        with pytest.raises(TimeoutError):
            manager.flush(0.05)
        gate.open.set()
        assert handle.wait_uploaded(30).step == 1
    assert run.steps(run.main) == [1]


async def test_upload_can_be_awaited(run: Run) -> None:
    with run.manager() as manager:
        handle = await manager.save_async(state(1), 1)
        assert (await handle.uploaded).step == 1
        assert (run.main / "manifests").exists()
    with CheckpointManager(run.main) as manager:
        assert (await manager.save(state(2), 2).uploaded).step == 2, "there is but one place"


@pytest.mark.parametrize(
    "options", [{}, {"incremental": True}, {"delta": True}, {"compression": "gzip"}], ids=str
)
def test_copies_are_the_same_files_with_the_same_numbers(run: Run, options: Any) -> None:
    with run.manager(local_keep=9, keep_count=9, **options) as manager:
        for step in range(1, 5):
            manager.save(state(step), step)
    for folder in ("manifests", "packs"):
        names = sorted(path.name for path in (run.local / folder).iterdir())
        assert sorted(path.name for path in (run.main / folder).iterdir()) == names
        for name in names:
            copied = (run.main / folder / name).read_bytes()
            assert copied == (run.local / folder / name).read_bytes()
    assert run.steps(run.main) == [1, 2, 3, 4]


def test_every_nth_is_uploaded_and_at_the_end_the_newest(run: Run) -> None:
    with run.manager(upload_every=3, local_keep=2) as manager:
        for step in range(1, 8):
            manager.save(state(step), step).wait()
        manager.wait(30)
        assert run.steps(run.main) == [3, 6]
        assert manager.steps() == [3, 6, 7]
    assert run.steps(run.main) == [3, 6, 7]
    assert run.steps(run.local) == [6, 7]


def test_flush_uploads_the_newest_and_the_run_goes_on(run: Run) -> None:
    with run.manager(upload_every=100) as manager:
        manager.save(state(1), 1)
        manager.flush(30)
        assert run.steps(run.main) == [1]
        manager.save(state(2), 2).wait()
        assert run.steps(run.main) == [1]


def test_waiting_uploads_what_was_not_due_and_it_does_not_become_the_newest(run: Run) -> None:
    with run.manager(upload_every=2, local_keep=4) as manager:
        first = manager.save(state(1), 1)
        manager.save(state(2), 2).wait_uploaded(30)
        first.wait_uploaded(30)
        third = manager.save(state(3), 3)
        third.wait()
    with CheckpointManager(run.main) as reader:
        assert [info.step for info in reader.checkpoints()] == [1, 2, 3]
        assert reader.newest_step() == 3


def test_waiting_for_what_was_dropped_says_so(run: Run) -> None:
    with run.manager(upload_every=100, local_keep=1) as manager:
        first = manager.save(state(1), 1)
        manager.save(state(2), 2)
        manager.wait()
        with pytest.raises(StorageError, match=r"was not due.*local_keep"):
            first.wait_uploaded(30)


@pytest.mark.parametrize("options", [{"incremental": True}, {"delta": True}], ids=str)
def test_increment_brings_the_packs_of_its_base(run: Run, options: Any) -> None:
    with run.manager(upload_every=4, local_keep=2, **options) as manager:
        for step in range(1, 5):
            manager.save(state(step), step).wait()
    assert run.steps(run.main) == [4]
    assert len(list((run.main / "packs").iterdir())) > 1


def test_increment_copies_only_what_is_not_there(run: Run) -> None:
    made: list[RecordingBackend] = []

    def recording(backend: StorageBackend) -> StorageBackend:
        made.append(RecordingBackend(backend))
        return made[-1]

    run.wrap_main(recording)
    with run.manager(incremental=True) as manager:
        manager.save(state(1), 1).wait_uploaded(30)
        made[-1].reset()
        manager.save(state(2), 2).wait_uploaded(30)
        sent = sum(call.size for call in made[-1].calls if call.operation == "writer.write")
    assert 0 < sent < 50_000


def test_new_machine_loads_from_the_main_storage_and_goes_on_counting(run: Run) -> None:
    with run.manager(keep_count=9) as manager:
        for step in (1, 2, 3):
            manager.save(state(step), step)
    shutil.rmtree(run.local)
    with run.manager(keep_count=9) as manager:
        assert manager.newest_step() == 3
        assert same(manager.load_state(), state(3))
        manager.save(state(2), 2).wait()  # rolled back
        assert manager.newest_step() == 2
    with CheckpointManager(run.main) as reader:
        assert [info.step for info in reader.checkpoints()] == [1, 2, 3, 2]


def test_newer_local_checkpoint_is_loaded_and_uploaded_by_the_next_manager(
    run: Run, gate: Gate
) -> None:
    manager = run.manager()
    manager.save(state(1), 1).wait()
    manager.save(state(2), 2).wait()
    manager._place.session.close()  # as the death of its process would
    run._monkeypatch.setattr(place, "open_backend", open_backend)
    with run.manager() as successor:
        assert successor.latest().step == 2  # type: ignore[union-attr]
        assert same(successor.load_state(), state(2))
        successor.wait(30)
        assert run.steps(run.main) == [1, 2]
    gate.open.set()
    manager.close()


def damage(path: Path, how: str) -> None:
    if how == "gone":
        path.unlink()
        return
    data = bytearray(path.read_bytes())
    if how == "cut":
        del data[len(data) // 2 :]
    else:
        data[len(data) * 3 // 4] ^= 1
    path.write_bytes(data)


def newest_files(folder: Path, kind: str) -> Path:
    return max((folder / kind).iterdir())


@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
@pytest.mark.parametrize("kind", ["packs", "manifests"])
def test_damaged_local_copy_is_read_from_the_main_storage(run: Run, kind: str, how: str) -> None:
    with run.manager() as manager:
        for step in (1, 2):
            manager.save(state(step), step)
    damage(newest_files(run.local, kind), how)
    with run.manager() as manager:
        assert same(manager.load_state(), state(2)), "not an older one"
        assert same(manager.load_state(2), state(2))
        assert manager.load_latest().step == 2
        assert manager.latest().step == 2  # type: ignore[union-attr]
        assert [info.step for info in manager.checkpoints()] == [1, 2]
    damage(newest_files(run.main, kind), how)
    with run.manager() as manager:
        assert same(manager.load_state(), state(1)), "the newest that is good somewhere"


def test_damage_is_found_before_it_is_uploaded_and_the_next_save_stores_everything(
    run: Run, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    with run.manager(incremental=True) as manager:
        first = manager.save(state(1), 1)
        first.wait()
        damage(newest_files(run.local, "packs"), "flipped")
        gate.open.set()
        with pytest.raises(CheckpointDamagedError, match="only in the local tier"):
            first.wait_uploaded(30)
        second = manager.save(state(2), 2)
        second.wait_uploaded(30)
        assert second.bytes_written == first.bytes_written
    assert "checkpoint.upload_impossible" in caplog.text
    assert run.steps(run.main) == [2]


def test_damage_that_nobody_looked_at_is_raised_at_the_end(run: Run, gate: Gate) -> None:
    manager = run.manager(upload_every=2)
    for step in (1, 2, 3):
        manager.save(state(step), step).wait()
    damage(sorted((run.local / "packs").iterdir())[1], "flipped")
    gate.open.set()
    with pytest.raises(CheckpointDamagedError, match="step 2"):
        manager.close()
    assert run.steps(run.main) == [3], "what could be uploaded was"


def faulty(run: Run, **options: Any) -> list[FaultyBackend]:
    """The main storage, which will fail once it is armed."""
    made: list[FaultyBackend] = []

    def make(backend: StorageBackend) -> StorageBackend:
        made.append(FaultyBackend(backend, **options))
        made[-1].armed = False
        return made[-1]

    run.wrap_main(make)
    return made


def test_failing_main_storage_stops_no_save_and_is_told(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    made = faulty(run, rates=FaultRates(throttle=1.0))
    with run.manager(local_keep=1, keep_count=9) as manager:
        manager.save(state(1), 1).wait_uploaded(30)
        made[0].armed = True
        handles = [manager.save(state(step), step) for step in (2, 3, 4)]
        for handle in handles:
            handle.wait(30)
        with pytest.raises(StorageError, match=r"step 4 is only in the local tier.*503") as caught:
            handles[-1].wait_uploaded(30)
        assert isinstance(caught.value.__cause__, StorageThrottledError)
        with pytest.raises(StorageError, match="only in the local tier"):
            manager.wait(30)
        assert "checkpoint.upload_failed" in caplog.text
        assert len(list((run.local / "manifests").iterdir())) >= 3, "they are due, and stay"
        made[0].armed = False
        handles[-1].wait_uploaded(30)
        assert handles[0].wait_uploaded(30).step == 2
    assert run.steps(run.main) == [1, 2, 3, 4]
    assert run.steps(run.local) == [4]


def test_main_storage_that_stays_away_is_an_error_at_the_end_and_nothing_is_lost(run: Run) -> None:
    made = faulty(run, rates=FaultRates(disconnect=1.0))
    manager = run.manager(local_keep=1)
    manager.save(state(1), 1).wait_uploaded(30)
    made[0].armed = True
    manager.save(state(2), 2).wait()
    manager.save(state(3), 3).wait()
    with pytest.raises(StorageError, match="only in the local tier"):
        manager.close()
    with run.manager() as successor:
        assert same(successor.load_state(), state(3))
    assert run.steps(run.main) == [1, 2, 3]


RATES = FaultRates(throttle=0.05, disconnect=0.05, lost_reply=0.08, partial_write=0.05)


@pytest.mark.parametrize("options", [{}, {"incremental": True}, {"delta": True}], ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_main_storage_that_fails_now_and_then_gets_everything_in_order(
    run: Run, seed: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload_queue, "ATTEMPTS", 50)
    made = faulty(run, seed=seed, rates=RATES)
    with run.manager(keep_count=20, **options) as manager:
        manager.save(state(1), 1).wait_uploaded(30)
        made[0].armed = True
        for step in range(2, 13):
            handle = manager.save(state(step), step)
            handle.wait(30)
            if step % 4 == 0:
                handle.wait_uploaded(60)
                assert run.steps(run.main) == list(range(1, step + 1))
    assert made[0].faults
    with CheckpointManager(run.main) as reader:
        assert [info.step for info in reader.checkpoints()] == list(range(1, 13))
    assert run.steps(run.main) == list(range(1, 13))


def test_main_storage_that_is_away_from_the_start(run: Run) -> None:
    made = faulty(run, rates=FaultRates(disconnect=1.0), only=lambda what, name: True)
    manager = run.manager()
    made[0].armed = True
    with pytest.raises(StorageError, match="reset, on purpose"):
        manager.save(state(1), 1).wait(30)
    with pytest.raises(StorageError, match="reset, on purpose"):
        manager.load_state()
    made[0].armed = False
    manager.save(state(2), 2).wait_uploaded(30)
    manager.close()

    with CheckpointManager(run.main) as elsewhere:  # goes on without this machine
        for step in (5, 6, 7):
            elsewhere.save(state(step), step).wait()
    made = faulty(run, rates=FaultRates(disconnect=1.0))
    with run.manager() as manager:
        made[0].armed = True
        manager.save(state(8), 8).wait(30)
        with pytest.raises(StorageError):
            manager.wait(30)
        made[0].armed = False
        manager.wait(30)
        assert manager.newest_step() == 8
    with CheckpointManager(run.main) as reader:
        assert [info.step for info in reader.checkpoints()] == [2, 5, 6, 7, 8]


def test_another_checkpoint_of_the_same_number_in_the_main_storage_is_the_newer_one(
    run: Run,
) -> None:
    with run.manager() as manager:
        manager.save(b"common", 1)
    with CheckpointManager(run.local) as here, CheckpointManager(run.main) as elsewhere:
        here.save(b"nobody heard of it", 2).wait()
        elsewhere.save(b"went on", 2).wait()
    with run.manager() as manager:
        assert manager.load_bytes() == b"went on"
        manager.save(b"both", 3).wait()
        assert manager.load_bytes() == b"both"
    with CheckpointManager(run.main) as reader:
        assert [reader.load_bytes(step) for step in reader.steps()] == [
            b"common",
            b"went on",
            b"both",
        ]


def test_manager_that_only_looks_writes_nothing(run: Run) -> None:
    with run.manager() as manager:
        manager.save(state(1), 1)
    before = sorted(run.local.rglob("*")), sorted(run.main.rglob("*"))
    with run.manager() as manager:
        assert manager.newest_step() == 1
        assert same(manager.load_state(), state(1))
    with run.manager():
        pass
    assert (sorted(run.local.rglob("*")), sorted(run.main.rglob("*"))) == before


def test_local_tier_of_another_run_is_refused(run: Run, tmp_path: Path) -> None:
    with run.manager() as manager:
        manager.save(b"1", 1)
    with (
        CheckpointManager(tmp_path / "other", local_tier=run.local) as manager,
        pytest.raises(ConfigError, match=r"belongs to .*/main, not to .*/other: use another"),
    ):
        manager.load_bytes()
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"local_tier": "s3://bucket/x"}, "folder of this machine"),
        ({"local_tier": "."}, "the same place"),
        ({"local_tier": "local", "local_keep": 0}, "local_keep"),
        ({"local_tier": "local", "upload_every": 0}, "upload_every"),
    ],
)
def test_tiers_that_make_no_sense_are_refused(
    options: dict[str, Any], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=complaint):
        CheckpointManager(tmp_path, **options)


def test_writer_of_several_names_has_a_local_tier_for_each(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "main", local_tier=tmp_path / "local") as writer:
        for name in ("a", "b"):
            writer.write_checkpoint(name, 1, name.encode())
            assert (tmp_path / "local" / name / "manifests").exists()
    with CheckpointWriter(tmp_path / "main") as reader:
        assert [reader.load_checkpoint(name) for name in ("a", "b")] == [b"a", b"b"]


def test_each_tier_keeps_its_own_number(run: Run) -> None:
    with run.manager(keep_count=2, local_keep=3) as manager:
        for step in range(1, 6):
            manager.save(state(step), step)
    assert run.steps(run.main) == [4, 5]
    assert run.steps(run.local) == [3, 4, 5]


def test_local_tier_that_was_far_ahead_is_cleared_at_the_end(run: Run, gate: Gate) -> None:
    with run.manager(local_keep=1) as manager:
        for step in range(1, 6):
            manager.save(state(step), step).wait(30)
        assert len(list((run.local / "packs").iterdir())) == 5
        gate.open.set()
    assert run.steps(run.local) == [5]
    assert len(list((run.local / "packs").iterdir())) == 1


def test_replaced_manager_does_not_miss_what_its_successor_has_uploaded_and_dropped(
    run: Run, gate: Gate
) -> None:
    with run.manager() as replaced:
        handles = [replaced.save(state(step), step) for step in (1, 2, 3)]
        handles[-1].wait(30)
        assert gate.waiting.wait(30)
        run.unwrap_main()
        with run.manager(keep_count=1, local_keep=1) as successor:
            for step in (4, 5, 6):
                successor.save(state(step), step).wait(30)
        gate.open.set()
        with pytest.raises(StorageError, match="another process has dropped it"):
            handles[0].wait_uploaded(30)
    assert run.steps(run.main) == run.steps(run.local) == [6]
