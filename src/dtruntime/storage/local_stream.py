"""Local files that are written piece by piece."""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from .backend import StreamWriter
from .direct import (
    BLOCK,
    LANES,
    Bounce,
    DirectRefusedError,
    gather,
    reserve,
    set_direct,
    write_block,
    write_buffered,
)
from .failures import storage_errors
from .local_files import PartialFile

_RESERVED_AT_ONCE = 64 * BLOCK


class _BlockWrite(threading.Thread):
    """Writes one full block while the next is filled."""

    def __init__(self, write: Callable[[memoryview, int], None], block: mmap.mmap, at: int) -> None:
        super().__init__(name="strata-io")
        self._put = write
        self._at = at
        self.block = block
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            with memoryview(self.block) as view:
                self._put(view, self._at)
        except BaseException as exc:
            self.error = exc


class LocalStreamWriter(StreamWriter):
    """Fills blocks, and has up to ``LANES - 1`` of them written meanwhile."""

    def __init__(
        self, name: str, location: str, file: PartialFile, bounce: Bounce, *, direct: bool
    ) -> None:
        super().__init__(name, location)
        self._file = file
        self._bounce = bounce
        self._direct = direct
        self._block: mmap.mmap | None = None
        self._filled = 0
        self._started = 0
        """How many bytes are in blocks that are written, or being written."""
        self._running: deque[_BlockWrite] = deque()

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

    def _finish(self) -> None:
        with storage_errors("write", self.location):
            while self._running:
                self._wait()
            self._write_rest()
            self._file.publish()
        self._release()

    def _abort(self) -> None:
        for block in self._running:
            block.join()
        self._running.clear()
        self._release()

    def _start_block(self) -> None:
        assert self._block is not None
        if self._direct and self._started % _RESERVED_AT_ONCE == 0:
            with suppress(OSError):  # what is written may still fit
                reserve(self._file.handle, self._started, _RESERVED_AT_ONCE)
        if len(self._running) == LANES - 1:
            self._wait()
        self._running.append(_BlockWrite(self._put, self._block, self._started))
        self._started += BLOCK
        self._block, self._filled = None, 0

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
        first.join()
        self._bounce.give(first.block)
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
