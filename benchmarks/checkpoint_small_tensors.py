"""`python -m benchmarks.checkpoint_small_tensors`: what each of very many small tensors costs.

A state of tensors of 16 bytes is saved and loaded by Strata, ``torch.save``, torch's distributed
checkpoint and safetensors, in turn. What takes long there is not the bytes: it is what is done with
each tensor. Shown are the medians of all rounds, in microseconds a tensor.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from dtruntime import CheckpointManager

State = dict[str, Any]


@dataclass
class Contender:
    """One way to save and load, and what it took: the caller's wait, until it is durable, a load.

    ``save`` returns when the caller may go on, with a function that waits for the rest.
    """

    name: str
    save: Callable[[State, Path], Callable[[], object]]
    load: Callable[[State, Path], object]
    stalls: list[float] = field(default_factory=list)
    saves: list[float] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)

    def round(self, state: State, folder: Path) -> None:
        """Save and load once."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        began = time.perf_counter()
        wait = self.save(state, folder)
        self.stalls.append(time.perf_counter() - began)
        wait()
        self.saves.append(time.perf_counter() - began)
        began = time.perf_counter()
        self.load(state, folder)
        self.loads.append(time.perf_counter() - began)


def done() -> None:
    """Nothing is left to wait for."""


def save_with_strata(state: State, folder: Path) -> Callable[[], object]:
    """Save in the background, as `CheckpointManager.save` does."""
    manager = CheckpointManager(folder)
    manager.save(state, 1)
    return manager.close


def load_with_strata(state: State, folder: Path) -> object:
    """Load the newest checkpoint."""
    with CheckpointManager(folder) as manager:
        return manager.load_state()


def waiting(save: Callable[[State, Path], object]) -> Callable[[State, Path], Callable[[], object]]:
    """A save that keeps the caller until it is done."""

    def saved(state: State, folder: Path) -> Callable[[], object]:
        save(state, folder)
        return done

    return saved


def contenders() -> list[Contender]:
    """All of them."""
    return [
        Contender("Strata", save_with_strata, load_with_strata),
        Contender(
            "torch.save",
            waiting(lambda state, folder: torch.save(state, folder / "state.pt")),
            lambda state, folder: torch.load(folder / "state.pt"),
        ),
        Contender(
            "DCP",
            waiting(lambda state, folder: dcp.save(state, checkpoint_id=str(folder))),
            lambda state, folder: dcp.load(dict(state), checkpoint_id=str(folder)),
        ),
        Contender(
            "safetensors",
            waiting(lambda state, folder: save_file(state, folder / "state.safetensors")),
            lambda state, folder: load_file(folder / "state.safetensors"),
        ),
    ]


def shown(found: list[Contender], tensors: int) -> Table:
    """A table of the medians."""
    table = Table("microseconds a tensor", "save() keeps", "saved", "loaded")
    for one in found:
        medians = [statistics.median(times) for times in (one.stalls, one.saves, one.loads)]
        table.add_row(one.name, *(f"{seconds / tensors * 1e6:.1f}" for seconds in medians))
    return table


def main() -> None:
    """Measure and show."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tensors", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # DCP has much to say about a single process
    state = {f"layer{i}": torch.full((4,), float(i)) for i in range(options.tensors)}
    found = contenders()
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as scratch:
        for _ in range(options.rounds):
            for one in found:
                one.round(state, Path(scratch) / "place")
    Console().print(shown(found, options.tensors))


if __name__ == "__main__":
    main()
