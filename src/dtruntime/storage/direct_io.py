"""Writing to local files past the page cache, in large aligned blocks from several threads."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
from collections import deque
from itertools import count
from typing import Any

from .._background import side_by_side
from .._buffers import AT_ONCE, BlockPool, Views, blocks_of, copy, cut, size_of

ALIGNMENT = 4096
BLOCK = 4 * 2**20
LANES = 4
DIRECT_FROM = 2**20
"""Smaller files are not worth it."""

_O_DIRECT: int = getattr(os, "O_DIRECT", 0)  # macOS has none
_REFUSED = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


class DirectRefusedError(Exception):
    """The file system takes no direct writes."""


def bounce_blocks() -> BlockPool:
    """Aligned blocks for data that are not aligned."""
    return BlockPool(BLOCK, 2 * LANES)


def write_views(handle: int, views: Views, bounce: BlockPool, *, direct: bool) -> None:
    """Write data from the beginning of a file on.

    ``OSError`` when it fails; ``DirectRefusedError`` when it should have been ``direct`` and
    cannot be.
    """
    if not direct:
        write_buffered(handle, views, 0)
        return
    size = size_of(views)
    whole = size - size % ALIGNMENT
    set_direct(handle, True)
    reserve(handle, 0, size)

    def put(item: tuple[int, Views]) -> None:
        write_block(handle, item[1], item[0] * BLOCK, bounce)

    blocks = zip(count(), blocks_of(cut(views, 0, whole), BLOCK), strict=False)
    side_by_side(blocks, put, min(LANES, -(-size // BLOCK)))
    set_direct(handle, False)
    write_buffered(handle, cut(views, whole, size), whole)


def write_block(handle: int, block: Views, offset: int, bounce: BlockPool) -> None:
    """Write one block directly; its size and offset are aligned, its memory need not be."""
    if len(block) == 1 and is_aligned(block[0]):
        _write_direct(handle, block[0], offset)
        return
    memory = bounce.take()
    try:
        with memoryview(memory) as whole, whole[: size_of(block)] as target:
            gather(block, target)
            _write_direct(handle, target, offset)
    finally:
        bounce.give(memory)


def gather(block: Views, target: memoryview) -> None:
    """Copy pieces of memory one after the other."""
    at = 0
    for view in block:
        copy(view, target[at : at + view.nbytes])
        at += view.nbytes


def is_aligned(view: memoryview) -> bool:
    """Whether memory can be written directly."""
    import numpy as np

    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address % ALIGNMENT == 0


def set_direct(handle: int, on: bool) -> None:
    """Switch a file to direct writes, or back; ``DirectRefusedError`` where there are none."""
    if on and not _O_DIRECT:
        raise DirectRefusedError
    flags = fcntl.fcntl(handle, fcntl.F_GETFL)
    try:
        fcntl.fcntl(handle, fcntl.F_SETFL, flags | _O_DIRECT if on else flags & ~_O_DIRECT)
    except OSError as exc:
        if on and exc.errno in _REFUSED:
            raise DirectRefusedError from exc
        raise


def reserve(handle: int, offset: int, size: int) -> None:
    """Reserve room on the disk, where the file system can; ``OSError`` when there is not enough.

    Direct writes into reserved room do not wait for each other. ``posix_fallocate`` would write
    zeros where the file system cannot reserve.
    """
    function = _fallocate()
    if function and function(handle, 0, offset, size) and ctypes.get_errno() == errno.ENOSPC:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@functools.cache
def _fallocate() -> Any:
    function = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
    if function:
        function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return function


def write_buffered(handle: int, views: Views, offset: int) -> None:
    """Write data through the page cache."""
    pending = deque(views)
    while pending:
        some = [pending.popleft() for _ in range(min(len(pending), AT_ONCE))]
        written = os.pwritev(handle, some, offset)
        offset += written
        while some and written >= some[0].nbytes:
            written -= some.pop(0).nbytes
        if some:
            some[0] = some[0][written:]
        pending.extendleft(reversed(some))


def _write_direct(handle: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < view.nbytes:
        try:
            done += os.pwrite(handle, view[done:], offset + done)
        except OSError as exc:
            if exc.errno in _REFUSED:
                raise DirectRefusedError from exc
            raise
