"""Batches for PyTorch's ``DataLoader``.

`StrataDataset` is for your own ``DataLoader`` or torchdata's ``StatefulDataLoader``. `TorchLoader`
creates one, and its state is exact for any number of loader processes.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ..types import check_flag, check_whole
from .batches import row
from .loader import Delivery, Loader


class StrataDataset(IterableDataset):
    """The batches of a loader, or its samples one by one.

    Use it with ``batch_size=None``, or with ``samples=True`` and the loader's batch size. Loader
    processes take turns at batches, so that the order is the same for any number of them. They do
    not know the epoch: call `set_epoch` before each one, as with a distributed sampler; persistent
    ones (``persistent_workers``) then begin that epoch.

    Its state belongs to one loader process, as ``StatefulDataLoader`` expects: it can be loaded
    with the same number of processes.
    """

    def __init__(self, loader: Loader, *, samples: bool = False) -> None:
        super().__init__()
        self.loader = loader
        self._samples = check_flag("samples", samples)
        self._given = 0
        self._inside = 0
        self._start = loader.state_dict()
        self._requested = torch.zeros(2, dtype=torch.int64).share_memory_()
        """For persistent loader processes: how often `set_epoch` was called, and the last epoch."""
        self._followed = 0
        """The last of these calls that this process has followed."""
        self._reader = 0
        """The process that iterated last."""

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, unless the loader is already in it."""
        epoch = check_whole("epoch", epoch)
        self._followed += 1
        self._requested.copy_(torch.tensor((self._followed, epoch)))
        if epoch != self.loader.epoch:
            self.loader.set_epoch(epoch)
            self._begin()

    def __iter__(self) -> Iterator[Any]:
        """The batches or samples of this process."""
        part, parts, before = _share()
        if before is not None and self._reader == os.getpid():
            self._follow()
        self._reader = os.getpid()
        for step in self.loader.deliveries(part, parts, self._given, before):
            if self._samples:
                yield from self._rows(step)
            self._given, self._inside = self._given + 1, 0
            if not self._samples and step.batch is not None:
                yield step.batch
        self.loader.set_epoch(self.loader.epoch + 1)
        self._begin()

    def state_dict(self) -> dict[str, Any]:
        """The position of this process."""
        return {"start": self._start, "given": self._given, "inside": self._inside}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the position of a process."""
        self.loader.load_state_dict(state["start"])
        self._start = dict(state["start"])
        self._given = check_whole("given", state["given"])
        self._inside = check_whole("inside", state["inside"])
        self._reader = 0

    def _follow(self) -> None:
        """In a persistent loader process: go to the epoch of the training process."""
        calls, epoch = self._requested.tolist()
        if calls != self._followed:
            self._followed = calls
            self.loader.set_epoch(epoch)
            self.loader.restart()
            self._begin()
        elif self._given or self._inside:
            raise RuntimeError(
                "an epoch was abandoned, and this loader process has prefetched some of it: call "
                "set_epoch() before iterating again, or do not use persistent_workers"
            )

    def _rows(self, step: Delivery) -> Iterator[Any]:
        for place in range(self._inside, len(step.numbers)):
            self._inside = place + 1
            yield row(step.batch, place)

    def _begin(self) -> None:
        self._start = self.loader.state_dict()
        self._given = self._inside = 0


class _Deliveries(IterableDataset):
    """The steps of a loader."""

    def __init__(self, loader: Loader) -> None:
        super().__init__()
        self._loader = loader

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        part, parts, before = _share()
        for step in self._loader.deliveries(part, parts, before=before):
            yield tuple(step)


def _share() -> tuple[int, int, Callable[[int], None] | None]:
    """The first step of this process, every how many it makes, and what to call before each."""
    info = get_worker_info()
    return (0, 1, None) if info is None else (info.id, info.num_workers, seed_generators)


def seed_generators(number: int) -> None:
    """Seed the random generators of a loader process for the next step.

    ``decode`` and ``transform`` then draw the same numbers after a restart, with persistent
    processes, and with any number of them. The training process's own generators are untouched.
    """
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    torch.manual_seed(number & 0x7FFFFFFFFFFFFFFF)


class TorchLoader:
    """Batches of a loader, made by the processes of a PyTorch ``DataLoader``.

    Iterating continues from the loader's position to the end of its epoch; after the last batch,
    also if the loop counted batches and never reached the end, it begins the next epoch. Its state
    is that of the loader: it can be loaded with any number of processes, also by a plain `Loader`.
    """

    def __init__(self, loader: Loader, *, num_workers: int = 0, **options: Any) -> None:
        """``options`` go to ``DataLoader``: ``multiprocessing_context``, ``pin_memory``, ..."""
        for name in ("batch_size", "sampler", "batch_sampler", "shuffle", "drop_last"):
            if name in options:
                raise TypeError(f"{name} is an option of the loader: pass it to Loader()")
        if options.get("persistent_workers"):
            raise TypeError("persistent_workers cannot follow a change of epoch or state")
        if not options.get("in_order", True):
            raise TypeError("in_order=False is not supported: batches come in a fixed order")
        self.loader = loader
        self._num_workers = check_whole("num_workers", num_workers)
        self._options = options

    @property
    def epoch(self) -> int:
        """The current epoch, or the next one."""
        return self.loader.epoch

    def __len__(self) -> int:
        """The steps of a whole epoch, as with ``DataLoader``; ``len(loader)`` are left."""
        return self.loader.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        """Batches up to the end of the epoch."""
        self._leave_finished_epoch()
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        steps = DataLoader(
            _Deliveries(self.loader),
            batch_size=None,
            num_workers=self._num_workers,
            **self._options,
        )
        for item in self.loader.through(steps) if self._num_workers else steps:
            step = Delivery(*item)
            self.loader.accept(step)
            if step.batch is not None:
                yield step.batch
        self.loader.end_epoch()

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, unless the loader is already in it."""
        self.loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch handed out."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of any loader of the same dataset and order."""
        self.loader.load_state_dict(state)
        self._leave_finished_epoch()

    def _leave_finished_epoch(self) -> None:
        if self.loader.position and not len(self.loader):
            self.loader.end_epoch()


def convert(array: Any) -> Any:
    """A tensor that shares the array's memory."""
    return torch.from_numpy(array)


def nested(values: Any, ends: Any) -> Any:
    """A nested tensor of concatenated rows."""
    return torch.nested.nested_tensor_from_jagged(torch.from_numpy(values), torch.from_numpy(ends))


def none_of(rows: Any) -> Any:
    """A nested tensor like ``rows`` without rows."""
    return torch.nested.nested_tensor_from_jagged(rows.values()[:0], rows.offsets()[:1])
