"""Two tiers: saves are committed in a local folder and copied to the main storage."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from dtruntime.checkpoint import CheckpointWriter
from dtruntime.checkpoint.manager import CheckpointManager
from dtruntime.errors import (
    ConfigError,
    StorageError,
)
from dtruntime.storage import StorageBackend
from dtruntime.testing import RecordingBackend
from tests.support.checkpoint_tiers import Gate, Run, same, state


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
    manager.engine.store.session.close()  # as the death of its process would
    run.unwrap_main()
    with run.manager() as successor:
        assert successor.latest().step == 2  # type: ignore[union-attr]
        assert same(successor.load_state(), state(2))
        successor.wait(30)
        assert run.steps(run.main) == [1, 2]
    gate.open.set()
    manager.close()


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
