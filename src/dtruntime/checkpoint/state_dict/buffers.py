"""The memory of a state's arrays, and which arrays share it.

An array covers the bytes from its first to its last element. Arrays that overlap are stored as one
buffer in which each keeps its place. An array on its own is stored as it lies if it has no gaps,
and element by element if it has. Arrays that interleave without sharing an element, such as two
columns of a matrix, are stored separately unless everything between them is needed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

Key: TypeAlias = "str | int | float | complex | bool | bytes | tuple[Any, ...] | None"
"""A key of a dict, an element of a set, or an index of a sequence."""

MAX_COMPARED = 256
"""More interleaved arrays than this are not compared: everything between them is stored."""

MAX_WORK = 10_000
"""How long to search for a common element of two arrays before assuming that there is one."""


class Buffer(ABC):
    """One piece of memory to store: of one array, or shared by several.

    It refers to the user's arrays and copies nothing until it is asked to.
    """

    # A state may have tens of thousands: no dict, no tuples that are mostly empty.
    __slots__ = ("device", "dtype", "first", "itemsize", "key", "nbytes", "others", "position")

    key: str
    """Its readable name: where it is first used. Unique within a state."""

    def __init__(
        self, array: Any, position: int, nbytes: int, dtype: str, itemsize: int, device: str
    ) -> None:
        self.first = array
        """The array that the state uses first."""
        self.position = position
        """The number of that array among all of the state."""
        self.others: tuple[tuple[int, Any], ...] = ()
        """Further arrays that lie in it, with their numbers, in order of use."""
        self.nbytes = nbytes
        """Never 0."""
        self.dtype = dtype
        """The name of the element type; of the first array if several types share the memory."""
        self.itemsize = itemsize
        self.device = device
        """``"cpu"``, ``"cuda:0"`` and so on."""

    @property
    def sources(self) -> tuple[Any, ...]:
        """The arrays that lie in it, in order of use."""
        return (self.first, *(array for _, array in self.others))

    @abstractmethod
    def memory(self) -> memoryview | None:
        """A read-only view of the memory; None if the bytes have to be gathered or transferred."""

    @abstractmethod
    def copy_into(self, target: memoryview) -> None:
        """Copy the bytes into memory of exactly that size, and wait until they have arrived."""

    def version(self) -> object:
        """A token that changes when an array is modified in place; None if that is not counted."""
        return None

    def _check(self, target: memoryview) -> None:
        if target.readonly or target.nbytes != self.nbytes:
            kind = "read-only" if target.readonly else f"{target.nbytes} bytes of"
            raise ValueError(f"{self.key} has {self.nbytes} bytes: cannot copy into {kind} memory")


class BytesBuffer(Buffer):
    """A long ``bytes`` or ``bytearray``."""

    __slots__ = ()

    def __init__(self, value: bytes | bytearray, position: int) -> None:
        super().__init__(value, position, len(value), "uint8", 1, "cpu")

    def memory(self) -> memoryview:
        """A view of the bytes."""
        return memoryview(self.first).toreadonly()

    def copy_into(self, target: memoryview) -> None:
        """Copy the bytes."""
        self._check(target)
        target.cast("B")[:] = self.memory()


class MemoryLayout(NamedTuple):
    """How the elements of an array lie in memory."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int


class StridedBuffer(Buffer):
    """The memory from an array's lowest byte to its highest, or of several that overlap."""

    __slots__ = ("gathered", "start", "stop")

    def __init__(
        self,
        array: Any,
        position: int,
        nbytes: int,
        dtype: str,
        itemsize: int,
        device: str,
        start: int,
    ) -> None:
        super().__init__(array, position, nbytes, dtype, itemsize, device)
        self.start = start
        """The address of the lowest byte."""
        self.stop = start + nbytes
        """One past the address of the highest byte."""
        self.gathered = False
        """The array has gaps: its elements are stored one after the other."""

    def cover(self, start: int, stop: int, size: int) -> None:
        """Set the memory that it covers, if the elements of an array in it take ``size`` bytes."""
        self.start = start
        self.stop = stop
        self.gathered = gathered = stop - start > size
        self.nbytes = size if gathered else stop - start

    def stretch(self) -> None:
        """Cover an array that is not contiguous."""
        address, shape, strides, itemsize = self.layout()
        low, high = extent_of(shape, strides, itemsize)
        self.cover(address + low, address + high, self.nbytes)
        if self.gathered and overlaps_itself(shape, strides, itemsize):
            self.cover(self.start, self.stop, self.stop - self.start)

    @abstractmethod
    def layout(self) -> MemoryLayout:
        """How the first array lies in memory."""

    def owner(self) -> int:
        """The address of the first array's storage, or 0; arrays of two storages never share."""
        return 0


