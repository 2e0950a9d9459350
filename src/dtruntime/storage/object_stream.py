"""Objects that are written piece by piece: parts are sent while the next are filled."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from .._background import Consumer, Hold
from .._buffers import BlockPool, copy
from ..errors import StorageError
from .backend import StreamWriter

if TYPE_CHECKING:
    from typing_extensions import Buffer

_WAITING_PIECES = 4


class _Upload(Protocol):
    """Stores an object; if that, or getting the pieces, fails, nothing is left of it."""

    def __call__(self, pieces: Iterable[Buffer], *, multipart: bool, part_bytes: int) -> None: ...


class _AbandonedError(Exception):
    """The stream was aborted; raised into the upload, which then cleans up."""


class ObjectStreamWriter(StreamWriter):
    """Hands pieces to a thread that uploads them in parts; small objects are sent at the end.

    All parts but the last have the same size, as some stores require. Memory that is lent is sent
    from where it lies as far as it fills parts: one that waits for more must not keep it.
    """

    def __init__(
        self,
        name: str,
        location: str,
        upload: _Upload,
        errors: Callable[[], AbstractContextManager[None]],
        memory: BlockPool,
        max_parts: int,
    ) -> None:
        """``errors`` translates those of the upload."""
        super().__init__(name, location)
        self._upload = upload
        self._errors = errors
        self._memory = memory
        self._part_bytes = memory.size
        self._max_bytes = memory.size * max_parts
        self._part: mmap.mmap | None = None
        """The next part, of which the first bytes are filled."""
        self._filled = 0
        self._sender: Consumer[Buffer] | None = None
        self._lent: list[weakref.finalize[[], Any]] = []

    def _write(self, view: memoryview) -> None:
        self._check_size(view)
        while view.nbytes:
            if self._filled == self._part_bytes:
                self._send(self._take_part())
            view = self._fill(view)

    def _lend(self, view: memoryview, done: Callable[[], None]) -> None:
        hold = Hold(done)
        try:
            self._check_size(view)
            while view.nbytes >= self._part_bytes - self._filled:
                room = self._part_bytes - self._filled
                if self._filled:
                    self._send(self._take_part())
                if room:
                    hold.take()
                    self._send(self._tracked(view[:room], hold.drop))
                    view = view[room:]
            if view.nbytes:
                self._fill(view)
        finally:
            hold.drop()

    def _finish(self) -> None:
        with self._errors():
            if self._sender is None:
                self._upload([self._take_part()], multipart=False, part_bytes=self._part_bytes)
                return
            if self._filled:
                self._sender.put(self._take_part())
            self._close(None)

    def _abort(self) -> None:
        self._take_part()
        self._close(_AbandonedError())

    def _close(self, error: Exception | None) -> None:
        try:
            if self._sender is not None:
                self._sender.close(error)
        finally:
            for finalizer in self._lent:
                finalizer()  # it does nothing if the memory has been given back

    def _send(self, piece: Buffer) -> None:
        if self._sender is None:
            upload = partial(self._upload, multipart=True, part_bytes=self._part_bytes)
            self._sender = Consumer(upload, _WAITING_PIECES, "strata-upload")
        with self._errors():
            self._sender.put(piece)

    def _fill(self, view: memoryview) -> memoryview:
        """Add to the part what it has room for; returns the rest."""
        if self._part is None:
            self._part = self._memory.take()
        piece = view[: self._part_bytes - self._filled]
        copy(piece, memoryview(self._part)[self._filled : self._filled + piece.nbytes])
        self._filled += piece.nbytes
        return view[piece.nbytes :]

    def _take_part(self) -> Buffer:
        """The part as far as it is filled; the next one begins."""
        memory, size = self._part, self._filled
        self._part, self._filled = None, 0
        if memory is None:
            return b""
        return self._tracked(memoryview(memory)[:size], partial(self._memory.give, memory))

    def _tracked(self, view: memoryview, done: Callable[[], None]) -> Buffer:
        """The same memory, as an object after whose last use ``done`` is called."""
        memory: Any = np.frombuffer(view, np.uint8)
        finalizer = weakref.finalize(memory, done)
        finalizer.atexit = False
        self._lent = [*(one for one in self._lent if one.alive), finalizer]
        tracked: Buffer = memory
        return tracked

    def _check_size(self, view: memoryview) -> None:
        if self.written + view.nbytes > self._max_bytes:
            raise StorageError(
                f"{self.location} cannot be larger than {self._max_bytes} bytes: give the backend "
                "larger part_bytes"
            )
