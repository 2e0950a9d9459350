"""Memory to write from and to read into, without copying it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer

Memory: TypeAlias = "Buffer | NDArray[Any]"
"""Bytes-like: ``bytes``, ``bytearray``, ``memoryview``, ``mmap``, arrays of numpy."""

Data: TypeAlias = "Memory | Sequence[Memory]"
"""What can be written: bytes-like memory, or several pieces of it that follow each other."""

AT_ONCE = 512
"""The system takes 1024 pieces of memory at a time, or fewer."""
_SMALL_COPY = 256 * 2**10

Views: TypeAlias = "list[memoryview]"
"""Data as flat, non-empty views of bytes."""


def views_of(data: Data) -> Views:
    """Look at data as bytes; ``TypeError`` when it is not memory in one piece or a sequence."""
    try:
        pieces: Iterable[Memory] = [memoryview(data)]  # type: ignore[arg-type]
    except TypeError:
        if not isinstance(data, list | tuple | deque):
            raise TypeError(
                f"data must be bytes-like, or a list or tuple of such, not {type(data).__name__}"
            ) from None
        pieces = data
    return [view for view in map(flat, pieces) if view.nbytes]


def flat(buffer: Memory) -> memoryview:
    """The bytes of a buffer, in one dimension."""
    view = _view(buffer)
    if not view.c_contiguous:
        raise TypeError("a buffer must be contiguous: make a contiguous copy of it")
    # Views without elements cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def _view(buffer: Memory) -> memoryview:
    try:
        return memoryview(buffer)  # type: ignore[arg-type]  # numpy tells of it from 3.12 on
    except TypeError:
        raise TypeError(f"a buffer must be bytes-like, not {type(buffer).__name__}") from None


def writable_views_of(buffers: Data) -> Views:
    """Memory that can be read into, as `views_of`; ``TypeError`` when some is read-only."""
    views = views_of(buffers)
    if any(view.readonly for view in views):
        raise TypeError("cannot read into a read-only buffer")
    return views


def size_of(views: Iterable[memoryview]) -> int:
    """How many bytes there are in all."""
    return sum(view.nbytes for view in views)


def blocks_of(views: Iterable[memoryview], size: int) -> Iterator[Views]:
    """Cut data into blocks of ``size`` bytes, the last one shorter; each has views of it."""
    block: Views = []
    room = size
    for view in views:
        while view.nbytes:
            block.append(view[:room])
            view = view[room:]
            room -= block[-1].nbytes
            if not room:
                yield block
                block, room = [], size
    if block:
        yield block


def in_pieces(views: Views) -> Iterator[Views]:
    """The same views, no more at a time than the system takes."""
    for start in range(0, len(views), AT_ONCE):
        yield views[start : start + AT_ONCE]


def scatter(data: memoryview, views: Iterable[memoryview]) -> None:
    """Copy data into pieces of memory, one after the other; together they are as large."""
    at = 0
    for view in views:
        copy(data[at : at + view.nbytes], view)
        at += view.nbytes


def copy(source: memoryview, target: memoryview) -> None:
    """Copy bytes; while many are, other threads go on."""
    if source.nbytes < _SMALL_COPY:
        target[:] = source
        return
    import numpy as np

    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def cut(views: Iterable[memoryview], start: int, end: int) -> Views:
    """The bytes from ``start`` to ``end``."""
    found: Views = []
    at = 0
    for view in views:
        piece = view[max(0, start - at) : max(0, end - at)]
        if piece.nbytes:
            found.append(piece)
        at += view.nbytes
    return found
