"""Objects that are written piece by piece: parts are sent while the next are filled."""

from __future__ import annotations

import mmap
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from .._background import Hold
from .._buffers import BlockPool, copy
from ..errors import StorageError
from .backend import StreamWriter

if TYPE_CHECKING:
    from obstore.store import ObjectStore
    from typing_extensions import Buffer

_WAITING_PIECES = 4


class MultipartUpload:
    """How one object gets to its store."""

    def __init__(
        self,
        store: ObjectStore,
        key: str,
        lanes: int,
        errors: Callable[[str, str], AbstractContextManager[None]],
    ) -> None:
        self._store = store
        self._key = key
        self._lanes = lanes
        self.errors = errors

    def put(self, pieces: Iterable[Buffer], *, multipart: bool, part_bytes: int) -> None:
        """Store the object; when that, or getting the pieces, fails, nothing is left there."""
        import obstore

        obstore.put(
            self._store,
            self._key,
            _never_empty(pieces),
            use_multipart=multipart,
            chunk_size=part_bytes,
            max_concurrency=self._lanes,
        )


class _Abandoned(Exception):
    """The stream was aborted; raised into the upload, which cleans up then."""


class ObjectStreamWriter(StreamWriter):
    """Gives pieces to a thread that uploads them in parts; small objects are sent at the end.

    All parts but the last are of one size, as some stores want. Memory that is lent is sent from
    where it lies, as far as it fills parts: one that waits for more must not keep it.
    """

    def __init__(
        self, name: str, location: str, upload: MultipartUpload, memory: BlockPool, max_parts: int
    ) -> None:
        super().__init__(name, location)
        self._upload = upload
        self._memory = memory
        self._part_bytes = memory.size
        self._max_bytes = memory.size * max_parts
        self._part: mmap.mmap | None = None
        """What there is of the next part, in the first bytes."""
        self._filled = 0
        self._pieces: queue.Queue[Buffer | Exception | None] = queue.Queue(_WAITING_PIECES)
        self._all_taken = False
        self._lent: list[weakref.finalize[[], Any]] = []
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def _write(self, view: memoryview) -> None:
        self._check_size(view)
        while view.nbytes:
            if self._filled == self._part_bytes:
                self._send(self._taken_part())
            view = self._fill(view)

    def _lend(self, view: memoryview, done: Callable[[], None]) -> None:
        hold = Hold(done)
        try:
            self._check_size(view)
            while view.nbytes >= self._part_bytes - self._filled:
                room = self._part_bytes - self._filled
                if self._filled:
                    self._send(self._taken_part())
                if room:
                    hold.take()
                    self._send(self._noticed(view[:room], hold.drop))
                    view = view[room:]
            if view.nbytes:
                self._fill(view)
        finally:
            hold.drop()

    def _fill(self, view: memoryview) -> memoryview:
        """Add to the part what it has room for; returns the rest."""
        if self._part is None:
            self._part = self._memory.take()
        some = view[: self._part_bytes - self._filled]
        target = memoryview(self._part)[self._filled : self._filled + some.nbytes]
        copy(some, target)
        self._filled += some.nbytes
        return view[some.nbytes :]

    def _taken_part(self) -> Buffer:
        """What there is of the part; the next one begins."""
        memory, size = self._part, self._filled
        self._part, self._filled = None, 0
        if memory is None:
            return b""
        return self._noticed(memoryview(memory)[:size], partial(self._memory.give, memory))

    def _noticed(self, view: memoryview, done: Callable[[], None]) -> Buffer:
        """The same memory, as something that ``done`` is called after when nobody uses it."""
        memory: Any = np.frombuffer(view, np.uint8)
        finalizer = weakref.finalize(memory, done)
        finalizer.atexit = False
        self._lent = [*(one for one in self._lent if one.alive), finalizer]
        found: Buffer = memory
        return found

    def _check_size(self, view: memoryview) -> None:
        if self.written + view.nbytes > self._max_bytes:
            raise StorageError(
                f"{self.location} cannot be larger than {self._max_bytes} bytes: give the backend "
                "larger part_bytes"
            )

    def _finish(self) -> None:
        if self._thread is None:
            with self._upload.errors("write", self.name):
                self._put([self._taken_part()], multipart=False)
            return
        if self._filled:
            self._pieces.put(self._taken_part())
        self._end(None)
        self._raise_error()

    def _abort(self) -> None:
        self._taken_part()
        if self._thread is not None:
            self._end(_Abandoned())

    def _end(self, how: Exception | None) -> None:
        assert self._thread is not None
        self._pieces.put(how)
        self._thread.join()
        for finalizer in self._lent:
            finalizer()  # it does nothing when the memory has been given back

    def _send(self, piece: Buffer) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="strata-upload", daemon=True)
            self._thread.start()
        self._pieces.put(piece)
        self._raise_error()

    def _run(self) -> None:
        try:
            self._put(self._taken(), multipart=True)
        except BaseException as exc:
            self._error = exc
            while not self._all_taken:  # whoever waits for room has to get on
                self._take()

    def _put(self, pieces: Iterable[Buffer], *, multipart: bool) -> None:
        self._upload.put(pieces, multipart=multipart, part_bytes=self._part_bytes)

    def _taken(self) -> Iterator[Buffer]:
        while (item := self._take()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item
            del item  # memory that was lent must not be kept while this waits for more

    def _take(self) -> Buffer | Exception | None:
        item = self._pieces.get()
        self._all_taken = item is None or isinstance(item, Exception)
        return item

    def _raise_error(self) -> None:
        if self._error is not None:
            with self._upload.errors("write", self.name):
                raise self._error


def _never_empty(pieces: Iterable[Buffer]) -> Iterator[Buffer]:
    count = 0
    for piece in pieces:
        count += 1
        yield piece
        del piece
    if not count:
        yield b""
