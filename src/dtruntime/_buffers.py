"""Large pieces of memory that are about to be filled."""

from __future__ import annotations

import ctypes
import functools
import gc
import mmap
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

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


class Blocks:
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
