"""Writing local files: atomically, and past the page cache in large aligned blocks.

A file is written under a partial name in its folder, then flushed and renamed. Direct writes go to
the disk from several threads; blocks that are not aligned in memory are copied first.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import mmap
import os
import socket
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from itertools import count
from typing import Any, NamedTuple

from .._background import Consumer, Hold, side_by_side
from .._buffers import AT_ONCE, BlockPool, Views, blocks_of, copy, cut, size_of
from .backend import PARTIAL, StreamWriter, storage_errors

ALIGNMENT = 4096
BLOCK = 4 * 2**20
LANES = 4
DIRECT_FROM = 2**20
"""Smaller files are not worth direct writes."""

_RESERVED_AT_ONCE = 64 * BLOCK
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_ATTEMPTS = 32
_O_DIRECT: int = getattr(os, "O_DIRECT", 0)  # macOS has none
_REFUSED = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


class PartialFile:
    """A file under a name that nobody reads, until it is published.

    Its lock shows that its writer is alive; once that is held, the name says on which machine.
    Methods raise ``OSError``.
    """

    def __init__(self, open_folder: Callable[[], int], name: str) -> None:
        """``open_folder`` makes and opens the folder of the file."""
        self._name = name
        self._partial = PARTIAL + os.urandom(8).hex()
        self._folder, self.handle = self._create(open_folder)
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._mark()

    def publish(self) -> None:
        """Make the content durable, then visible in place of any other under the name."""
        flush(self.handle)
        os.replace(self._partial, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        os.fsync(self._folder)

    def publish_new(self) -> bool:
        """The same unless something has the name; False if something has."""
        flush(self.handle)
        try:
            os.link(self._partial, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except FileExistsError:
            return False
        os.unlink(self._partial, dir_fd=self._folder)
        os.fsync(self._folder)
        return True

    def close(self) -> None:
        """End; nothing is left of a file that was not published. Does not raise."""
        if self._folder < 0:
            return
        with suppress(OSError):
            os.unlink(self._partial, dir_fd=self._folder)
        os.close(self.handle)
        os.close(self._folder)
        self.handle = self._folder = -1

    def _mark(self) -> None:
        """Put the machine into the name: under that name the file is never seen unlocked."""
        host = this_host()
        if host:
            marked = f"{PARTIAL}{host}-{self._partial.removeprefix(PARTIAL)}"
            folder = self._folder
            os.rename(self._partial, marked, src_dir_fd=folder, dst_dir_fd=folder)
            self._partial = marked

    def _create(self, open_folder: Callable[[], int]) -> tuple[int, int]:
        for attempt in range(_ATTEMPTS):
            folder = -1
            try:
                folder = open_folder()
                return folder, os.open(self._partial, _NEW, 0o666, dir_fd=folder)
            except BaseException as exc:
                if folder >= 0:
                    os.close(folder)
                # Somebody removed the folder, because it was empty, before the file was in it.
                if not isinstance(exc, FileNotFoundError) or attempt == _ATTEMPTS - 1:
                    raise
        raise AssertionError("the last attempt raises")


def flush(handle: int) -> None:
    """Bring a file's content to the disk, through the disk's own cache."""
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is None:
        os.fsync(handle)
    else:
        fcntl.fcntl(handle, full)


@cache
def this_host() -> str:
    """An id of this machine since it was booted; empty where there is none.

    Its processes see each other's locks. Those of another machine may not be seen: some network
    file systems keep locks to themselves.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as source:
            boot = source.read().strip()
    except OSError:
        return ""
    return hashlib.sha256(f"{boot}/{socket.gethostname()}".encode()).hexdigest()[:12]


def sweep_folder(folder: int, older_than: float) -> int:
    """Delete partial files in a folder that have no living writer; returns how many.

    A lock proves that for processes of this machine. Files of others also have to be older than
    ``older_than`` seconds.
    """
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.name.startswith(PARTIAL)]
    swept = 0
    for name in names:
        with suppress(OSError):
            if _is_abandoned(folder, name, older_than):
                os.unlink(name, dir_fd=folder)
                swept += 1
    return swept


def _is_abandoned(folder: int, name: str, older_than: float) -> bool:
    info = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if not stat.S_ISREG(info.st_mode):
        return False
    is_old = time.time() - info.st_mtime >= older_than
    host = this_host()
    if not is_old and not (host and name.startswith(f"{PARTIAL}{host}-")):
        return False
    handle = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=folder)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return is_old  # there are no locks here, and its age has to do
    finally:
        os.close(handle)
    return True


class DirectRefusedError(Exception):
    """The file system takes no direct writes."""


