"""Memory: views of data, new memory on large pages, and pools of blocks."""

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
"""From this size on large pages are requested, as numpy does for its arrays."""


def new_bytes(size: int) -> tuple[bytes, memoryview]:
    """Uninitialised bytes, and the memory to fill before anybody else sees them.

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

    Direct writes from large pages reach the disk in a few large pieces, which can be twice as fast.
    The memory is private: by default a forked child would write into the same.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector while thousands of small objects are made at once.

    Only for short work: cycles of all threads stay until it is over.
    """
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


class BlockPool:
    """Blocks of memory of one size, made when needed; some are kept for reuse.

    Filling memory for the first time takes several times as long.
    """

    def __init__(self, size: int, kept: int) -> None:
        self.size = size
        self._free: deque[mmap.mmap] = deque(maxlen=kept)

    def take(self) -> mmap.mmap:
        """A block with arbitrary content."""
        try:
            return self._free.pop()
        except IndexError:
            return new_pages(self.size)

    def give(self, block: mmap.mmap) -> None:
        """Return a block for reuse."""
        self._free.append(block)

    def clear(self) -> None:
        """Release all blocks that are not in use."""
        self._free.clear()


def use_large_pages(view: memoryview) -> None:
    """Request large pages for memory that is about to be filled completely.

    One page fault for 2 MiB instead of 512: filling new memory takes a third of the time. A system
    without them ignores it.
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
"""Bytes-like: ``bytes``, ``bytearray``, ``memoryview``, ``mmap``, numpy arrays."""

Data: TypeAlias = "Memory | Sequence[Memory]"
"""Data to write: bytes-like memory, or a sequence of such pieces."""

AT_ONCE = 512
"""Pieces of memory per system call; the system takes at most 1024."""
_SMALL_COPY = 256 * 2**10

Views: TypeAlias = "list[memoryview]"
"""Data as flat, non-empty views of bytes."""


def views_of(data: Data) -> Views:
    """Views of data as bytes; ``TypeError`` if it is neither contiguous memory nor a sequence."""
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
    try:
        view = memoryview(buffer)  # type: ignore[arg-type]  # numpy declares it from 3.12 on
    except TypeError:
        raise TypeError(f"a buffer must be bytes-like, not {type(buffer).__name__}") from None
    if not view.c_contiguous:
        raise TypeError("a buffer must be contiguous: make a contiguous copy of it")
    # Views without elements cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def writable_views_of(buffers: Data) -> Views:
    """Views of memory to read into, as `views_of`; ``TypeError`` if some is read-only."""
    views = views_of(buffers)
    if any(view.readonly for view in views):
        raise TypeError("cannot read into a read-only buffer")
    return views


def size_of(views: Iterable[memoryview]) -> int:
    """The total number of bytes."""
    return sum(view.nbytes for view in views)


def blocks_of(views: Iterable[memoryview], size: int) -> Iterator[Views]:
    """Cut data into blocks of ``size`` bytes, the last one shorter; each is a list of views."""
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
    """The same views, at most as many at a time as the system takes."""
    for start in range(0, len(views), AT_ONCE):
        yield views[start : start + AT_ONCE]


def scatter(data: memoryview, views: Iterable[memoryview]) -> None:
    """Copy data into consecutive pieces of memory of the same total size."""
    at = 0
    for view in views:
        copy(data[at : at + view.nbytes], view)
        at += view.nbytes


def copy(source: memoryview, target: memoryview) -> None:
    """Copy bytes; many are copied without the interpreter lock."""
    if source.nbytes < _SMALL_COPY:
        target[:] = source
        return
    import numpy as np

    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def cut(views: Iterable[memoryview], start: int, end: int) -> Views:
    """The bytes from ``start`` to ``end``."""
    pieces: Views = []
    at = 0
    for view in views:
        piece = view[max(0, start - at) : max(0, end - at)]
        if piece.nbytes:
            pieces.append(piece)
        at += view.nbytes
    return pieces
