"""Saves and loads of one writer: the contract."""

import array
import asyncio
import gc
import itertools
import json
import mmap
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtruntime.checkpoint import CheckpointWriter
from dtruntime.checkpoint.file_format.manifest import PACKS
from dtruntime.checkpoint.manager import CheckpointManager
from dtruntime.errors import CheckpointNotFoundError, StorageError
from dtruntime.storage import LocalBackend, MemoryBackend, open_backend
from dtruntime.testing import RecordingBackend, eventually


def state(seed: int, size: int = 2000):
    rng = np.random.default_rng(seed)
    return {"w": rng.standard_normal(size), "step": seed, "nested": {"b": rng.integers(0, 9, 7)}}


def same(left, right) -> bool:
    return (
        np.array_equal(left["w"], right["w"])
        and left["step"] == right["step"]
        and np.array_equal(left["nested"]["b"], right["nested"]["b"])
    )


def packs(folder: Path) -> list[str]:
    return sorted(os.listdir(folder / PACKS)) if (folder / PACKS).exists() else []


@pytest.mark.parametrize("data", [b"", b"x", os.urandom(70_000), bytes(20 * 2**20)])
def test_bytes_come_back(manager, data):
    handle = manager.save(data, step=7, epoch=2)
    saved = handle.wait()
    assert saved.checkpoint_id == handle.checkpoint_id
    assert manager.load_bytes() == data
    assert manager.load_bytes(7) == data
    assert manager.get_checkpoint(handle.checkpoint_id) == data
    info = manager.load_latest()
    assert (info.step, info.epoch, info.size_bytes) == (7, 2, len(data))
    assert info.verified is True


def test_closed_manager_leaves_nothing_that_no_checkpoint_needs(tmp_path):
    with CheckpointManager(tmp_path, keep_count=3) as manager:
        for step in range(7):
            manager.save(state(step), step=step)
    assert [int(name.split("-")[0]) for name in packs(tmp_path)] == [4, 5, 6]


def test_manager_that_closes_leaves_what_another_may_refer_to(tmp_path):
    with CheckpointManager(tmp_path) as other:
        other.save(state(0), step=0).wait()
        with CheckpointManager(tmp_path, keep_count=1) as manager:
            for step in (1, 2):
                manager.save(state(step), step=step)
        assert [int(name.split("-")[0]) for name in packs(tmp_path)] == [1, 2]


def test_state_dicts_come_back(manager):
    manager.save(state(1), step=1)
    manager.save(state(2), step=2)
    assert same(manager.load_state(), state(2))
    assert same(manager.load_state(1), state(1))


def test_state_may_be_changed_as_soon_as_save_returns(manager):
    changing = state(3, 500_000)
    expected = changing["w"].copy()
    handle = manager.save(changing, step=1)
    changing["w"][:] = 0
    handle.wait()
    assert np.array_equal(manager.load_state()["w"], expected)


async def test_asynchronous_face(tmp_path):
    manager = CheckpointManager(path=tmp_path)
    handle = await manager.save_async(b"model", step=100)
    assert (await handle).step == 100
    assert await manager.list_checkpoints() == [100]
    assert await manager.load(step=0) == b"model"
    assert await manager.load() == b"model"
    assert await manager.load(step=100) == b"model"
    await asyncio.to_thread(manager.close)


def test_pending_save_is_seen_by_the_same_manager(manager):
    data = os.urandom(30 * 2**20)
    manager.save(data, step=1)
    assert manager.steps() == [1]
    assert manager.load_bytes() == data


def test_missing_checkpoints_are_file_not_found(manager):
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        manager.load_bytes()
    manager.save(b"x", step=5).wait()
    with pytest.raises(CheckpointNotFoundError, match=r"step 6 .*there: 5"):
        manager.load_bytes(6)
    with pytest.raises(CheckpointNotFoundError, match="'nope'"):
        manager.get_checkpoint("nope")


def test_newest_commit_is_the_latest_also_at_a_lower_step(manager):
    manager.save(b"late", step=100).wait()
    manager.save(b"rolled back", step=60).wait()
    assert manager.load_bytes() == b"rolled back"
    assert manager.steps() == [60, 100]


