"""One rank of the tests in test_dcp.py: ``python -m ... SCENARIO FOLDER RANK WORLD``."""

import gc
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dtruntime.checkpoint import CheckpointManager
from dtruntime.checkpoint.dcp import Planning, StrataReader, StrataWriter
from dtruntime.errors import StorageError


def model_and_optimizer(seed: int, sharded: bool):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(33, 17), nn.ReLU(), nn.Linear(17, 5))
    if sharded:
        for layer in (model[0], model[2], model):
            fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(99)
    model(torch.randn(8, 33)).sum().backward()
    optimizer.step()
    return model, optimizer


def training_state(model, optimizer, step: int):
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "step": step, "table": torch.full((7,), step)}


def whole(state):
    """All values of a state, with sharded tensors gathered."""
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    if isinstance(state, list):
        return [whole(value) for value in state]
    if isinstance(state, torch.Tensor):
        return getattr(state, "full_tensor", lambda: state)().detach().clone()
    return state


def matrix() -> torch.Tensor:
    return torch.arange(40 * 30, dtype=torch.float64).reshape(40, 30)


def grid(placements):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(matrix(), mesh, placements)


def reshard(folder: Path) -> None:
    """Load what one process saved, and save what one process loads."""
    place = folder / "ckpt"
    model, optimizer = model_and_optimizer(5, sharded=True)
    state = training_state(model, optimizer, 0)
    dcp.load(state, storage_reader=StrataReader(place, step=1))
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    loaded = whole(training_state(model, optimizer, state["step"]))
    if dist.get_rank() == 0:
        torch.save(loaded, folder / "loaded-by-two.pt")

    model, optimizer = model_and_optimizer(6, sharded=True)
    state = training_state(model, optimizer, 2)
    dcp.save(state, storage_writer=StrataWriter(place, step=2))
    expected = whole(state)
    if dist.get_rank() == 0:
        torch.save(expected, folder / "saved-by-two.pt")

    dcp.save({"m": grid([Shard(0)])}, storage_writer=StrataWriter(place, step=3))
    for placements in ([Shard(1)], [Replicate()], [Shard(0)]):
        target = {"m": torch.zeros_like(grid(placements))}
        dcp.load(target, storage_reader=StrataReader(place))
        assert torch.equal(target["m"].full_tensor(), matrix()), placements

    with CheckpointManager(place) as manager:
        saving = dcp.async_save({"m": grid([Shard(1)])}, storage_writer=StrataWriter(manager, 4))
        saving.result()
        target = {"m": torch.zeros(40, 30, dtype=torch.float64)}
        dcp.load(target, storage_reader=StrataReader(manager, 4))
        assert torch.equal(target["m"], matrix())


class Planner(dcp.DefaultSavePlanner):
    """Does something to the second rank, in the middle of its writing."""

    def __init__(self, meddle) -> None:
        super().__init__(dedup_save_to_lowest_rank=False)
        self._meddle = meddle
        self._asked = 0

    def resolve_data(self, item):
        self._asked += 1
        if dist.get_rank() == 1 and self._asked == 3:
            self._meddle()
        return super().resolve_data(item)


def shards():
    mesh = init_device_mesh("cpu", (2,))
    rows = torch.zeros(2, 5 * 2**20)
    return {f"t{i}": distribute_tensor(rows + i, mesh, [Shard(0)]) for i in range(4)}


def killed(folder: Path) -> None:
    """Rank 1 is killed while it writes."""

    def kill():
        os.kill(os.getpid(), signal.SIGKILL)

    interrupted(folder, "killed", kill)


def failing(folder: Path) -> None:
    """Rank 1 fails while it writes, and both live on."""

    def fail():
        raise OSError("rank 1 has no luck")

    interrupted(folder, "failing", fail)
    gc.collect()
    dist.barrier()
    dcp.save({"x": torch.ones(3)}, storage_writer=StrataWriter(folder / "failing", 3))


def interrupted(folder: Path, name: str, meddle) -> None:
    place = folder / name
    dcp.save({"x": grid([Shard(0)])}, storage_writer=StrataWriter(place, step=1))
    try:
        dcp.save(shards(), storage_writer=StrataWriter(place, step=2), planner=Planner(meddle))
    except BaseException as exc:
        (folder / f"told-{dist.get_rank()}").write_text(repr(exc))
    else:
        raise AssertionError("the save did not fail")


def planned() -> None:
    """Plan together: both are told of one that cannot, and plans are used again."""
    planning, rank = Planning(), dist.get_rank()
    for _ in range(2):
        with pytest.raises(StorageError, match="rank 1: TypeError: x is no tensor"):
            planning.plan({"x": "a text" if rank else torch.ones(1)}, rank)
    names = []
    for step in range(4):
        state = {
            "m": grid([Shard(0)]),
            "same": torch.full((3,), step),
            f"own-{rank}": torch.ones(2),
        }
        if step > 1 and rank == 1:
            state["late"] = torch.ones(5)
        skeleton, buffers = planning.plan(state, 7 + rank)
        assert (skeleton is not None) == (rank == 0)
        names.append([buffer.key for buffer in buffers])
        if skeleton is not None:
            assert {placed[2] for placed in skeleton["placed"]} == {7, 8}
            assert [e["name"] for e in skeleton["entries"]].count("late") == (step > 1)
        for buffer in buffers:
            if buffer.key == "same":
                memory = buffer.memory()
                assert memory is not None
                numbers = torch.frombuffer(bytearray(memory), dtype=torch.int64)
                assert numbers.tolist() == [step] * 3
    assert names[0] == names[1]
    assert names[2] == names[3]
    assert ("late" in names[2]) == (rank == 1)


def in_another_process(folder: Path) -> None:
    """Let torch write in processes of its own, which the writers go to."""
    kind = AsyncCheckpointerType.PROCESS
    for step in (1, 2):
        state = {"m": grid([Shard(0)]) * step, "step": step}
        writer = StrataWriter(folder / "process", step)
        saving = dcp.async_save(state, storage_writer=writer, async_checkpointer_type=kind)
        saving.result()


def main() -> None:
    scenario, folder, rank, world = sys.argv[1:]
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=int(rank), world_size=int(world)
    )
    if scenario == "killed":
        killed(Path(folder))
    elif scenario == "process":
        in_another_process(Path(folder))
        dist.destroy_process_group()
    else:
        reshard(Path(folder))
        failing(Path(folder))
        planned()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
