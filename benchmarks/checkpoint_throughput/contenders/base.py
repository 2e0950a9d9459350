"""What saves and loads, and the states that it saves: every chunk of them is different."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtruntime.bench.checkpoint_throughput import ARRAY_BYTES, fill_random

SMALL = 4096
"""Beside each tensor there is a small one, as a layer has a bias."""
TINY = 4
"""Numbers in each of very many tensors."""


@dataclass(frozen=True, slots=True)
class Task:
    """How much is saved, and where."""

    size: int
    folder: Path
    bucket: str = ""
    """With objects: where they go; the environment says how to get there."""
    is_tiny: bool = False
    """Whether tensors are very many and very small."""


class Contender(ABC):
    """Saves one state again and again, in a process of its own.

    The state is made by the constructor, and does not change.
    """

    def __init__(self, task: Task, **options: Any) -> None:
        """``options`` are attributes that differ from the class's."""
        self.task = task
        self.number = 0
        vars(self).update(options)
        self.state: Any = self.make_state()

    @abstractmethod
    def make_state(self) -> Any:
        """What is saved."""

    @abstractmethod
    def save(self) -> None:
        """Begin a save; returns when the state may be changed."""

    def settle(self) -> None:  # noqa: B027
        """Return when what was saved is durable."""

    def rest(self) -> None:  # noqa: B027
        """Return when nothing goes on any more; not measured, as training goes on meanwhile."""

    def load(self) -> object:
        """Load what was saved last."""
        raise NotImplementedError

    def check(self, loaded: Any) -> None:
        """Raise ``ValueError`` when that is not what was saved."""
        if not np.array_equal(np.frombuffer(loaded, np.uint8), np.frombuffer(self.state, np.uint8)):
            raise ValueError("other bytes came back")

    def close(self) -> None:  # noqa: B027
        """Release everything."""

    def next_path(self, suffix: str = "") -> Path:
        """Where the next save goes."""
        self.number += 1
        return self.path(suffix)

    def path(self, suffix: str = "") -> Path:
        """Where the last save went."""
        return self.task.folder / f"save-{self.number}{suffix}"


class SavesBytes(Contender):
    """Saves random bytes."""

    def make_state(self) -> Any:
        numbers = np.empty(self.task.size // 4, np.uint32)
        fill_random(numbers)
        return numbers.tobytes()


class SavesTensors(Contender):
    """Saves weights and biases of some layers, in memory of torch's allocator as a model has."""

    def make_state(self) -> Any:
        import torch

        if self.task.is_tiny:
            count = self.task.size // (4 * TINY)
            return {f"layer{number}": torch.full((TINY,), float(number)) for number in range(count)}
        tensors = {name: torch.empty(nbytes // 4) for name, nbytes in _layers(self.task.size)}
        for salt, tensor in enumerate(tensors.values()):
            fill_random(tensor.numpy().view(np.uint32), salt * ARRAY_BYTES)
        return tensors

    def check(self, loaded: Any) -> None:
        import torch

        for name, tensor in self.state.items():
            if not torch.equal(loaded[name].view(torch.int32), tensor.view(torch.int32)):
                raise ValueError(f"{name} came back with other values")


def make_arrays(size: int) -> dict[str, NDArray[np.float32]]:
    """Weights and biases of some layers, ``size`` bytes in all."""
    arrays = {name: np.empty(nbytes // 4, np.float32) for name, nbytes in _layers(size)}
    for salt, array in enumerate(arrays.values()):
        fill_random(array.view(np.uint32), salt * ARRAY_BYTES)
    return arrays


def _layers(size: int) -> Iterator[tuple[str, int]]:
    layers = max(8, -(-size // ARRAY_BYTES))
    for number in range(layers):
        whole = size * (number + 1) // layers - size * number // layers
        yield f"layers.{number}.weight", max(SMALL, (whole - SMALL) // SMALL * SMALL)
        yield f"layers.{number}.bias", SMALL


def flush(path: Path) -> None:
    """Bring a file and its name to the disk."""
    for each in (path, path.parent):
        handle = os.open(each, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
