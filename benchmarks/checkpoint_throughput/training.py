"""What a save stores while a model is trained: only what has changed.

Each way to train has a process of its own, which saves after every step.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtruntime.bench.report import Announce

from ..processes import ProcessFailed, call, serve
from .results import Increment

WARM_UP_STEPS = 10
"""Before the first save, so that the optimizer knows the gradients' size."""
_MOST_THREADS = 2


@dataclass(frozen=True, slots=True)
class Way:
    """A way to train and to save."""

    name: str
    trained: str = "all"
    dtype: str = "float32"
    optimizer: bool = True
    """Whether its state is saved as well."""
    delta: bool = False
    learning_rate: float = 3e-4
    steps_between: int = 1


LORA = "LoRA-like: adapters, optimizer"
HEAD = "frozen backbone: head, optimizer"
BF16 = "bf16, weights"
WAYS = (
    Way(LORA, trained="adapters"),
    Way(HEAD, trained="head"),
    Way(BF16, dtype="bfloat16", optimizer=False, delta=True),
    Way(f"{BF16}, 10 steps", dtype="bfloat16", optimizer=False, delta=True, steps_between=10),
    Way(f"{BF16}, rate 1e-5", dtype="bfloat16", optimizer=False, delta=True, learning_rate=1e-5),
    Way("bf16, weights and optimizer", dtype="bfloat16", delta=True),
    Way("fp32, weights", optimizer=False, delta=True),
    Way("fp32, weights, rate 1e-5", optimizer=False, delta=True, learning_rate=1e-5),
    Way("fp32, weights and optimizer", delta=True),
)


def compare(width: int, saves: int, scratch: Path, announce: Announce) -> list[Increment]:
    """Every way to train."""
    increments = []
    for number, way in enumerate(WAYS):
        announce(f"incremental: {way.name}")
        folder = scratch / "training"
        question = {"way": number, "width": width, "saves": saves, "folder": str(folder)}
        try:
            increments.append(Increment(way.name, **call(__name__, question)))
        except ProcessFailed as exc:
            increments.append(Increment(way.name, error=str(exc)))
        shutil.rmtree(folder, ignore_errors=True)
    return increments


def measure(way: int, width: int, saves: int, folder: str) -> dict[str, Any]:
    """Train and save; what the first, full save and those after it have stored."""
    import torch

    from dtruntime import CheckpointManager

    torch.set_num_threads(_MOST_THREADS)
    torch.manual_seed(7)
    chosen = WAYS[way]
    training = _training(chosen, width)
    for _ in range(WARM_UP_STEPS):
        loss = training.step()
    with CheckpointManager(folder, incremental=True, delta=chosen.delta) as manager:
        saved = [manager.save(_state(training, chosen), 0).wait()]
        for step in range(1, saves + 1):
            for _ in range(chosen.steps_between):
                loss = training.step()
            saved.append(manager.save(_state(training, chosen), step).wait())
        _check(manager.load_state(saves), _state(training, chosen))
    first, *later = saved
    return {
        "full_bytes": first.size_bytes,
        "full_seconds": first.durable_seconds,
        "written": [each.written_bytes for each in later],
        "seconds": [each.durable_seconds for each in later],
        "stalls": [each.stall_seconds for each in later],
        "loss": loss,
    }


def _training(way: Way, width: int) -> Any:
    import torch

    from . import model

    made = model.Model(width).to(getattr(torch, way.dtype))
    if way.trained == "adapters":
        model.adapt(made)
    elif way.trained == "head":
        model.freeze_backbone(made)
    return model.Training(made, way.learning_rate)


def _state(training: Any, way: Way) -> dict[str, Any]:
    state = {"model": training.model.state_dict()}
    return {**state, "optimizer": training.optimizer.state_dict()} if way.optimizer else state


def _check(loaded: dict[str, Any], state: dict[str, Any]) -> None:
    import torch

    for name, tensor in state["model"].items():
        if not torch.equal(loaded["model"][name], tensor):
            raise ValueError(f"{name} came back with other values")


if __name__ == "__main__":
    serve(lambda order: lambda question: measure(**question))
