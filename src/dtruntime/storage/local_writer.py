"""Local files that are written piece by piece."""

from __future__ import annotations

import mmap
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from .._background import Hold
from .._buffers import BlockPool
from .atomic_file import PartialFile
from .backend import StreamWriter
from .direct_io import (
    ALIGNMENT,
    BLOCK,
    LANES,
    DirectRefusedError,
    gather,
    is_aligned,
    reserve,
    set_direct,
    write_block,
    write_buffered,
)
from .error_translation import storage_errors

_RESERVED_AT_ONCE = 64 * BLOCK


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
