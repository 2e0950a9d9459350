"""Programs that train with torch in one of the ways that people do, as workers of a test.

``python gradient_worker.py FOLDER PROGRAM ...`` runs them one after the other, each as a job of its
own, and keeps the weights that this worker has at the end in FOLDER/PROGRAM-RANK.npz. The test runs
the same programs alone: whatever the number of workers, the weights have to be the same.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from dtruntime import ConfigError, Run, StrataError
from dtruntime.telemetry import configure_logging

SAMPLES, BATCH = 70, 20
"""The last batch has 10 samples, which two workers share."""
Weights = dict[str, np.ndarray]


def start(folder: Path, **options: Any) -> Run:
    """A run as all programs here have it; two strands, however many workers there are."""
    reading = {"output": "torch", "streams": 2, **options.pop("loader", {})}
    given: dict[str, Any] = {
        "data": SAMPLES,
        "global_batch_size": BATCH,
        "epochs": 2,
        "process_group": "auto",
    }
    given |= {"job": f"{folder.parent.name}-{folder.name}", "collective_seconds": 20.0}
    return Run(folder, loader=reading, **given | options)


def points(batch: dict[str, Any]) -> torch.Tensor:
    x = batch["sample"].float().unsqueeze(1) / SAMPLES
    return torch.cat([x, x**2, torch.sin(9 * x)], dim=1)


def wanted(x: torch.Tensor) -> torch.Tensor:
    return x @ torch.tensor([[1.0], [-2.0], [0.5]]) + 0.3


def network() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def loss_of(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    x = points(batch)
    return nn.functional.mse_loss(model(x), wanted(x))


def weights(**modules: nn.Module) -> Weights:
    return {
        f"{name}.{key}": torch.view_as_real(value).numpy() if value.is_complex() else value.numpy()
        for name, module in modules.items()
        for key, value in module.state_dict().items()
    }


def plain(folder: Path) -> Weights:
    """Ten lines, with clipping and a scheduler; one of two workers has no sample in one step."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    track = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    with start(folder, data=SAMPLES - 9, track=track) as run:
        for batch in run:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
    return weights(model=model)


def by_hand(folder: Path) -> Weights:
    """With the explicit call, which one of the workers may leave out: it changes nothing."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with start(folder, track={"model": model, "optimizer": optimizer}) as run:
        for batch in run:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            before = [parameter.grad.clone() for parameter in model.parameters()]
            if run.rank == 0:
                run.average_gradients(model)
            after = [parameter.grad for parameter in model.parameters()]
            assert all(map(torch.equal, before, after))
            optimizer.step()
    return weights(model=model)


def no_backward_without_samples(folder: Path) -> Weights:
    """One sample is left for the last step: a worker without any does not call backward()."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with start(folder, data=SAMPLES - 9, track={"model": model, "optimizer": optimizer}) as run:
        for batch in run:
            optimizer.zero_grad()
            if len(batch["sample"]):
                loss_of(model, batch).backward()
            optimizer.step()
    return weights(model=model)


def accumulation(folder: Path) -> Weights:
    """Steps of the optimizer after every second batch."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with start(folder, track={"model": model, "optimizer": optimizer}) as run:
        for batch in run:
            (loss_of(model, batch) / 2).backward()
            if (run.step + 1) % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
    return weights(model=model)


def adversaries(folder: Path) -> Weights:
    """Two modules and two optimizers, each of which is left alone while the other learns."""
    maker, critic = network(), nn.Linear(1, 1)
    makers = torch.optim.Adam(maker.parameters(), lr=0.01)
    critics = torch.optim.Adam(critic.parameters(), lr=0.01, weight_decay=0.1)
    track = {"maker": maker, "critic": critic, "makers": makers, "critics": critics}
    with start(folder, track=track) as run:
        for batch in run:
            x = points(batch)
            critics.zero_grad()
            (critic(maker(x).detach()) - critic(wanted(x))).pow(2).mean().backward()
            critics.step()
            makers.zero_grad()
            (-critic(maker(x)).mean() + loss_of(maker, batch)).backward()
            makers.step()
    return weights(maker=maker, critic=critic)


class Odd(nn.Module):
    """Sparse, complex, unused, frozen and shared parameters, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(SAMPLES, 3, sparse=True)
        self.turn = nn.Parameter(torch.randn(3, dtype=torch.cfloat))
        self.unused = nn.Linear(3, 3)
        self.rarely = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        found = self.table(numbers) * self.turn.abs() + (x * self.turn).real * self.frozen
        if (chosen := numbers == 5).any():  # which one worker has, in one step
            found = found + chosen[:, None] * self.rarely
        return found.sum(1, keepdim=True)


def odd(folder: Path) -> Weights:
    """What is not used on any worker stays as it is, whatever the weight decay."""
    model = Odd()
    rest = [p for name, p in model.named_parameters() if name != "table.weight"]
    optimizer = torch.optim.AdamW(rest, lr=0.01, weight_decay=0.5)
    rows = torch.optim.SparseAdam(model.table.parameters(), lr=0.01)
    track = {"model": model, "same": model, "optimizer": optimizer, "rows": rows}
    with start(folder, track=track) as run:
        for batch in run:
            model.frozen.requires_grad_(run.step >= 4)
            x = points(batch)
            optimizer.zero_grad()
            rows.zero_grad()
            nn.functional.mse_loss(model(x, batch["sample"]), wanted(x)).backward()
            assert model.unused.weight.grad is None
            assert model.table.weight.grad.is_sparse
            optimizer.step()
            rows.step()
    return weights(model=model)


