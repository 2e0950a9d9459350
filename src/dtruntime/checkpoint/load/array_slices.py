"""Slices of stored arrays: which bytes they are, and how they are read.

An array, or a shard of it, is stored in C order. A box of it (an offset and a length in each
dimension) is read as runs of stored bytes that have the box's elements at regular strides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

from ..file_format.chunks import CHUNK
from .pack_reader import PartReader

ROOM = 256 * 2**20
"""How many bytes are read into temporary memory at a time."""


@dataclass(frozen=True, slots=True)
class ByteRun:
    """Consecutive bytes that contain a part of a box."""

    at: tuple[int, ...]
    """Which part: the indexes into the box's first dimensions."""
    start: int
    """The first byte, relative to the array's."""
    nbytes: int
    shape: tuple[int, ...]
    """The shape of the part: the box's lengths in the other dimensions."""
    steps: tuple[int, ...]
    """The strides of the part, in elements."""

    @property
    def dense(self) -> bool:
        """Whether it contains nothing but the part, in C order."""
        return self.steps == steps_of(self.shape) or prod(self.shape) == 1


def steps_of(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of an array in C order, in elements."""
    steps = [1] * len(shape)
    for axis in range(len(shape) - 1, 0, -1):
        steps[axis - 1] = steps[axis] * shape[axis]
    return tuple(steps)


def byte_runs(
    shape: Sequence[int], offsets: Sequence[int], lengths: Sequence[int], itemsize: int
) -> Iterator[ByteRun]:
    """The runs of a box of an array; gaps between them are at least a chunk long.

    ``ValueError`` when the box does not lie within the array.
    """
    if not len(shape) == len(offsets) == len(lengths) or any(
        offset < 0 or length < 0 or offset + length > size
        for size, offset, length in zip(shape, offsets, lengths, strict=True)
    ):
        raise ValueError(f"{list(lengths)} at {list(offsets)} is no box of {list(shape)}")
    if not prod(lengths):
        return
    steps = steps_of(shape)
    depth = _depth(shape, lengths, steps, itemsize)
    inner, inner_steps = tuple(lengths[depth:]), steps[depth:]
    span = sum((length - 1) * step for length, step in zip(inner, inner_steps, strict=True)) + 1
    dense = prod(inner) == span
    first = sum(offset * step for offset, step in zip(offsets, steps, strict=True))
    for at in product(*map(range, lengths[:depth])):
        start = first + sum(i * step for i, step in zip(at, steps[:depth], strict=True))
        yield ByteRun(
            at,
            start * itemsize,
            span * itemsize,
            inner,
            steps_of(inner) if dense else inner_steps,
        )


def _depth(
    shape: Sequence[int], lengths: Sequence[int], steps: Sequence[int], itemsize: int
) -> int:
    """How many dimensions are iterated, because whole chunks lie between their elements."""
    depth = 0
    while depth < len(shape) and steps[depth] * itemsize >= CHUNK:
        if list(lengths[depth + 1 :]) == list(shape[depth + 1 :]):
            break
        depth += 1
    return depth


Settle = Callable[[NDArray[np.uint8]], None]


class SliceReader:
    """Reads byte runs from the parts of a checkpoint, many at a time and with bounded memory."""

    def __init__(self, part: Callable[[int], PartReader], room: int = ROOM) -> None:
        """``part`` returns the reader of a rank's part."""
        self._part = part
        self._room = room
        self._taken = 0
        self._targets: dict[int, list[tuple[int, memoryview]]] = {}
        self._aside: list[tuple[NDArray[np.uint8], Settle]] = []

    def into(self, rank: int, offset: int, target: memoryview) -> None:
        """Read into memory, by `finish` at the latest."""
        self._targets.setdefault(rank, []).append((offset, target))

    def aside(self, rank: int, offset: int, nbytes: int, settle: Settle) -> None:
        """Read into memory that is passed to ``settle``, by `finish` at the latest."""
        if self._taken and self._taken + nbytes > self._room:
            self.finish()
        self._taken += nbytes
        memory = np.empty(nbytes, np.uint8)
        self._aside.append((memory, settle))
        self.into(rank, offset, memory.data)

    def finish(self) -> None:
        """Read everything; ``CheckpointDamagedError`` when something is damaged."""
        for rank, targets in self._targets.items():
            self._part(rank).read_into(targets)
        for memory, settle in self._aside:
            settle(memory)
        self._targets, self._aside, self._taken = {}, [], 0
