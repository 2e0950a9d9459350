"""Runs that were killed in the middle have the weights of undisturbed ones, bit for bit."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from dtruntime.run.pytorch import gradients
from dtruntime.run.pytorch.gradients import fix_buckets
from dtruntime.testing import LocalCoordinator, WorkerProcess
from tests.support.paths import PROGRAMS

PROGRAM = PROGRAMS / "exact_worker.py"
PATIENCE = 200.0
WORLDS = [3, pytest.param(4, marks=pytest.mark.long)]
NAMES = ("undisturbed", "disturbed")

Start = Callable[..., WorkerProcess]


@pytest.fixture
def start(patient_coordinator: LocalCoordinator, tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as stack:

        def start(program: str, rank: int, world: int, *names: str) -> WorkerProcess:
            env = {
                "COORDINATOR_URL": patient_coordinator.url,
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "OMP_NUM_THREADS": "1",
            }
            arguments = [str(tmp_path), program, *names]
            return stack.enter_context(WorkerProcess(PROGRAM, arguments, env=env))

        yield start


def assert_same_weights(folder: Path, world: int) -> None:
    undisturbed = dict(np.load(folder / "undisturbed-0.npz"))
    for rank in range(world):
        found = dict(np.load(folder / f"disturbed-{rank}.npz"))
        assert found.keys() == undisturbed.keys()
        for key, value in undisturbed.items():
            assert np.array_equal(found[key], value), f"{key} differs at place {rank}"


@pytest.mark.parametrize("world", WORLDS)
def test_ddp_that_was_killed_and_restarted_has_the_same_bits(
    start: Start, tmp_path: Path, world: int
) -> None:
    first = [start("ddp", rank, world, *NAMES) for rank in range(world)]
    for process in first:
        process.expect("stopped", PATIENCE)
    for process in first:
        process.kill()
    again = [start("ddp", rank, world, "disturbed") for rank in range(world)]
    for process in again:
        process.expect("done", PATIENCE)
    assert_same_weights(tmp_path, world)


@pytest.mark.long
@pytest.mark.parametrize("world", [3, 4])
def test_averaging_crew_that_lost_a_worker_has_the_same_bits(
    start: Start, tmp_path: Path, world: int
) -> None:
    crew = [start("averaged", rank, world, *NAMES) for rank in range(world)]
    for process in crew:
        process.expect("stopped", PATIENCE)
    crew[1].kill()
    crew[1] = start("averaged", 1, world, "disturbed")
    for process in crew:
        if process is not crew[1]:
            process.send("go on")
    for process in crew:
        process.expect("done", PATIENCE)
    assert_same_weights(tmp_path, world)


@pytest.fixture
def group_of_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group whose buckets matter as if there were more in it."""
    monkeypatch.setattr(gradients, "COMMUTATIVE_WORLD", 0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def keeps_buckets(model: DistributedDataParallel) -> bool:
    """Whether a model that has made a step does not lay out its buckets anew."""
    return not model.reducer._rebuild_buckets()


@pytest.mark.usefixtures("group_of_one")
def test_fixing_buckets_leaves_no_trace_but_the_buckets() -> None:
    torch.manual_seed(5)
    other = DistributedDataParallel(nn.Linear(3, 4))
    other(torch.ones(2, 3)).sum().backward()
    assert not keeps_buckets(other)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    random = torch.get_rng_state()
    fix_buckets("model", model)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    x = torch.randn(8, 3)
    model(x).square().sum().backward()
    assert keeps_buckets(model)
    bare = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    bare.load_state_dict({key.removeprefix("module."): value for key, value in before.items()})
    bare(x).square().sum().backward()
    for mine, other in zip(model.parameters(), bare.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)


def with_state(model: DistributedDataParallel) -> None:
    model.register_comm_hook({"calls": 0}, lambda state, bucket: pytest.fail("was called"))


def with_parameter_hook(model: DistributedDataParallel) -> None:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: pytest.fail("was called"))


def with_frozen_parameter(model: DistributedDataParallel) -> None:
    next(model.parameters()).requires_grad_(False)


def with_gradient(model: DistributedDataParallel) -> None:
    parameter = next(model.parameters())
    parameter.grad = torch.ones_like(parameter)


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_state, "communication hook has a state"),
        (with_parameter_hook, "parameters have hooks"),
        (with_frozen_parameter, "were frozen"),
        (with_gradient, "has gradients already"),
    ],
)
def test_ddp_that_would_notice_is_left_alone_and_named(
    change: Callable[[DistributedDataParallel], None],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = DistributedDataParallel(nn.Linear(3, 4))
    change(model)
    fix_buckets("critic", model)
    assert "ddp_buckets_not_fixed" in caplog.text
    assert "critic" in caplog.text
    assert reason in caplog.text


@pytest.mark.usefixtures("group_of_one")
def test_options_of_ddp_decide_whether_buckets_are_fixed(caplog: pytest.LogCaptureFixture) -> None:
    fix_buckets("model", DistributedDataParallel(nn.Linear(3, 4), find_unused_parameters=True))
    assert not caplog.text
    fix_buckets("static", DistributedDataParallel(nn.Linear(3, 4), static_graph=True))
    assert "static_graph=True" in caplog.text
    caplog.clear()
    fix_buckets("sparse", DistributedDataParallel(nn.Embedding(3, 4, sparse=True)))
    assert "sparse gradients" in caplog.text
    caplog.clear()
    hooked = DistributedDataParallel(nn.Linear(3, 4))
    hooked.register_comm_hook(None, allreduce_hook)
    fix_buckets("hooked", hooked)
    hooked(torch.ones(2, 3)).sum().backward()
    assert keeps_buckets(hooked)
    assert not caplog.text


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("steps", [1, 2])
def test_ddp_that_was_used_before_the_run_keeps_its_own_buckets(steps: int) -> None:
    model = DistributedDataParallel(nn.Linear(3, 4))
    for _ in range(steps):
        model(torch.ones(2, 3)).sum().backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    fix_buckets("model", model)
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.grad, gradient)
    model(torch.ones(2, 3)).sum().backward()
    assert keeps_buckets(model)


ONE_HAS_HOOKS = """
import datetime, os, sys
import torch, torch.distributed as dist
from dtruntime.run.pytorch.gradients import fix_buckets

def train(rank):
    dist.init_process_group(
        "gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=3,
        timeout=datetime.timedelta(seconds=60),
    )
    model = torch.nn.Linear(4, 1, bias=False)
    wrapper = torch.nn.parallel.DistributedDataParallel(model)
    if rank == 0:
        model.weight.register_hook(lambda gradient: None)
    fix_buckets("model", wrapper)
    for step in range(3):
        wrapper(torch.full((1, 4), float(rank + 1))).sum().backward()
        os.write(1, f"gradient {model.weight.grad[0, 0].item()}{os.linesep}".encode())
        model.weight.grad = None
    dist.barrier()

children = []
for rank in range(3):
    children.append(os.fork())
    if children[-1] == 0:
        train(rank)
        os._exit(0)
for child in children:
    os.waitpid(child, 0)
"""


@pytest.mark.long
def test_workers_of_which_one_has_hooks_do_the_same(tmp_path: Path) -> None:
    """As programs have that watch gradients on the first worker only."""
    with WorkerProcess(ONE_HAS_HOOKS, [str(tmp_path / "store")]) as process:
        assert process.wait() == 0
        found = [line for line in process.lines if line.startswith("gradient")]
    assert found == ["gradient 2.0"] * 9
