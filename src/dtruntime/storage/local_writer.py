"""Local files that are written piece by piece."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import hashlib
import mmap
import os
import queue
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from itertools import count
from typing import Any

from .._background import Hold, side_by_side
from .._buffers import AT_ONCE, BlockPool, Views, blocks_of, copy, cut, size_of
from .backend import PARTIAL, StreamWriter, storage_errors


class _BlockWrite:
    """Memory that is to be written."""

    __slots__ = ("at", "done", "error", "release", "view")

    def __init__(self, view: memoryview, at: int, release: Callable[[], None]) -> None:
        self.view = view
        self.at = at
        self.release = release
        """Is called when the memory is not needed any more."""
        self.done = threading.Event()
        self.error: BaseException | None = None


class _WriteLanes:
    """Threads that write full blocks while the next is filled.

    They serve a whole file: starting one for each block would take longer than writing it.
    """

    def __init__(self, write: Callable[[memoryview, int], None]) -> None:
        self._put = write
        self._waiting: queue.SimpleQueue[_BlockWrite | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def write(self, job: _BlockWrite) -> None:
        """Begin to write."""
        if len(self._threads) < LANES:
            thread = threading.Thread(target=self._run, name="strata-lane", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the interpreter has ended so far that it starts no threads
                self._do(job)
                return
            self._threads.append(thread)
        self._waiting.put(job)

    def close(self) -> None:
        """End when everything is written."""
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _run(self) -> None:
        while (job := self._waiting.get()) is not None:
            self._do(job)

    def _do(self, job: _BlockWrite) -> None:
        try:
            self._put(job.view, job.at)
        except BaseException as exc:
            job.error = exc
        job.release()
        job.done.set()


class LocalStreamWriter(StreamWriter):
    """Fills blocks, and has up to ``LANES`` of them written meanwhile, with as many waiting.

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
        self._running: deque[_BlockWrite] = deque()
        self._lanes = _WriteLanes(self._put)

    def _write(self, view: memoryview) -> None:
        with storage_errors("write", self.location):
            while view.nbytes:
                if self._block is None:
                    self._block = self._bounce.take()
                with memoryview(self._block) as block:
                    piece = view[: BLOCK - self._filled]
                    gather([piece], block[self._filled :])
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
                    piece = view[start : min(start + BLOCK, whole)]
                    self._make_room()
                    hold.take()
                    self._start(piece, hold.drop)
            self._write(view[whole:])
        finally:
            hold.drop()

    def _finish(self) -> None:
        with storage_errors("write", self.location):
            while self._running:
                self._wait()
            self._lanes.close()
            self._write_rest()
            self._file.publish()
        self._release()

    def _abort(self) -> None:
        self._lanes.close()
        self._running.clear()
        self._release()

    def _start_block(self) -> None:
        """Have what is in the block written."""
        block, filled = self._block, self._filled
        if block is None:
            return
        self._block, self._filled = None, 0
        self._make_room()
        self._start(memoryview(block)[:filled], partial(self._bounce.give, block))

    def _make_room(self) -> None:
        """Wait until one more may be written; raises when one has failed."""
        if len(self._running) >= 2 * LANES:
            self._wait()

    def _start(self, view: memoryview, release: Callable[[], None]) -> None:
        if self._direct and self._started + view.nbytes > self._reserved:
            # As much again as there is: a writer that dies leaves at most twice what it wrote.
            size = max(view.nbytes, min(self._reserved, _RESERVED_AT_ONCE))
            with suppress(OSError):  # what is written may still fit
                reserve(self._file.handle, self._reserved, size)
            self._reserved += size
        job = _BlockWrite(view, self._started, release)
        self._running.append(job)
        self._lanes.write(job)
        self._started += view.nbytes

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

    def _wait(self) -> None:
        first = self._running.popleft()
        first.done.wait()
        if first.error is not None:
            raise first.error

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


ALIGNMENT = 4096
BLOCK = 4 * 2**20
LANES = 4
_RESERVED_AT_ONCE = 64 * BLOCK
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


_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_ATTEMPTS = 32


class PartialFile:
    """A file in its folder under a name that nobody reads, until it is published.

    Its lock tells that its writer is alive; from when it is held, the name says on which machine.
    Methods raise ``OSError``.
    """

    def __init__(self, open_folder: Callable[[], int], name: str) -> None:
        self._name = name
        self._partial = PARTIAL + os.urandom(8).hex()
        self._folder, self.handle = self._begin(open_folder)
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._mark()

    def publish(self) -> None:
        """Make the content durable, then visible in place of what has the name."""
        flush(self.handle)
        os.replace(self._partial, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        os.fsync(self._folder)

    def publish_new(self) -> bool:
        """The same if nothing has the name; False if something has."""
        flush(self.handle)
        try:
            os.link(self._partial, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except FileExistsError:
            return False
        os.unlink(self._partial, dir_fd=self._folder)
        os.fsync(self._folder)
        return True

    def close(self) -> None:
        """End; of a file that was not published nothing is left. It does not raise."""
        if self._folder < 0:
            return
        with suppress(OSError):
            os.unlink(self._partial, dir_fd=self._folder)
        os.close(self.handle)
        os.close(self._folder)
        self.handle = self._folder = -1

    def _mark(self) -> None:
        """Let the name say whose lock it is: under that name it is never seen unlocked."""
        host = this_host()
        if host:
            marked = f"{PARTIAL}{host}-{self._partial.removeprefix(PARTIAL)}"
            folder = self._folder
            os.rename(self._partial, marked, src_dir_fd=folder, dst_dir_fd=folder)
            self._partial = marked

    def _begin(self, open_folder: Callable[[], int]) -> tuple[int, int]:
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
    """What tells this machine, since it was started, from every other; empty where nobody knows.

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
    """Delete remains in one folder that have no living writer; how many.

    Of processes of this machine a lock tells that. Others' have to be ``older_than`` so many
    seconds too.
    """
    swept = 0
    with os.scandir(folder) as entries:
        found = [entry.name for entry in entries if entry.name.startswith(PARTIAL)]
    for name in found:
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
