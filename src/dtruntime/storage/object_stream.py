"""Objects that are written piece by piece: parts are sent while the next are filled."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from ..errors import StorageError
from .backend import StreamWriter

if TYPE_CHECKING:
    from obstore.store import ObjectStore
    from typing_extensions import Buffer

_WAITING_PARTS = 2


class Upload:
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
    """Collects a part, and gives it to a thread that uploads; small objects are sent at the end."""

    def __init__(
        self, name: str, location: str, upload: Upload, part_bytes: int, max_parts: int
    ) -> None:
        super().__init__(name, location)
        self._upload = upload
        self._part_bytes = part_bytes
        self._max_bytes = part_bytes * max_parts
        self._part = bytearray()
        self._parts: queue.Queue[bytearray | Exception | None] = queue.Queue(_WAITING_PARTS)
        self._all_taken = False
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def _write(self, view: memoryview) -> None:
        if self.written + view.nbytes > self._max_bytes:
            raise StorageError(
                f"{self.location} cannot be larger than {self._max_bytes} bytes: give the backend "
                "larger part_bytes"
            )
        while view.nbytes:
            if len(self._part) == self._part_bytes:
                self._send_part()
            room = self._part_bytes - len(self._part)
            self._part += view[:room]
            view = view[room:]

    def _finish(self) -> None:
        if self._thread is None:
            with self._upload.errors("write", self.name):
                self._put([self._part], multipart=False)
            return
        self._parts.put(self._part)
        self._parts.put(None)
        self._thread.join()
        self._raise_error()

    def _abort(self) -> None:
        self._part = bytearray()
        if self._thread is not None:
            self._parts.put(_Abandoned())
            self._thread.join()

    def _send_part(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="strata-upload", daemon=True)
            self._thread.start()
        self._parts.put(self._part)
        self._raise_error()
        self._part = bytearray()

    def _run(self) -> None:
        try:
            self._put(self._taken(), multipart=True)
        except BaseException as exc:
            self._error = exc
            while not self._all_taken:  # whoever waits for room has to get on
                self._take()

    def _put(self, pieces: Iterable[Buffer], *, multipart: bool) -> None:
        self._upload.put(pieces, multipart=multipart, part_bytes=self._part_bytes)

    def _taken(self) -> Iterator[bytearray]:
        while (item := self._take()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item

    def _take(self) -> bytearray | Exception | None:
        item = self._parts.get()
        self._all_taken = not isinstance(item, bytearray)
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
    if not count:
        yield b""