class _ArrayInterface:
    """Memory by its address, in the form that numpy takes arrays from."""

    __slots__ = ("__array_interface__", "_owner")

    def __init__(
        self, layout: MemoryLayout, kind: str, owner: object = None, *, writable: bool = False
    ) -> None:
        self._owner = owner
        self.__array_interface__ = {
            "version": 3,
            "data": (layout.address, not writable),
            "shape": layout.shape,
            "strides": layout.strides,
            "typestr": f"|{kind}{layout.itemsize}",
        }


def memory_at(address: int, nbytes: int, owner: object, *, writable: bool) -> memoryview:
    """A view of memory by its address; the view keeps the owner alive."""
    layout = MemoryLayout(address, (nbytes,), (1,), 1)
    window: Any = np.asarray(_ArrayInterface(layout, "u", owner, writable=writable))
    view: memoryview = window.data
    return view


B = TypeVar("B", bound=StridedBuffer)


def join(buffers: Iterable[B], entries: list[dict[str, Any]]) -> list[B]:
    """Merge overlapping buffers of one device; write into ``entries`` where their arrays lie."""
    joined, groups = _overlapping(buffers)
    for group in groups:
        by_owner: dict[int, list[B]] = {}
        for buffer in group:
            by_owner.setdefault(buffer.owner(), []).append(buffer)
        if len(by_owner) == 1:
            joined += _shared(group, entries)
            continue
        for owned in by_owner.values():
            joined += join(owned, entries)
    return joined


def _overlapping(buffers: Iterable[B]) -> tuple[list[B], list[list[B]]]:
    """Split into buffers that overlap no other, and groups that overlap, directly or indirectly."""
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


def _shared(group: list[B], entries: list[dict[str, Any]]) -> Iterator[B]:
    """Merge overlapping buffers into as few as their arrays need."""
    layouts = {buffer.position: buffer.layout() for buffer in group}
    distinct = list(dict.fromkeys(layouts.values()))
    needed = sum(prod(layout.shape) * layout.itemsize for layout in distinct)
    extent = max(buffer.stop for buffer in group) - group[0].start
    root = dict.fromkeys(distinct, distinct[0])
    if extent > needed and len(distinct) <= MAX_COMPARED:
        root = _components(distinct)
    members: dict[MemoryLayout, list[B]] = {}
    for buffer in group:
        members.setdefault(root[layouts[buffer.position]], []).append(buffer)
    for sharing in members.values():
        yield _united(sharing, layouts, entries)


def _united(group: list[B], layouts: dict[int, MemoryLayout], entries: list[dict[str, Any]]) -> B:
    group.sort(key=attrgetter("position"))
    united = group[0]
    united.others = tuple((buffer.position, buffer.first) for buffer in group[1:])
    if len({layouts[buffer.position] for buffer in group}) == 1:
        return united
    start = min(buffer.start for buffer in group)
    stop = max(buffer.stop for buffer in group)
    if owner := united.owner():
        # Elements of each size have to lie at a multiple of it, as they do in the storage.
        start -= (start - owner) % max(layouts[buffer.position].itemsize for buffer in group)
    united.cover(start, stop, stop - start)
    for buffer in group:
        layout = layouts[buffer.position]
        entries[buffer.position]["offset"] = layout.address - start
        entries[buffer.position]["strides"] = list(layout.strides)
    return united


def _components(layouts: Sequence[MemoryLayout]) -> dict[MemoryLayout, MemoryLayout]:
    """Map each layout to a representative of all that it shares elements with, also indirectly."""
    root = {layout: layout for layout in layouts}

    def find(layout: MemoryLayout) -> MemoryLayout:
        while root[layout] != layout:
            layout = root[layout]
        return layout

    for one, other in combinations(layouts, 2):
        if find(one) != find(other) and share_an_element(one, other):
            root[find(other)] = find(one)
    return {layout: find(layout) for layout in layouts}


def share_an_element(one: MemoryLayout, other: MemoryLayout) -> bool:
    """Whether some byte belongs to both; also True if that is too hard to find out."""
    # The arrays are only compared by address: nothing may read them.
    arrays: list[Any] = [np.asarray(_ArrayInterface(layout, "V")) for layout in (one, other)]
    work: Any = MAX_WORK
    try:
        return np.shares_memory(arrays[0], arrays[1], work)
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
    """The strides in bytes of an array in C order."""
    strides = [itemsize] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return strides


def extent_of(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[int, int]:
    """The lowest byte of an array and one past its highest, relative to its first element."""
    if not prod(shape):
        return 0, 0
    low = high = 0
    for length, stride in zip(shape, strides, strict=True):
        reach = (length - 1) * stride
        low, high = (low + reach, high) if reach < 0 else (low, high + reach)
    return low, high + itemsize
