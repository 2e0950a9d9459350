"""Large pieces of memory that are about to be filled."""

from __future__ import annotations

import ctypes
import functools
import gc
import mmap
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer

LARGE = 4 * 2**20
"""From this size on large pages are asked for, as numpy does for its arrays."""


def new_bytes(size: int) -> tuple[bytes, memoryview]:
    """Bytes that are not filled yet, and the memory to fill before anybody else sees them.

    A bytearray would be filled with zeros first and copied at the end, which takes longer than
    reading.
    """
    if not size:
        return b"", memoryview(bytearray())
    make = ctypes.pythonapi.PyBytes_FromStringAndSize
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_char_p, ctypes.c_ssize_t]
    data: bytes = make(None, size)
    locate = ctypes.pythonapi.PyBytes_AsString
    locate.restype, locate.argtypes = ctypes.c_void_p, [ctypes.py_object]
    memory = (ctypes.c_ubyte * size).from_address(locate(data))
    view = memoryview(memory).cast("B")
    use_large_pages(view)
    return data, view


def new_pages(size: int) -> mmap.mmap:
    """Memory on pages of its own, large ones if there are any.

    What is written directly from large pages goes to the disk in a few large pieces, which can be
    twice as fast. The memory is private: by default a forked child would write into the same.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep thousands of small objects that are made at once from setting off searches of the heap.

    Nothing that takes long may be done meanwhile: cycles of all threads stay until it is over.
    """
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


class BlockPool:
    """Blocks of memory of one size, made when needed; a few are kept for the next who needs one.

    To fill memory that was never used takes several times as long.
    """

    def __init__(self, size: int, kept: int) -> None:
        self.size = size
        self._free: deque[mmap.mmap] = deque(maxlen=kept)

    def take(self) -> mmap.mmap:
        """A block, with anything in it."""
        try:
            return self._free.pop()
        except IndexError:
            return new_pages(self.size)

    def give(self, block: mmap.mmap) -> None:
        """Let the next one use a block."""
        self._free.append(block)

    def clear(self) -> None:
        """Keep none."""
        self._free.clear()


def use_large_pages(view: memoryview) -> None:
    """Ask for large pages for memory that will soon be written to, all of it.

    One page fault for 2 MiB instead of 512: filling new memory takes a third of the time. A system
    that does not have them goes on with what it has.
    """
    advise = _madvise()
    if advise is None or view.nbytes < LARGE:
        return
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(view))
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + view.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    advise(start, end - start, mmap.MADV_HUGEPAGE)


@functools.cache
def _madvise() -> Any:
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # Linux has it
        return None
    function = getattr(ctypes.CDLL(None), "madvise", None)
    if function is not None:
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


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