def write_views(handle: int, views: Views, bounce: BlockPool, *, direct: bool) -> None:
    """Write data from the beginning of a file on; ``bounce`` has aligned blocks for copies.

    ``OSError`` if it fails; ``DirectRefusedError`` if it should be ``direct`` and cannot.
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
            at = 0
            for view in block:
                copy(view, target[at : at + view.nbytes])
                at += view.nbytes
            _write_direct(handle, target, offset)
    finally:
        bounce.give(memory)


def is_aligned(view: memoryview) -> bool:
    """Whether memory can be written directly."""
    import numpy as np

    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address % ALIGNMENT == 0


def set_direct(handle: int, on: bool) -> None:
    """Switch a file to direct writes, or back; ``DirectRefusedError`` if there are none."""
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
    """Reserve room on the disk, if the file system can; ``OSError`` if there is not enough.

    Direct writes into reserved room do not wait for each other. ``posix_fallocate`` would write
    zeros where the file system cannot reserve.
    """
    function = _fallocate()
    if function and function(handle, 0, offset, size) and ctypes.get_errno() == errno.ENOSPC:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@cache
def _fallocate() -> Any:
    function = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
    if function:
        function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return function


def write_buffered(handle: int, views: Views, offset: int) -> None:
    """Write data through the page cache."""
    pending = deque(views)
    while pending:
        batch = [pending.popleft() for _ in range(min(len(pending), AT_ONCE))]
        written = os.pwritev(handle, batch, offset)
        offset += written
        pending.extendleft(reversed(cut(batch, written, size_of(batch))))


def _write_direct(handle: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < view.nbytes:
        try:
            done += os.pwrite(handle, view[done:], offset + done)
        except OSError as exc:
            if exc.errno in _REFUSED:
                raise DirectRefusedError from exc
            raise


class _BlockWrite(NamedTuple):
    view: memoryview
    at: int
    release: Callable[[], None]
    """Called when the memory is not needed any more."""


class _AbortedError(Exception):
    """The stream was aborted."""


class LocalStreamWriter(StreamWriter):
    """Fills a block while up to ``LANES`` others are written and as many wait.

    Memory that is lent and lies on whole pages is written from where it is.
    """

    def __init__(
        self, name: str, location: str, file: PartialFile, bounce: BlockPool, *, direct: bool
    ) -> None:
        super().__init__(name, location)
        self._file = file
        self._bounce = bounce
        self._direct = direct
        self._block: mmap.mmap | None = None
        self._filled = 0
        self._started = 0
        """How many bytes are written, or being written."""
        self._reserved = 0
        self._lanes: Consumer[_BlockWrite] | None = None

    def _write(self, view: memoryview) -> None:
        with storage_errors("write", self.location):
            while view.nbytes:
                if self._block is None:
                    self._block = self._bounce.take()
                piece = view[: BLOCK - self._filled]
                with memoryview(self._block) as block:
                    copy(piece, block[self._filled : self._filled + piece.nbytes])
                self._filled += piece.nbytes
                view = view[piece.nbytes :]
                if self._filled == BLOCK:
                    self._start_block()

    def _lend(self, view: memoryview, done: Callable[[], None]) -> None:
        fits = view.nbytes >= BLOCK and self._filled % ALIGNMENT == 0
        if not (self._direct and fits and is_aligned(view)):
            super()._lend(view, done)
            return
        whole = view.nbytes - view.nbytes % ALIGNMENT
        hold = Hold(done)
        try:
            with storage_errors("write", self.location):
                self._start_block()
                for start in range(0, whole, BLOCK):
                    hold.take()
                    self._start(view[start : min(start + BLOCK, whole)], hold.drop)
            self._write(view[whole:])
        finally:
            hold.drop()

    def _finish(self) -> None:
        with storage_errors("write", self.location):
            if self._lanes is not None:
                self._lanes.close()
            self._write_rest()
            self._file.publish()
        self._release()

    def _abort(self) -> None:
        if self._lanes is not None:
            self._lanes.close(_AbortedError())
        self._release()

    def _start_block(self) -> None:
        """Have the block written as far as it is filled."""
        block, filled = self._block, self._filled
        if block is not None:
            self._block, self._filled = None, 0
            self._start(memoryview(block)[:filled], partial(self._bounce.give, block))

    def _start(self, view: memoryview, release: Callable[[], None]) -> None:
        """Have memory written; raises if an earlier write has failed."""
        if self._direct and self._started + view.nbytes > self._reserved:
            # As much again as there is: a writer that dies leaves at most twice what it wrote.
            size = max(view.nbytes, min(self._reserved, _RESERVED_AT_ONCE))
            with suppress(OSError):  # what is written may still fit
                reserve(self._file.handle, self._reserved, size)
            self._reserved += size
        block = _BlockWrite(view, self._started, release)
        self._started += view.nbytes
        if self._lanes is None:
            try:
                self._lanes = Consumer(
                    self._write_blocks, LANES, "strata-lane", lambda block: block.release()
                )
            except RuntimeError:  # the interpreter has ended so far that it starts no threads
                self._write_block(block)
                return
        self._lanes.put(block)

    def _write_blocks(self, blocks: Iterator[_BlockWrite]) -> None:
        side_by_side(blocks, self._write_block, LANES)

    def _write_block(self, block: _BlockWrite) -> None:
        try:
            self._put(block.view, block.at)
        finally:
            block.release()

    def _put(self, view: memoryview, at: int) -> None:
        if self._direct:
            try:
                set_direct(self._file.handle, True)
                write_block(self._file.handle, [view], at, self._bounce)
                return
            except DirectRefusedError:
                self._direct = False
                set_direct(self._file.handle, False)
        write_buffered(self._file.handle, [view], at)

    def _write_rest(self) -> None:
        set_direct(self._file.handle, False)
        os.ftruncate(self._file.handle, self._started)
        if self._block is not None:
            with memoryview(self._block) as block:
                write_buffered(self._file.handle, [block[: self._filled]], self._started)

    def _release(self) -> None:
        self._file.close()
        if self._block is not None:
            self._bounce.give(self._block)
            self._block = None