def test_step_saved_again_gives_the_newer_one(manager):
    manager.save(b"first", step=5).wait()
    manager.save(b"second", step=5).wait()
    assert manager.load_bytes(5) == b"second"
    assert manager.steps() == [5]


def test_only_what_changed_is_stored(manager, tmp_path):
    big: dict[str, Any] = {
        "frozen": np.random.default_rng(0).bytes(12 * 2**20),
        "head": np.zeros(1000),
    }
    assert manager.save(big, step=1).wait().written_bytes > 12 * 2**20
    big["head"] += 1
    second = manager.save(big, step=2, is_full=False).wait()
    assert second.written_bytes < 20_000
    third = manager.save(big, step=3, is_full=False).wait()
    assert third.written_bytes == 0
    assert np.array_equal(manager.load_state(3)["head"], big["head"])
    assert manager.load_state(1)["head"].sum() == 0
    assert not manager.checkpoints()[-1].is_full


def test_retention_never_breaks_what_increments_need(tmp_path):
    frozen = np.random.default_rng(0).integers(0, 255, 3 * 2**20, dtype=np.uint8)
    with CheckpointManager(tmp_path, keep_count=2, incremental=True) as manager:
        for step in range(1, 12):
            manager.save({"frozen": frozen, "step": np.full(10, step)}, step=step).wait()
            assert manager.steps() == [s for s in (step - 1, step) if s]
            for kept in manager.steps():
                loaded = manager.load_state(kept)
                assert np.array_equal(loaded["frozen"], frozen)
                assert loaded["step"][0] == kept
        assert len(packs(tmp_path)) <= 5


def test_packs_of_dropped_checkpoints_go(tmp_path):
    with CheckpointManager(tmp_path, keep_count=1) as manager:
        for step in range(6):
            manager.save(os.urandom(5000), step=step)
        manager.wait()
        assert len(packs(tmp_path)) <= 2


@pytest.mark.parametrize("method", ["gzip", "zstd"])
def test_compression_saves_space_where_it_can(tmp_path, method):
    with CheckpointManager(tmp_path, compression=method) as manager:
        data = {"zeros": np.zeros(2**20), "noise": np.random.default_rng(0).bytes(2**20)}
        saved = manager.save(data, step=1).wait()
        assert saved.written_bytes < 1.2 * 2**20
        loaded = manager.load_state()
        assert loaded["noise"] == data["noise"]
        assert not loaded["zeros"].any()


def test_differences_of_dense_training_are_small_and_bounded(tmp_path):
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(2**20).astype(np.float32)
    written = []
    with CheckpointManager(tmp_path, delta=True, keep_count=2) as manager:
        for step in range(12):
            weights = weights * np.float32(1 - 2**-18)
            written.append(manager.save({"w": weights}, step=step).wait().written_bytes)
            assert np.array_equal(manager.load_state()["w"], weights)
        assert max(written[1:8]) < 0.6 * weights.nbytes
        assert max(written[8:]) > 0.9 * weights.nbytes, "the chain is cut by a full save"
        for step in manager.steps():
            manager.load_state(step)


def test_changed_buffer_is_noticed_and_not_committed(manager, monkeypatch):
    from dtruntime.checkpoint.save import staging as staging_module

    data = bytearray(os.urandom(64 * 2**20))
    digest_of, calls = vars(staging_module)["digest_of"], itertools.count()

    def meddle(view):
        digest = digest_of(view)
        if next(calls) == 0:
            data[0] ^= 0xFF
        return digest

    monkeypatch.setattr(staging_module, "digest_of", meddle)
    with pytest.raises(StorageError, match="was changed while it was being saved"):
        manager.save(data, step=1).wait(60)
    assert manager.steps() == []


