"""Which arrays share memory, and which bytes of it have to be stored.

Pure arithmetic on addresses. An array covers the bytes from its first to its last element; those
that overlap are stored as one segment, in which each lies as it did in memory. An array alone is
stored as it lies when it has no gaps, and element after element when it has. Arrays that
interleave without sharing an element, such as two columns of a matrix, are stored apart unless
all that lies between them is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from math import prod
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from .buffers import StridedBuffer

B = TypeVar("B", bound=StridedBuffer)

MAX_COMPARED = 256
"""Interleaved arrays beyond this number are not compared: all between them is stored."""

MAX_WORK = 10_000
"""How long to look for a common element of two arrays before they count as sharing one."""


class MemoryLayout(NamedTuple):
    """How the elements of an array lie in memory."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @property
    def size(self) -> int:
        """What the elements take."""
        return prod(self.shape) * self.itemsize


class Memory(NamedTuple):
    """How a library's arrays are asked about their memory."""

    layout: Callable[[Any], MemoryLayout]
    owner: Callable[[Any], int]
    """The address of an array's storage, or 0: only what has one owner can be one piece."""


class Joined(NamedTuple, Generic[B]):
    """The buffers that arrays lie in, and where in them those lie that share one."""

    buffers: list[B]
    placed: list[tuple[int, int, MemoryLayout]]
    """Positions of arrays that lie within a larger piece of memory, its address, their layout."""

    def write(self, entries: list[dict[str, Any]]) -> None:
        """Write into the descriptions of those arrays where they lie."""
        for position, start, layout in self.placed:
            entries[position]["offset"] = layout.address - start
            entries[position]["strides"] = list(layout.strides)


def join(buffers: Iterable[B], memory: Memory) -> Joined[B]:
    """Make one buffer of those that overlap, of arrays on one device."""
    alone, groups = _overlapping(buffers)
    found = Joined(alone, [])
    for group in groups:
        by_owner: dict[int, list[B]] = {}
        for buffer in group:
            by_owner.setdefault(memory.owner(buffer.first), []).append(buffer)
        if len(by_owner) == 1:
            _share(group, next(iter(by_owner)), memory, found)
            continue
        for owned in by_owner.values():
            parts = join(owned, memory)
            found.buffers.extend(parts.buffers)
            found.placed.extend(parts.placed)
    return found


def _overlapping(buffers: Iterable[B]) -> tuple[list[B], list[list[B]]]:
    """Tell those that overlap none from groups of those that do, directly or through others."""
    alone: list[B] = []
    groups: list[list[B]] = []
    group: list[B] | None = None
    stop = 0
    for buffer in sorted(buffers, key=attrgetter("start")):
        if buffer.start >= stop:
            alone.append(buffer)
            stop, group = buffer.stop, None
            continue
        if group is None:
            group = [alone.pop()]
            groups.append(group)
        group.append(buffer)
        stop = max(stop, buffer.stop)
    return alone, groups


def _share(group: list[B], owner: int, memory: Memory, found: Joined[B]) -> None:
    """Make as few pieces of overlapping memory as its arrays need."""
    layouts = {buffer.position: memory.layout(buffer.first) for buffer in group}
    distinct = {layouts[buffer.position]: buffer for buffer in group}
    needed = sum(layout.size for layout in distinct)
    extent = max(buffer.stop for buffer in group) - group[0].start
    root = dict.fromkeys(distinct, next(iter(distinct)))
    if extent > needed and len(distinct) <= MAX_COMPARED:
        root = _components(list(distinct))
    members: dict[MemoryLayout, list[B]] = {}
    for buffer in group:
        members.setdefault(root[layouts[buffer.position]], []).append(buffer)
    for sharing in members.values():
        _unite(sharing, owner, layouts, found)


def _unite(group: list[B], owner: int, layouts: dict[int, MemoryLayout], found: Joined[B]) -> None:
    group.sort(key=attrgetter("position"))
    united = group[0]
    united.others = tuple((buffer.position, buffer.first) for buffer in group[1:])
    found.buffers.append(united)
    if len({layouts[buffer.position] for buffer in group}) == 1:
        return
    start = min(buffer.start for buffer in group)
    stop = max(buffer.stop for buffer in group)
    if owner:
        # Elements of each size have to lie at a multiple of it, as they do in the storage.
        widest = max(layouts[buffer.position].itemsize for buffer in group)
        start -= (start - owner) % widest
    united.cover(start, stop, stop - start)
    found.placed.extend((b.position, start, layouts[b.position]) for b in group)


def _components(layouts: Sequence[MemoryLayout]) -> dict[MemoryLayout, MemoryLayout]:
    """Map each layout to one that stands for all it shares elements with, also indirectly."""
    root = {layout: layout for layout in layouts}

    def find(layout: MemoryLayout) -> MemoryLayout:
        while root[layout] != layout:
            layout = root[layout]
        return layout

    for one, other in combinations(layouts, 2):
        if find(one) != find(other) and share_an_element(one, other):
            root[find(other)] = find(one)
    return {layout: find(layout) for layout in layouts}


class _Ghost:
    """An array that is only asked where it lies: nothing may read it."""

    def __init__(self, layout: MemoryLayout) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (layout.address, True),
            "shape": layout.shape,
            "strides": layout.strides,
            "typestr": f"|V{layout.itemsize}",
        }


def share_an_element(one: MemoryLayout, other: MemoryLayout) -> bool:
    """Whether some byte belongs to both; also True when that is too hard to tell."""
    try:
        ghosts: list[Any] = [np.asarray(_Ghost(layout)) for layout in (one, other)]
        work: Any = MAX_WORK
        return np.shares_memory(ghosts[0], ghosts[1], work)
    except np.exceptions.TooHardError:
        return True


def overlaps_itself(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Whether elements of an array may share bytes, other than by a stride of 0."""
    reach = itemsize
    for stride, length in sorted(zip(map(abs, strides), shape, strict=True)):
        if stride and length > 1:
            if stride < reach:
                return True
            reach += stride * (length - 1)
    return False


def dense_strides(shape: Sequence[int], itemsize: int) -> list[int]:
    """The strides of an array whose elements follow each other in C order."""
    strides = [itemsize] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return strides


def extent_of(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[int, int]:
    """The lowest and one after the highest byte of an array, relative to its first element."""
    if not prod(shape):
        return 0, 0
    low = high = 0
    for length, stride in zip(shape, strides, strict=True):
        reach = (length - 1) * stride
        low, high = (low + reach, high) if reach < 0 else (low, high + reach)
    return low, high + itemsize
