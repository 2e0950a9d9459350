"""The memory that a tree's arrays lie in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from math import prod
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np

Key: TypeAlias = "str | int | float | complex | bool | bytes | tuple[Any, ...] | None"
"""A key of a dict, an element of a set, or an index of a sequence."""


class Buffer(ABC):
    """One piece of memory to store: an array's, or what several arrays share.

    It refers to the user's arrays and copies nothing until it is asked to.
    """

    # A state may have tens of thousands: no dict, no tuples that are mostly empty.
    __slots__ = ("device", "dtype", "first", "itemsize", "key", "nbytes", "others", "position")

    key: str
    """Its readable name, that of its first use; unlike any other of the same tree."""
    nbytes: int
    """How many bytes it has; never 0."""
    dtype: str
    """The name of its elements' type; of the first array's, where arrays of several share it."""
    itemsize: int
    """The size of that type in bytes."""
    device: str
    """Where it lies: ``"cpu"``, ``"cuda:0"`` and so on."""
    first: Any
    """The array in it that the state uses first."""
    position: int
    """Which of the tree's arrays that is."""
    others: tuple[tuple[int, Any], ...]
    """What else lies in it: positions and arrays, in the order of their use."""

    library = "python"
    """Whose arrays they are: ``"torch"``, ``"numpy"``, ``"jax"`` or ``"python"``."""

    @property
    def sources(self) -> tuple[Any, ...]:
        """The arrays that lie in it, in the order of their use."""
        return (self.first, *(array for _, array in self.others))

    @abstractmethod
    def memory(self) -> memoryview | None:
        """Look at the memory as it lies, read-only; None where it has to be copied together."""

    @abstractmethod
    def copy_into(self, target: memoryview) -> None:
        """Write the bytes into memory of exactly that size, and wait until they are there."""

    def version(self) -> object:
        """A token that changes when an array is changed in place; None if that is not counted."""
        return None

    def _check(self, target: memoryview) -> None:
        if target.readonly or target.nbytes != self.nbytes:
            kind = "read-only" if target.readonly else f"{target.nbytes} bytes of"
            raise ValueError(f"{self.key} has {self.nbytes} bytes: cannot copy into {kind} memory")


class StridedBuffer(Buffer):
    """The memory from an array's lowest byte to its highest, or of several that overlap."""

    __slots__ = ("gathered", "start", "stop")

    start: int
    """The address of the lowest byte."""
    stop: int
    """One after the address of the highest byte."""
    gathered: bool
    """The array has gaps: its elements are stored one after the other."""

    def cover(self, start: int, stop: int, size: int) -> None:
        """Set which memory it is, when the elements of one array in it take ``size`` bytes."""
        self.start = start
        self.stop = stop
        self.gathered = gathered = stop - start > size
        self.nbytes = size if gathered else stop - start


class BytesBuffer(Buffer):
    """One byte string."""

    __slots__ = ()

    def __init__(self, value: bytes | bytearray, position: int) -> None:
        self.first = value
        self.position = position
        self.others = ()
        self.nbytes = len(value)
        self.dtype = "uint8"
        self.itemsize = 1
        self.device = "cpu"

    def memory(self) -> memoryview:
        """Look at the bytes."""
        return memoryview(self.first).toreadonly()

    def copy_into(self, target: memoryview) -> None:
        """Copy the bytes."""
        self._check(target)
        target.cast("B")[:] = self.memory()


def memory_at(address: int, nbytes: int, owner: object, *, writable: bool) -> memoryview:
    """Look at memory by its address; the view keeps its owner alive."""
    window: np.ndarray[Any, Any] = np.asarray(_Window(address, nbytes, owner, writable))
    return window.data


class _Window:
    """Bytes of an owner, as numpy asks for them."""

    __slots__ = ("__array_interface__", "_owner")

    def __init__(self, address: int, nbytes: int, owner: object, writable: bool) -> None:
        self._owner = owner
        self.__array_interface__ = {
            "version": 3,
            "data": (address, not writable),
            "shape": (nbytes,),
            "typestr": "|u1",
        }


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
