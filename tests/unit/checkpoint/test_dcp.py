"""torch's distributed checkpoint in our packs: one process here, two of them in dcp_ranks.py."""

import gc
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import StorageMeta

from dtruntime.checkpoint import CheckpointManager
from dtruntime.checkpoint.dcp import StrataReader, StrataWriter
from dtruntime.checkpoint.file_format.manifest import open_part, seal
from dtruntime.checkpoint.load.array_slices import byte_runs, steps_of
from dtruntime.errors import StorageError
from dtruntime.testing import eventually
from tests.support.programs.dcp_ranks import matrix, model_and_optimizer, training_state, whole

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled",
    "ignore:.*_all_gather_base",
)


def ranks(scenario: str, folder: Path, world: int = 2) -> list[int]:
    """Run a scenario in several processes; what each ended with."""
    module = "tests.support.programs.dcp_ranks"
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", module, scenario, str(folder), str(rank), str(world)],
                    stderr=stack.enter_context((folder / f"stderr-{rank}").open("w")),
                    env={**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"},
                )
            )
            for rank in range(world)
        ]
        for process in processes:
            stack.callback(process.kill)
        return [process.wait(100) for process in processes]


def complaints(folder: Path) -> str:
    return "".join(path.read_text()[-3000:] for path in sorted(folder.glob("stderr-*")))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder in which one process has saved, then two have loaded, saved and failed to save."""
    folder = tmp_path_factory.mktemp("trained")
    model, optimizer = model_and_optimizer(1, sharded=False)
    saved = training_state(model, optimizer, 1)
    with warnings.catch_warnings(action="ignore"):
        dcp.save(saved, storage_writer=StrataWriter(folder / "ckpt", step=1))
    torch.save(whole(saved), folder / "saved-by-one.pt")
    assert ranks("together", folder) == [0, 0], complaints(folder)
    return folder


def same(one, other) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return one == other


def everything(step: int):
    """Values of all kinds, and where to load them."""
    torch.manual_seed(step)
    state = {
        "float": torch.randn(300, 40),
        "nested": {"brain": torch.randn(7).bfloat16(), "list": [torch.ones(2), {"a": "b"}]},
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "transposed": torch.randn(5, 3).t(),
        "conjugate": torch.randn(4, dtype=torch.complex64).conj(),
        "flag": torch.tensor([True, False]),
        "step": step,
        "plain": ["x", 2.5, None, (1, 2)],
    }
    target = {
        "float": torch.zeros(300, 40),
        "nested": {"brain": torch.zeros(7).bfloat16(), "list": [torch.zeros(2), {"a": ""}]},
        "empty": torch.ones(0, 3),
        "scalar": torch.tensor(0.0, dtype=torch.float64),
        "transposed": torch.zeros(3, 5),
        "conjugate": torch.zeros(4, dtype=torch.complex64),
        "flag": torch.tensor([False, False]),
        "step": 0,
        "plain": [],
    }
    return state, target


@pytest.mark.parametrize("options", [{}, {"compression": "zstd"}, {"incremental": True}])
def test_values_of_all_kinds_come_back(tmp_path, options):
    with CheckpointManager(tmp_path, **options) as manager:
        for step in (1, 2):
            state, target = everything(step)
            dcp.save(state, storage_writer=StrataWriter(manager, step, epoch=4))
            dcp.load(target, storage_reader=StrataReader(manager))
            assert same(target, state)
        state, target = everything(1)
        dcp.load(target, storage_reader=StrataReader(tmp_path, step=1))
        assert same(target, state)


def test_step_may_be_the_checkpoint_id(tmp_path):
    writer, reader = StrataWriter(tmp_path), StrataReader(tmp_path)
    for step in (1, 2):
        dcp.save({"x": torch.full((2,), step)}, checkpoint_id=str(step), storage_writer=writer)
    target = {"x": torch.zeros(2, dtype=torch.int64)}
    dcp.load(target, checkpoint_id="1", storage_reader=reader)
    assert target["x"].tolist() == [1, 1]
    with pytest.raises(ValueError, match="is its step, not 'here'"):
        dcp.save(target, checkpoint_id="here", storage_writer=writer)
    with pytest.raises(dcp.api.CheckpointException, match="needs the step"):
        dcp.save(target, storage_writer=StrataWriter(tmp_path))


def test_it_is_a_checkpoint_like_others(tmp_path):
    with CheckpointManager(tmp_path, keep_count=3) as manager:
        manager.save({"a": 1}, step=1).wait()
        for step in (2, 3, 4):
            writer = StrataWriter(
                manager, step, epoch=1, metrics={"loss": 0.5}, metadata={"who": "me"}
            )
            dcp.save({"x": torch.ones(5)}, storage_writer=writer)
        assert manager.steps() == [2, 3, 4]
        info = manager.load_latest()
        assert (info.step, info.epoch, info.metadata, info.is_full) == (4, 1, {"who": "me"}, True)
        with pytest.raises(TypeError, match=r"step 4 was saved by torch.*StrataReader"):
            manager.load_state()
        with pytest.raises(TypeError, match="StrataReader"):
            manager.load_bytes(3)
        for step in (5, 6, 7):
            manager.save({"a": 1}, step=step).wait()
        assert manager.steps() == [5, 6, 7]
        manager.save({"a": 1}, step=8)
        manager.wait()
        assert not list(tmp_path.glob("parts/*"))
        with pytest.raises(dcp.api.CheckpointException, match="was not saved by torch"):
            dcp.load({"a": torch.ones(1)}, storage_reader=StrataReader(manager, 8))


def test_newest_distributed_checkpoint_is_loaded_whatever_else_is_there(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        dcp.save({"x": torch.full((3,), 7.0)}, storage_writer=StrataWriter(manager, 1))
        manager.save(b"other", step=2).wait()
        target = {"x": torch.zeros(3)}
        dcp.load(target, storage_reader=StrataReader(manager))
        assert target["x"].tolist() == [7, 7, 7]
    with pytest.raises(dcp.api.CheckpointException, match="there is no checkpoint in"):
        dcp.load(target, storage_reader=StrataReader(tmp_path / "nowhere"))


def test_unchanged_tensors_are_not_stored_again(tmp_path):
    frozen, moving = torch.randn(2**19), torch.randn(2**18)
    with CheckpointManager(tmp_path, incremental=True) as manager:
        for step in (1, 2):
            moving += 1
            dcp.save({"f": frozen, "m": moving}, storage_writer=StrataWriter(manager, step))
        first, second = (
            json.loads(path.read_bytes().split(b"\n")[0])
            for path in sorted((tmp_path / "manifests").iterdir())
        )
        assert first["written_bytes"] >= frozen.nbytes + moving.nbytes
        assert second["written_bytes"] == moving.nbytes
        assert (first["is_full"], second["is_full"]) == (True, False)
        target = {"f": torch.zeros(2**19), "m": torch.zeros(2**18)}
        dcp.load(target, storage_reader=StrataReader(manager))
        assert torch.equal(target["f"], frozen)
        assert torch.equal(target["m"], moving)


def test_asynchronous_save_may_be_followed_by_changes(tmp_path):
    tensor = torch.arange(10**6)
    saving = dcp.async_save({"x": tensor}, storage_writer=StrataWriter(tmp_path, 1))
    tensor.zero_()
    saving.result()
    target = {"x": torch.zeros_like(tensor)}
    dcp.load(target, storage_reader=StrataReader(tmp_path))
    assert torch.equal(target["x"], torch.arange(10**6))


class CachingPlanner(dcp.DefaultSavePlanner):
    """Sends no plan when it is the same as before."""

    def __init__(self) -> None:
        super().__init__(enable_plan_caching=True)


def test_planner_may_use_its_plan_again(tmp_path):
    for step, length in enumerate((3, 3, 4, 4), 1):
        state = {"x": torch.full((length,), step)}
        writer = StrataWriter(tmp_path, step)
        dcp.save(state, storage_writer=writer, planner=CachingPlanner())
        target = {"x": torch.zeros(length, dtype=torch.int64)}
        dcp.load(target, storage_reader=StrataReader(tmp_path))
        assert torch.equal(target["x"], state["x"])


def test_target_of_another_type_is_converted_and_in_any_order_of_memory(tmp_path):
    dcp.save({"x": torch.arange(12.0).reshape(3, 4)}, storage_writer=StrataWriter(tmp_path, 1))
    for target in (torch.zeros(3, 4, dtype=torch.float16), torch.zeros(4, 3).t()):
        dcp.load({"x": target}, storage_reader=StrataReader(tmp_path))
        assert target.tolist() == torch.arange(12.0).reshape(3, 4).tolist()


class Unplain:
    """A value that only an unrestricted unpickler can make."""


@pytest.mark.parametrize("value", [Unplain(), np.arange(3)], ids=["class", "numpy"])
def test_values_that_could_not_be_loaded_are_refused_when_they_are_saved(tmp_path, value):
    state = {"model": torch.arange(3), "extra": {"step": 7, "rng": value}}
    with pytest.raises(dcp.api.CheckpointException, match=r"'extra.rng' is neither a tensor") as no:
        dcp.save(state, storage_writer=StrataWriter(tmp_path, 1))
    for remedy in ("convert it", "add_safe_globals", "weights_only=False"):
        assert remedy in str(no.value)
    with CheckpointManager(tmp_path) as manager:
        assert manager.steps() == []


def test_plain_values_are_saved_and_loaded(tmp_path):
    state = {"step": 7, "lr": 0.1, "name": "a", "sizes": [1, 2], "none": None, "flags": {"x": True}}
    dcp.save(state, storage_writer=StrataWriter(tmp_path, 1))
    target = {"step": 0, "lr": 0.0, "name": "", "sizes": [0, 0], "none": 1, "flags": {"x": False}}
    dcp.load(target, storage_reader=StrataReader(tmp_path))
    assert target == state


def test_metadata_has_what_torch_and_the_planner_put_into_it(tmp_path):
    dcp.save({"x": torch.arange(3)}, storage_writer=StrataWriter(tmp_path), checkpoint_id="5")
    found = StrataReader(tmp_path).read_metadata()
    assert found.version == CURRENT_DCP_VERSION
    assert found.storage_meta.checkpoint_id == "5"
    assert found.storage_meta.save_id
    assert found.storage_meta.load_id

    class Named(dcp.DefaultSavePlanner):
        def create_global_plan(self, all_plans):
            plans, metadata = super().create_global_plan(all_plans)
            metadata.version = "planner's"
            metadata.storage_meta = StorageMeta(checkpoint_id="a", save_id="b", modules=["c"])
            return plans, metadata

    dcp.save({"x": torch.arange(3)}, storage_writer=StrataWriter(tmp_path, 6), planner=Named())
    found = StrataReader(tmp_path, 6).read_metadata()
    assert found.version == "planner's"
    kept = found.storage_meta
    assert (kept.checkpoint_id, kept.save_id, kept.modules) == ("a", "b", ["c"])


def test_values_that_would_run_code_are_refused_unless_asked_for(tmp_path):
    writer = StrataWriter(tmp_path, 1, weights_only=False)
    dcp.save({"rng": Unplain()}, storage_writer=writer)
    with pytest.raises(dcp.api.CheckpointException, match=r"'rng' of .*weights_only=False"):
        dcp.load({"rng": None}, storage_reader=StrataReader(tmp_path))
    target = {"rng": None}
    dcp.load(target, storage_reader=StrataReader(tmp_path, weights_only=False))
    assert isinstance(target["rng"], Unplain)


def test_nothing_of_a_checkpoint_is_pickled_but_what_torch_serialised(tmp_path):
    dcp.save({"x": torch.arange(500)}, storage_writer=StrataWriter(tmp_path, 1))
    for path in tmp_path.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert b"\x80\x02" not in data
            assert b"torch" not in data
            with pytest.raises((pickle.UnpicklingError, EOFError, ValueError)):
                pickle.load(io.BytesIO(data))


@pytest.mark.parametrize("how", ["flip", "cut", "remove"])
def test_damage_is_named(tmp_path, how):
    dcp.save({"x": torch.randn(5000)}, storage_writer=StrataWriter(tmp_path, 1))
    (pack,) = (tmp_path / "packs").iterdir()
    if how == "flip":
        raw = bytearray(pack.read_bytes())
        raw[9000] ^= 1
        pack.write_bytes(raw)
    elif how == "cut":
        os.truncate(pack, 9000)
    else:
        pack.unlink()
    with pytest.raises(dcp.api.CheckpointException, match=rf"step 1 is damaged: .*{pack.name}"):
        dcp.load({"x": torch.zeros(5000)}, storage_reader=StrataReader(tmp_path))


def test_newest_with_a_sound_description_is_loaded(tmp_path):
    for step in (1, 2):
        dcp.save({"x": torch.full((3,), step)}, storage_writer=StrataWriter(tmp_path, step))
    newest = sorted((tmp_path / "parts").iterdir())[-1]
    newest.write_bytes(newest.read_bytes()[:-5])
    target = {"x": torch.zeros(3, dtype=torch.int64)}
    dcp.load(target, storage_reader=StrataReader(tmp_path))
    assert target["x"].tolist() == [1, 1, 1]
    with pytest.raises(dcp.api.CheckpointException, match="damaged"):
        dcp.load(target, storage_reader=StrataReader(tmp_path, 2))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda d: d.update(format=9), "cannot read"),
        (lambda d: d["entries"][0].update(dtype="object"), "no dtype 'object'"),
        (lambda d: d["entries"][0].update(size=[-1]), "description is not one.*>= 0"),
        (lambda d: d["entries"][0].update(boxes=[[[2], [9]]]), "has the chunk"),
        (lambda d: d["entries"][0].update(size=[2**40], boxes=[[[0], [2**40]]]), "Size mismatch"),
        (lambda d: d["entries"][0].update(dtype="float64"), "bytes are no"),
        (lambda d: d["placed"][0].__setitem__(3, 5), "extent 5 of 1"),
        (lambda d: d["placed"][0].__setitem__(2, 5), "part of rank 5"),
        (lambda d: d.update(placed=[]), "lacks x"),
        (lambda d: d.update(entries=7), "description is not one.*array"),
    ],
)
def test_forged_description_is_an_error(tmp_path, change, named):
    dcp.save({"x": torch.ones(3)}, storage_writer=StrataWriter(tmp_path, 1))
    (path,) = (tmp_path / "parts").iterdir()
    (manifest,) = (tmp_path / "manifests").iterdir()
    part = open_part(path.read_bytes(), "")
    change(part.skeleton)
    forge(path, part, manifest)
    with pytest.raises(dcp.api.CheckpointException, match=named):
        dcp.load({"x": torch.zeros(3)}, storage_reader=StrataReader(tmp_path, 1))


def forge(path: Path, part, manifest: Path) -> None:
    """Write a part, and a manifest that names it as it is."""
    from dtruntime.checkpoint.file_format.manifest import digest_of, open_manifest

    old: Any = open_manifest(manifest.read_bytes(), "")
    path.write_bytes(seal(part))
    body = seal(old).replace(old.parts[0].digest.encode(), digest_of(path.read_bytes()).encode())
    body = body.split(b"\n")[0]
    manifest.write_bytes(body + b"\n" + digest_of(body).encode() + b"\n")


def test_data_of_an_unknown_planner_is_refused(tmp_path):
    class Planner(dcp.DefaultSavePlanner):
        def create_global_plan(self, plans):
            plans, metadata = super().create_global_plan(plans)
            metadata.planner_data = {"x": Unplain()}
            return plans, metadata

    with pytest.raises(dcp.api.CheckpointException, match="planner added data of its own"):
        dcp.save({"x": torch.ones(1)}, storage_writer=StrataWriter(tmp_path, 1), planner=Planner())
    assert CheckpointManager(tmp_path).steps() == []


def test_writer_goes_to_another_process_unless_it_has_a_manager(tmp_path):
    writer = pickle.loads(pickle.dumps(StrataWriter(tmp_path, 5, metadata={"a": "b"})))
    dcp.save({"x": torch.ones(1)}, storage_writer=writer)
    with CheckpointManager(tmp_path) as manager:
        assert [(c.step, c.metadata) for c in manager.checkpoints()] == [(5, {"a": "b"})]
        with pytest.raises(TypeError, match="make it with the path"):
            pickle.dumps(StrataWriter(manager, 6))
        with pytest.raises(TypeError, match="compression"):
            StrataWriter(manager, 6, compression="zstd")


@pytest.mark.long
def test_asynchronous_saves_are_made_in_processes_of_their_own(tmp_path):
    assert ranks("process", tmp_path) == [0, 0], (tmp_path / "stderr-0").read_text()[-2000:]
    with CheckpointManager(tmp_path / "process") as manager:
        assert manager.steps() == [1, 2]
        for step in (1, 2):
            target = {"m": torch.zeros(40, 30, dtype=torch.float64), "step": 0}
            dcp.load(target, storage_reader=StrataReader(manager, step))
            assert torch.equal(target["m"], matrix() * step)
            assert target["step"] == step


def test_wide_boxes_are_read_without_what_lies_between():
    mib = 2**20
    pieces = list(byte_runs((4, 3, 16 * mib), (1, 0, 5), (2, 3, 10), 1))
    assert [piece.at for piece in pieces] == [(i, j) for i in range(2) for j in range(3)]
    assert [piece.nbytes for piece in pieces] == [10] * 6
    assert pieces[4].start == (2 * 3 + 1) * 16 * mib + 5
    assert all(piece.dense for piece in pieces)


def test_narrow_boxes_are_read_in_one_stretch():
    (piece,) = byte_runs((100, 30), (10, 4), (20, 5), 8)
    assert (piece.start, piece.nbytes) == ((10 * 30 + 4) * 8, (19 * 30 + 5) * 8)
    assert (piece.shape, piece.steps, piece.dense) == ((20, 5), (30, 1), False)
    (rows,) = byte_runs((100, 30), (10, 0), (20, 30), 8)
    assert (rows.dense, rows.nbytes) == (True, 20 * 30 * 8)
    assert list(byte_runs((0, 3), (0, 0), (0, 3), 4)) == []
    assert next(byte_runs((), (), (), 4)).nbytes == 4
    assert steps_of((2, 3, 4)) == (12, 4, 1)
    with pytest.raises(ValueError, match="no box"):
        list(byte_runs((4,), (3,), (2,), 1))


def test_states_are_resharded_between_one_and_two_ranks(trained):
    place = trained / "ckpt"
    assert same(torch.load(trained / "loaded-by-two.pt"), torch.load(trained / "saved-by-one.pt"))

    model, optimizer = model_and_optimizer(5, sharded=False)
    target = training_state(model, optimizer, 0)
    dcp.load(target, storage_reader=StrataReader(place, step=2))
    assert same(whole(target), torch.load(trained / "saved-by-two.pt"))

    with CheckpointManager(place) as manager:
        assert manager.steps() == [1, 2, 3, 4]
        assert [info.parts for info in manager.checkpoints()] == [1, 2, 2, 2]
        alone = {"m": torch.zeros(40, 30, dtype=torch.float64)}
        dcp.load(alone, storage_reader=StrataReader(manager))
        assert torch.equal(alone["m"], matrix())
        with pytest.raises(TypeError, match="StrataReader"):
            manager.load_state()


def load_first(place: Path) -> None:
    target = {"x": torch.zeros(40, 30, dtype=torch.float64)}
    dcp.load(target, storage_reader=StrataReader(place, step=1))
    assert torch.equal(target["x"], matrix())


def packs_of(place: Path, step: int) -> list[str]:
    return [
        path.name for path in (place / "packs").iterdir() if path.name.startswith(f"{step:012d}")
    ]


@pytest.mark.long
def test_killed_rank_leaves_the_checkpoint_before(tmp_path):
    place = tmp_path / "killed"
    assert ranks("killed", tmp_path) == [0, -signal.SIGKILL], complaints(tmp_path)
    assert (tmp_path / "told-0").exists()
    with CheckpointManager(place) as manager:
        assert manager.steps() == [1]
        load_first(place)
        target = {"x": torch.zeros(40, 30, dtype=torch.float64)}
        dcp.load(target, storage_reader=StrataReader(manager))
        assert torch.equal(target["x"], matrix())
        assert packs_of(place, 2), "the rank that was not killed had written its pack"
        dcp.save({"x": torch.ones(1)}, storage_writer=StrataWriter(manager, 3))
        assert manager.steps() == [1, 3]
        assert not packs_of(place, 2)


def test_failed_rank_fails_all_and_nothing_is_left_of_it(trained):
    place = trained / "failing"
    for rank in range(2):
        assert "rank 1 has no luck" in (trained / f"told-{rank}").read_text()
    with CheckpointManager(place) as manager:
        assert manager.steps() == [1, 3]
    assert not packs_of(place, 2)
    load_first(place)


def test_writers_with_a_path_leave_no_threads_and_no_locks(tmp_path):
    before = set(threading.enumerate())
    for step in range(3):
        dcp.save({"x": torch.ones(2)}, storage_writer=StrataWriter(tmp_path, step, is_full=False))
    gc.collect()
    eventually(lambda: not set(threading.enumerate()) - before)
    assert not list(tmp_path.glob("locks/*"))


def test_saves_of_a_manager_and_distributed_ones_may_overlap(tmp_path):
    with CheckpointManager(tmp_path, keep_count=100) as manager:
        for step in range(10):
            saving = dcp.async_save(
                {"x": torch.full((9,), step)}, storage_writer=StrataWriter(manager, 2 * step)
            )
            manager.save({"step": step}, step=2 * step + 1)
            saving.result()
        assert manager.steps() == list(range(20))
        for step in range(10):
            target = {"x": torch.zeros(9, dtype=torch.int64)}
            dcp.load(target, storage_reader=StrataReader(manager, 2 * step))
            assert target["x"][0] == step
            assert manager.load_state(2 * step + 1) == {"step": step}


def test_closed_manager_says_so(tmp_path):
    manager = CheckpointManager(tmp_path)
    writer = StrataWriter(manager, 1)
    manager.close()
    with pytest.raises(dcp.api.CheckpointException, match="closed") as error:
        dcp.save({"x": torch.ones(1)}, storage_writer=writer)
    assert isinstance(next(iter(error.value.failures.values()))[0], StorageError)