def test_tensor_changed_while_it_is_copied_is_named(manager, monkeypatch):
    torch = pytest.importorskip("torch")
    from dtruntime.checkpoint import engine as module

    tensor = torch.zeros(1000)
    staged = vars(module)["staged"]

    def meddle(*args):
        yield from staged(*args)
        tensor.add_(1)

    monkeypatch.setattr(module, "staged", meddle)
    with pytest.raises(StorageError, match=r"weight.* was changed while step 4"):
        manager.save({"model": {"weight": tensor}}, step=4)
    monkeypatch.undo()
    manager.save({"model": {"weight": tensor}}, step=5).wait()
    assert manager.steps() == [5]


def test_interpreter_waits_for_saves_under_way(tmp_path):
    program = (
        "import sys; from dtruntime.checkpoint.manager import CheckpointManager\n"
        "m = CheckpointManager(sys.argv[1])\n"
        "m.save(bytes(60 * 2**20), step=3)\n"
        "m.save({'x': __import__('numpy').arange(10**6)}, step=4)\n"
        "sys.exit(5)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=60)
    assert done.returncode == 5
    with CheckpointManager(tmp_path) as manager:
        assert manager.steps() == [3, 4]
        assert manager.load_state(4)["x"].sum() == sum(range(10**6))


def test_memory_stays_within_its_budget(tmp_path):
    budget = 128 * 2**20
    with CheckpointManager(tmp_path, memory_budget=budget, keep_count=1) as manager:
        data = {"x": np.ones(400 * 2**20, np.uint8)}
        for step in range(2):
            manager.save(data, step=step)
        manager.wait()
        assert manager.engine.options.pool.allocated <= budget
        assert manager.load_state()["x"].sum() == 400 * 2**20


def test_closed_and_forked_managers_say_so(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager.save(b"x", step=1).wait()
    pid = os.fork()
    if not pid:
        try:
            manager.save(b"y", step=2)
        except StorageError as exc:
            os._exit(7 if "make one here" in str(exc) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    manager.close()
    manager.close()
    with pytest.raises(StorageError, match="closed"):
        manager.save(b"z", step=3)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({}, TypeError),
        ({"storage_path": "a", "path": "b"}, TypeError),
        ({"path": "a", "keep_count": 0}, ValueError),
        ({"path": "a", "compression": "lz4"}, ValueError),
        ({"path": "a", "memory_budget": 5}, ValueError),
        ({"path": "a", "backend": "ftp"}, ValueError),
        ({"path": "a", "backend": "s3"}, ValueError),
    ],
)
def test_bad_settings_are_refused_before_anything_is_touched(arguments, error, monkeypatch):
    monkeypatch.delenv("CHECKPOINT_BUCKET", raising=False)
    with pytest.raises(error):
        CheckpointManager(**arguments)


def test_bad_steps_and_states_are_refused_and_leave_nothing(manager, tmp_path):
    for step in (-1, 1.5, "3", True):
        with pytest.raises((TypeError, ValueError)):
            manager.save(b"x", step=step)
    with pytest.raises(TypeError, match="function"):
        manager.save({"f": lambda: 1}, step=1)
    assert manager.steps() == []
    assert packs(tmp_path / "ckpt") == []


def test_all_that_is_bytes_like_is_saved_as_bytes(manager, tmp_path):
    file = tmp_path / "file"
    file.write_bytes(bytes(range(256)) * 100)
    numbers = array.array("d", range(1000))
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        alike: tuple[Any, ...] = (numbers, mapped, memoryview(numbers))
        for step, data in enumerate(alike, 1):
            manager.save(data, step=step).wait()
            assert manager.load_bytes(step) == bytes(memoryview(data).cast("B"))


def test_wrong_kind_of_load_is_named(manager):
    manager.save(b"x", step=1).wait()
    with pytest.raises(TypeError, match="use load"):
        manager.load_state(1)
    manager.save({"a": 1}, step=2).wait()
    with pytest.raises(TypeError, match="load_state"):
        manager.load_bytes(2)


def test_format_can_be_read_in_a_few_lines(manager, tmp_path):
    """What docs/checkpoint-format.md promises, without our code."""
    array = np.arange(3_000_000, dtype=np.float32)
    manager.save({"model": {"w": array}, "note": "hi"}, step=3).wait()
    root = tmp_path / "ckpt"
    name = sorted((root / "manifests").iterdir())[-1]
    manifest = json.loads(name.read_bytes().split(b"\n")[0])
    part = manifest["parts"][0]
    stream = bytearray(part["length"])
    for offset, length, _digest, pack, position, stored, codec, *_ in part["chunks"]:
        assert codec == ""
        data = (root / part["packs"][pack][0]).read_bytes()[position : position + stored]
        stream[offset : offset + length] = data
    offset, length, dtype, key = part["extents"][0]
    assert key.endswith("w")
    assert np.array_equal(np.frombuffer(stream, dtype, length // 4, offset), array)


def test_handles_do_not_pile_up(manager):
    for step in range(30):
        manager.save(b"x", step=step).wait()
    gc.collect()
    assert len(manager.engine.saves._handles) <= 1


def test_memory_url_is_shared_within_the_process():
    with CheckpointManager("memory://shared-manager") as first:
        first.save({"a": np.arange(5)}, step=1).wait()
        with CheckpointManager("memory://shared-manager") as second:
            assert second.load_state()["a"].tolist() == [0, 1, 2, 3, 4]
    for file in list(open_backend("memory://shared-manager").list()):
        open_backend("memory://shared-manager").delete(file.name)


def test_writer_keeps_checkpoints_of_several_names(tmp_path):
    with CheckpointWriter(open_backend(tmp_path)) as writer:
        for step in range(8):
            writer.write_checkpoint("model", step, bytes([step]))
        writer.write_checkpoint("optimizer", 3, {"m": np.ones(3)})
        assert writer.load_checkpoint("model", 2) == b"\x02"
        assert writer.load_checkpoint("model") == b"\x07"
        assert writer.load_state("optimizer")["m"].sum() == 3
        with pytest.raises(ValueError, match="checkpoint name"):
            writer.write_checkpoint("../etc", 1, b"x")


def test_manager_is_held_while_it_saves_and_let_go_afterwards(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    saves = weakref.ref(manager.engine.saves)
    handle = manager.save({"w": np.arange(1000)}, 1)
    del manager
    assert handle.wait(60).step == 1

    def is_gone() -> bool:
        gc.collect()
        return saves() is None

    eventually(is_gone, within=60)
    with CheckpointManager(tmp_path) as manager:
        assert manager.steps() == [1]


def test_storage_backend_takes_the_place_of_a_path(tmp_path: Path) -> None:
    storage = RecordingBackend(LocalBackend(tmp_path / "ckpt"))
    with CheckpointManager(storage, keep_count=2) as manager:
        for step in (1, 2, 3):
            manager.save(state(step), step).wait()
        assert same(manager.load_state(), state(3))
    assert storage.counts["writer"] == 3, "it is asked, and no other one for the same place"
    storage.write("mine", b"x")  # the caller's still
    with CheckpointManager(tmp_path / "ckpt") as manager:
        assert manager.steps() == [2, 3]
        assert same(manager.load_state(), state(3))


def test_storage_backend_may_have_a_local_tier(tmp_path: Path) -> None:
    storage = MemoryBackend(f"test-{tmp_path}")
    with CheckpointManager(storage, local_tier=tmp_path / "fast") as manager:
        manager.save(state(1), 1).wait_uploaded(30)
    with CheckpointManager(path=storage) as manager:
        assert same(manager.load_state(), state(1))


def test_options_that_an_open_storage_backend_cannot_take_are_refused(tmp_path: Path) -> None:
    storage = LocalBackend(tmp_path)
    with pytest.raises(TypeError, match="a StorageBackend is open already: give 'endpoint' to it"):
        CheckpointManager(storage, endpoint="http://localhost")
    with pytest.raises(TypeError, match="a StorageBackend is open already: give 'backend' to it"):
        CheckpointManager(storage, backend="s3")
    with pytest.raises(TypeError, match="not both"):
        CheckpointManager(storage, path=tmp_path)
