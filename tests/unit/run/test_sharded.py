"""Runs of sharded models in one process: DTensors, FSDP and what stands beside them."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dtruntime import CheckpointManager, ConfigError, Run, StrataError
from dtruntime.checkpoint.dcp import Planning, StrataReader, load_sharded, save_sharded
from dtruntime.cli.main import main
from dtruntime.errors import CheckpointDamagedError, StorageError
from dtruntime.run.pytorch.sharded_models import BLOCK, pack, unpack
from dtruntime.run.tracked_state import seed_rng

pytestmark = pytest.mark.filterwarnings("ignore:.*_all_gather_base")


@pytest.fixture(scope="module", autouse=True)
def mesh() -> Iterator[object]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _same_chance() -> None:
    seed_rng(5)


class Place(NamedTuple):
    at: torch.Tensor
    turns: int


class Training:
    """A small model with everything that belongs to its training."""

    def __init__(self, seed: int = 1, sharded: bool = True, optimizer: str = "AdamW") -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(7, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.2), nn.Linear(5, 3)
        )
        if sharded:
            for layer in (self.model[0], self.model[4], self.model):
                fully_shard(layer)
        self.optimizer = getattr(torch.optim, optimizer)(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 4, 0.5)

    @property
    def objects(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def step(self, samples: torch.Tensor) -> float:
        points = torch.sin(samples[:, None] * torch.arange(1.0, 8.0))
        loss = self.model(points).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.item()

    @property
    def weights(self) -> torch.Tensor:
        tensors = [*self.model.parameters(), *self.model.buffers()]
        whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]
        return torch.cat([t.detach().double().reshape(-1) for t in whole])


def make(folder: Path, training: Training, **options: Any) -> Run:
    given: dict[str, Any] = {
        "data": 400,
        "batch_size": 20,
        "save_steps": 6,
        "state": {"seen": 0},
        **options,
    }
    return Run(folder, track=training.objects, loader={"output": "torch"}, **given)


def train(run: Run, training: Training, stop_after: int | None = None) -> torch.Tensor:
    with run:
        for batch in itertools.islice(run, stop_after):
            with run.guard():
                run.report(loss=training.step(batch["sample"]))
                run.state["seen"] += len(batch["sample"])
    return training.weights


def manifests(folder: Path) -> list[dict]:
    paths = sorted((folder / "manifests").iterdir())
    return [json.loads(path.read_bytes().split(b"\n")[0]) for path in paths]


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_run_that_was_stopped_ends_with_the_same_bits(tmp_path, optimizer):
    whole = Training(optimizer=optimizer)
    expected = train(make(tmp_path / "whole", whole), whole)
    seed_rng(5)
    first = Training(optimizer=optimizer)
    train(make(tmp_path / "cut", first), first, stop_after=9)
    seed_rng(99)
    second = Training(seed=2, optimizer=optimizer)
    run = make(tmp_path / "cut", second)
    assert torch.equal(train(run, second), expected)
    assert run.state["seen"] == 400
    assert second.scheduler.last_epoch == 20


def test_saving_before_the_first_step_is_no_step(tmp_path):
    training, other = Training(), Training()
    seed_rng(5)
    with make(tmp_path, training) as run:
        batches = []
        assert not training.optimizer.state
        for batch in itertools.islice(run, 3):
            training.step(batch["sample"])
            batches.append(batch["sample"])
    seed_rng(5)
    for samples in batches:
        other.step(samples)
    assert torch.equal(training.weights, other.weights)


def test_checkpoints_are_like_all_others(tmp_path, capsys):
    training = Training()
    train(make(tmp_path, training, keep_count=2), training)
    with CheckpointManager(tmp_path) as manager:
        assert manager.steps() == [18, 20]
        assert [info.metadata for info in manager.checkpoints()] == [{}, {"finished": "yes"}]
        assert manager.load_latest().step == 20
        with pytest.raises(TypeError, match="StrataReader"):
            manager.load_state()
        target = {"model": Training(seed=3, sharded=False).model.state_dict()}
        dcp.load(target, storage_reader=StrataReader(manager))
        saved = training.model[4].weight.full_tensor()
        assert torch.equal(target["model"]["4.weight"], saved)
    last = manifests(tmp_path)[-1]
    assert set(last["metrics"]) == {"loss"}
    assert [part["kind"] for part in last["parts"]] == ["dcp"]
    assert main(["checkpoints", "verify", str(tmp_path)]) == 0
    assert main(["checkpoints", "ls", str(tmp_path)]) == 0
    assert "20" in capsys.readouterr().out
    again = Training(seed=4)
    with make(tmp_path, again) as run:
        assert list(run) == []
    assert run.ending == "finished"
    assert torch.equal(again.weights, training.weights)


def test_nothing_is_pickled(tmp_path):
    training = Training()
    train(make(tmp_path, training, keep_count=1), training)
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert b"\x80\x02" not in path.read_bytes()[: 1 << 16], path
    (part,) = manifests(tmp_path)[-1]["parts"]
    assert not [e for e in part["skeleton"]["entries"] if e["type"] == "bytes"]


def test_sharded_checkpoint_may_go_on_unsharded_but_not_the_other_way(tmp_path):
    first = Training()
    train(make(tmp_path / "a", first), first, stop_after=9)
    plain = Training(seed=2, sharded=False)
    with make(tmp_path / "a", plain) as run:
        assert run.step == 9
        assert torch.equal(plain.weights, first.weights)
        moments = [state["exp_avg"] for state in first.optimizer.state.values()]
        others = [state["exp_avg"] for state in plain.optimizer.state.values()]
        for one, other in zip(moments, others, strict=True):
            assert torch.equal(one.full_tensor(), other)
    train(make(tmp_path / "b", Training(sharded=False)), Training(sharded=False), stop_after=2)
    with pytest.raises(ValueError, match="not sharded"), make(tmp_path / "b", Training()):
        pass


def test_parameters_without_gradients_have_no_state_and_get_none(tmp_path):
    def frozen(seed: int) -> Training:
        training = Training(seed)
        training.model[0].weight.requires_grad_(False)
        return training

    first, second = frozen(1), frozen(2)
    train(make(tmp_path, first), first, stop_after=4)
    with make(tmp_path, second):
        assert torch.equal(first.weights, second.weights)
        assert len(second.optimizer.state) == len(first.optimizer.state)


def test_values_beside_a_sharded_model_are_those_of_the_program(tmp_path):
    def state(shape: int = 2) -> dict[str, object]:
        return {"place": Place(torch.zeros(shape), 0), "seen": 0}

    first = Training()
    train(make(tmp_path, first, state=state()), first, stop_after=2)
    before = Training(seed=2)
    untouched = before.weights
    for other, told in (({"seen": 0, "more": 1}, "no value of more"), (state(3), "place/0 was")):
        with pytest.raises(ValueError, match=told):
            make(tmp_path, before, state=other).__enter__()
    assert torch.equal(before.weights, untouched)
    with make(tmp_path, before, state=state()) as run:
        assert type(run.state["place"]) is Place
        assert run.state["seen"] == 40


def test_another_model_is_refused_with_names(tmp_path):
    first = Training()
    train(make(tmp_path, first), first, stop_after=2)
    other = Training()
    other.model.append(fully_shard(nn.Linear(3, 2)))
    with pytest.raises(ValueError, match=r"'model' is not what was saved: it has 5\.bias, 5\.wei"):
        make(tmp_path, other).__enter__()
    smaller = Training()
    del smaller.model[4]
    smaller.optimizer = torch.optim.AdamW(smaller.model.parameters())
    with pytest.raises(ValueError, match=r"the checkpoint has 4\.bias"):
        make(tmp_path, smaller).__enter__()
    with pytest.raises(ValueError, match="no state of extra"):
        Run(tmp_path, max_steps=3, track={**first.objects, "extra": nn.Linear(1, 1)}).__enter__()


def test_optimizer_without_its_module_is_refused(tmp_path):
    training = Training()
    with pytest.raises(ValueError, match="track the module that it trains"):
        Run(tmp_path, max_steps=3, track={"optimizer": training.optimizer}).__enter__()


def test_process_group_of_the_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="leave out process_group="):
        make(tmp_path, Training(), process_group="gloo").__enter__()


def test_process_group_that_is_not_the_crew_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda *group: 2)
    with pytest.raises(StrataError, match="has 2 and the run 1 workers"):
        make(tmp_path, Training()).__enter__()
    with CheckpointManager(tmp_path) as manager, pytest.raises(ValueError, match="sharded=True"):
        save_sharded(manager, {"x": torch.ones(1)}, 1)


def test_damaged_checkpoint_is_passed_over(tmp_path):
    first = Training()
    train(make(tmp_path, first), first, stop_after=9)
    newest = max((tmp_path / "packs").iterdir())
    raw = bytearray(newest.read_bytes())
    raw[len(raw) // 2] ^= 1
    newest.write_bytes(raw)
    with make(tmp_path, Training()) as run:
        assert run.step == 6


def test_tensors_of_any_placement_and_layout_come_back(tmp_path, mesh):
    matrix = torch.arange(24.0).reshape(6, 4)
    state = {
        "rows": distribute_tensor(matrix, mesh, [Shard(0)]),
        "columns": distribute_tensor(matrix.t().contiguous().t(), mesh, [Shard(1)]),
        "same": {"deep": distribute_tensor(matrix.bfloat16(), mesh, [Replicate()])},
        "empty": torch.zeros(0, 3),
        "transposed": matrix.t(),
        "scalar": torch.tensor(3),
    }
    planning = Planning()
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2, 3):
            state["scalar"] += 1
            if step == 3:
                state["more"] = torch.ones(2)
            save_sharded(manager, state, step, planning=planning).wait()
        for step, length in ((2, 5), (3, 6)):
            target = {key: value for key, value in state.items() if key != "more" or length == 6}
            target = {k: _zeros(v) for k, v in target.items()}
            load_sharded(manager, target, step)
            assert int(target["scalar"]) == 3 + step
            assert torch.equal(target["rows"].full_tensor(), matrix)
            assert torch.equal(target["columns"].full_tensor(), matrix)
            assert torch.equal(target["same"]["deep"].full_tensor(), matrix.bfloat16())
            assert torch.equal(target["transposed"], matrix.t())
        with pytest.raises(RuntimeError, match="Missing key"):
            load_sharded(manager, {"nowhere": torch.ones(1)})


def _zeros(value):
    if isinstance(value, dict):
        return {key: _zeros(inner) for key, inner in value.items()}
    return torch.zeros_like(value)


def test_values_that_are_no_tensors_are_refused(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(StorageError, match="rank 0: TypeError: a is no tensor"):
            save_sharded(manager, {"a": 5}, 1)
        save_sharded(manager, {"a": torch.ones(3)}, 2).wait()
        assert manager.steps() == [2]


def test_packed_states_come_back_and_keep_their_size():
    state = {"rng": torch.arange(9), "list": [1, (2.5, None)], "text": "x" * 2000, 3: b"y" * 3000}
    packed = pack(state)
    assert len(packed) % BLOCK == 0
    assert len(pack({**state, "list": [100, (2.5, None)]})) == len(packed)
    back = unpack(packed, "it")
    assert torch.equal(back.pop("rng"), state.pop("rng"))
    assert back == state
    packed[10] = 0
    with pytest.raises(CheckpointDamagedError, match="it of the checkpoint is damaged"):
        unpack(packed, "it")