def own_gradients(folder: Path) -> Weights:
    """Gradients that no backward() has made, a parameter that comes later, and one by itself."""
    model, scale = network(), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.05, momentum=0.9)
    added = nn.Parameter(torch.zeros(1))
    with start(folder, track={"model": model, "optimizer": optimizer}) as run:
        for batch in run:
            if run.step == 2:
                optimizer.add_param_group({"params": [added]})
            x = points(batch)
            loss = nn.functional.mse_loss(model(x) * scale + added, wanted(x))
            used = [*model.parameters(), scale, added]
            for parameter, gradient in zip(used, torch.autograd.grad(loss, used), strict=True):
                parameter.grad = gradient
            optimizer.step()
    extra = {"scale": scale.detach().numpy(), "added": added.detach().numpy()}
    return {**weights(model=model), **extra}


def scaler(folder: Path) -> Weights:
    """Scaled losses, and a module that runs its forward part twice."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaling = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with start(folder, track={"model": model, "optimizer": optimizer, "scaling": scaling}) as run:
        for batch in run:
            optimizer.zero_grad()
            x = points(batch)
            again = torch.utils.checkpoint.checkpoint(model, x.requires_grad_(), use_reentrant=True)
            scaling.scale(nn.functional.mse_loss(again + model(x), wanted(x))).backward()
            scaling.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaling.step(optimizer)
            scaling.update()
    return weights(model=model)


def closures(folder: Path) -> Weights:
    """An optimizer that calls backward() itself, as often as it likes."""
    model = network()
    optimizer = torch.optim.LBFGS(
        model.parameters(), lr=0.1, max_iter=3, tolerance_grad=0, tolerance_change=0
    )
    with start(folder, track={"model": model, "optimizer": optimizer}) as run:
        for batch in run:

            def evaluate(batch: dict[str, Any] = batch) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                loss.backward()
                return loss

            optimizer.step(evaluate)
    return weights(model=model)


PROGRAMS: dict[str, Callable[[Path], Weights]] = {
    program.__name__: program
    for program in (
        *(plain, by_hand, no_backward_without_samples, accumulation, adversaries, odd),
        *(own_gradients, scaler, closures),
    )
}


def undecided(folder: Path) -> Weights:
    """Nobody says what is to become of the gradients."""
    model = network()
    try:
        with start(folder, process_group=None, track={"model": model}):
            raise AssertionError("the run was entered")
    except ConfigError as exc:
        return {"error": np.array(str(exc))}


def one_sided(folder: Path) -> Weights:
    """One of the workers calls backward() once more than the others."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = start(folder, track={"model": model, "optimizer": optimizer})
    try:
        with run:
            for batch in run:
                with run.guard():
                    loss_of(model, batch).backward()
                    if run.rank == 0 and run.step == 1:
                        loss_of(model, batch).backward()
                    optimizer.step()
    except StrataError as exc:
        return {"error": np.array(str(exc)), "step": np.array(run.step)}
    raise AssertionError("nobody was told")


# Programs that have made a process group of their own


def in_own_group(folder: Path, step: Callable[[Run, nn.Module, Any], None], **more: Any) -> Weights:
    """Train with a step of the program's own in a group of its own; what was trained, and told."""
    rank, world = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    store = dist.FileStore(f"{folder}.store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    model = network()
    used = nn.parallel.DistributedDataParallel(model) if more.pop("ddp", False) else model
    run = start(folder, process_group=None, data=80, track={"model": used}, **more)
    told = ""
    try:
        with run:
            for batch in run:
                step(run, used, loss_of(used, batch))
    except ConfigError as exc:
        told = str(exc)
    finally:
        dist.destroy_process_group()
    return {**weights(model=model), "error": np.array(told), "step": np.array(run.step)}


def descend(run: Run, model: nn.Module, loss: torch.Tensor) -> None:
    """A step that averages nothing."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def descend_averaged(run: Run, model: nn.Module, loss: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    loss.backward()
    run.average_gradients(model)
    optimizer.step()


def descend_by_hand(run: Run, model: nn.Module, loss: torch.Tensor) -> None:
    """A step without an optimizer that anybody could know."""
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad


def descend_summed(run: Run, model: nn.Module, loss: torch.Tensor) -> None:
    """A step whose program averages without the run."""
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter -= 0.1 * parameter.grad / run.world_size


def own_group_averaged(folder: Path) -> Weights:
    return in_own_group(folder, descend_averaged)


def own_group_ddp(folder: Path) -> Weights:
    return in_own_group(folder, descend, ddp=True)


def own_group_independent(folder: Path) -> Weights:
    return in_own_group(folder, descend_summed, independent=True)


def own_group_forgotten(folder: Path) -> Weights:
    return in_own_group(folder, descend)


def own_group_by_hand(folder: Path) -> Weights:
    return in_own_group(folder, descend_by_hand)


OWN_GROUP = ("own_group_averaged", "own_group_ddp", "own_group_independent")
FORGOTTEN = ("own_group_forgotten", "own_group_by_hand")


def main() -> None:
    configure_logging()
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    for name in sys.argv[2:]:
        np.savez(folder / f"{name}-{os.environ['RANK']}.npz", **globals()[name](folder / name))


if __name__ == "__main__":
    main()
