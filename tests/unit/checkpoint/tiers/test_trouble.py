"""Two tiers, one of which is damaged or fails."""

from pathlib import Path
from typing import Any

import pytest

from dtruntime.checkpoint.manager import CheckpointManager
from dtruntime.checkpoint.upload import uploader
from dtruntime.errors import (
    CheckpointDamagedError,
    StorageError,
    StorageThrottledError,
)
from dtruntime.storage import StorageBackend
from dtruntime.testing import FaultRates, FaultyBackend
from tests.support.checkpoint_tiers import Gate, Run, same, state


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
    monkeypatch.setattr(uploader, "ATTEMPTS", 50)
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
