"""What every place for checkpoints promises, whatever it is made of."""

from __future__ import annotations

import abc
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import ClassVar, Self, TypeAlias

from .._buffers import Data, Memory, Views, flat, views_of, writable_views_of
from ..errors import StorageError, StorageNotFoundError

Range: TypeAlias = tuple[int, int]
"""An offset and a length."""
Pieces: TypeAlias = list[bytes]
Names: TypeAlias = list[str]
Failures: TypeAlias = list[tuple[str, StorageError]]
"""Names, each with why it could not be deleted."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file or object."""

    name: str
    size: int
    modified: float
    """When it was written, in seconds of the wall clock of whoever stores it."""


class StreamWriter(abc.ABC):
    """Writes one file piece by piece; nobody sees it before :meth:`finish`.

    As a context manager it finishes when the block ends, and aborts when the block raises.
    It belongs to one thread at a time.
    """

    def __init__(self, name: str, location: str) -> None:
        self.name = name
        self.location = location
        self.written = 0
        """How many bytes were given to it."""
        self._ended = ""

    def write(self, buffer: Memory) -> None:
        """Add bytes; the buffer may be changed as soon as this returns.

        A failure aborts the whole file.
        """
        self._check_open("written to")
        view = flat(buffer)
        if view.nbytes:
            with self._aborting():
                self._write(view)
            self.written += view.nbytes

    def lend(self, buffer: Memory, done: Callable[[], None]) -> None:
        """Add bytes that may be read later: the buffer must stay as it is until ``done`` is called.

        That happens once, on any thread, also when writing fails. Where memory has to be copied
        anyway this is :meth:`write`.
        """
        self._check_open("written to")
        view = flat(buffer)
        with self._aborting():
            self._lend(view, done)
        self.written += view.nbytes

    def finish(self) -> None:
        """Make the file durable, then visible; a second call does nothing."""
        if self._ended == "finished":
            return
        self._check_open("finished")
        with self._aborting():
            self._finish()
        self._ended = "finished"

    def abort(self) -> None:
        """Give up: nothing is left of the file. It does nothing after :meth:`finish`."""
        if not self._ended:
            self._ended = "aborted"
            self._abort()

    def _check_open(self, doing: str) -> None:
        if self._ended:
            raise StorageError(f"{self.location} cannot be {doing}: it was {self._ended} already")

    @contextmanager
    def _aborting(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.abort()
            raise

    @abc.abstractmethod
    def _write(self, view: memoryview) -> None: ...

    def _lend(self, view: memoryview, done: Callable[[], None]) -> None:
        try:
            if view.nbytes:
                self._write(view)
        finally:
            done()

    @abc.abstractmethod
    def _finish(self) -> None: ...

    @abc.abstractmethod
    def _abort(self) -> None:
        """Must not raise."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None and self._ended != "aborted":
            self.finish()
        else:
            self.abort()


class StorageBackend(abc.ABC):
    """Files by name, in a folder, a bucket or memory.

    Names are relative, with ``/`` between their parts; ``ValueError`` for others. A file is
    complete or not there: writes are atomic, also for those who read at the same time, and durable
    when they return. All methods block, and any thread may call them.

    ``StorageNotFoundError`` when a file is missing, ``StoragePermissionError``,
    ``StorageThrottledError`` and otherwise ``StorageError`` when the store fails; each says where.
    A failing store is never mistaken for an empty one.

    A new kind of store implements the methods that begin with an underscore; its arguments have
    been checked. ``dtruntime.testing.StorageConformance`` tests every promise made here.
    """

    kind: ClassVar[str]
    """What it is made of: ``local``, ``s3``, ``gcs``, ``azure`` or ``memory``."""
    url: str
    """Where it is, as :func:`open_backend` takes it; without credentials."""

    @abc.abstractmethod
    def location(self, name: str = "") -> str:
        """Where a file is, for people to read; without credentials."""

    def read(self, name: str) -> bytes:
        """Return a whole file. A large one is better read by :meth:`read_into`."""
        return self._read(check_name(name))

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """Return ``length`` bytes from ``offset`` on; ``StorageError`` if the file is shorter."""
        return self.read_ranges(name, [(offset, length)])[0]

    def read_ranges(self, name: str, ranges: Sequence[Range]) -> Pieces:
        """Return the bytes of each ``(offset, length)``, all from the same version of the file.

        Ranges that lie near each other are read together, the others side by side.
        """
        spans = [(int(offset), int(length)) for offset, length in ranges]
        if any(offset < 0 or length < 0 for offset, length in spans):
            raise ValueError(f"offsets and lengths must not be negative: {spans[:8]}")
        return self._read_ranges(check_name(name), spans) if spans else []

    def read_into(self, name: str, offset: int, buffer: Data) -> None:
        """Fill a writable buffer, or a list of them in turn, with the bytes from ``offset`` on.

        ``StorageError`` when the file ends before the buffer does; its content is undefined then.
        """
        if offset < 0:
            raise ValueError(f"offset must not be negative: {offset}")
        self._read_into(check_name(name), int(offset), writable_views_of(buffer))

    def write(self, name: str, data: Data) -> None:
        """Store a file, in place of one that may be there.

        ``data`` is bytes-like, or a sequence of bytes-like pieces, which are not joined in memory.
        """
        self._write(check_name(name), views_of(data))

    def create(self, name: str, data: Data) -> bool:
        """Store a file unless there is one; False when there is.

        Of several that create the same name at the same time exactly one gets True.
        """
        return self._create(check_name(name), views_of(data))

    def writer(self, name: str) -> StreamWriter:
        """Begin a file whose length is not known; in place of one that may be there."""
        return self._writer(check_name(name))

    def delete(self, name: str) -> None:
        """Delete a file; it is no error when it is not there."""
        self._delete(check_name(name))

    def delete_many(self, names: Iterable[str]) -> Failures:
        """Delete files in any order; return those that could not be, each with the reason."""
        return self._delete_many([check_name(name) for name in names])

    def stat(self, name: str) -> StoredFile:
        """Return a file's size and time; ``StorageNotFoundError`` when it is not there."""
        return self._stat(check_name(name))

    def exists(self, name: str) -> bool:
        """Whether a file is there."""
        try:
            self.stat(name)
        except StorageNotFoundError:
            return False
        return True

    def size(self, name: str) -> int:
        """How many bytes a file has; ``StorageNotFoundError`` when it is not there."""
        return self.stat(name).size

    def list(self, prefix: str = "") -> Iterator[StoredFile]:
        """Yield the files under a folder, to any depth and in no particular order.

        ``prefix`` counts in whole parts: ``a/b`` yields ``a/b/c``, but neither ``a/b`` nor
        ``a/bc``; a slash at its end changes nothing. Files that come or go meanwhile may be missed.
        """
        return self._list(check_prefix(prefix))

    def sweep(self, older_than: float = 3600.0) -> int:
        """Remove what writers left that died, untouched for ``older_than`` seconds; how many.

        What is proved to be of a dead writer goes at once. Stores that clean up by themselves
        remove nothing.
        """
        if older_than < 0:
            raise ValueError(f"older_than must not be negative: {older_than}")
        return self._sweep(older_than)

    def close(self) -> None:  # noqa: B027 - most backends hold nothing
        """Release what is held; what was stored stays."""

    @abc.abstractmethod
    def _read(self, name: str) -> bytes: ...

    @abc.abstractmethod
    def _read_ranges(self, name: str, ranges: Sequence[Range]) -> Pieces: ...

    @abc.abstractmethod
    def _read_into(self, name: str, offset: int, views: Views) -> None: ...

    @abc.abstractmethod
    def _write(self, name: str, views: Views) -> None: ...

    @abc.abstractmethod
    def _create(self, name: str, views: Views) -> bool: ...

    @abc.abstractmethod
    def _writer(self, name: str) -> StreamWriter: ...

    @abc.abstractmethod
    def _delete(self, name: str) -> None: ...

    @abc.abstractmethod
    def _delete_many(self, names: Names) -> Failures: ...

    @abc.abstractmethod
    def _stat(self, name: str) -> StoredFile: ...

    @abc.abstractmethod
    def _list(self, prefix: str) -> Iterator[StoredFile]: ...

    def _sweep(self, older_than: float) -> int:
        return 0

    def _too_short(self, name: str, size: int, offset: int, length: int) -> StorageError:
        return StorageError(
            f"{self.location(name)} has {size} bytes, and {length} at {offset} were asked for: "
            "it is not the file that was expected"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"


MAX_BYTES = 768
"""Of a name in UTF-8. Stores allow 1024 for the name and the prefix it lies under."""
MAX_PART_BYTES = 255
"""Of each part of it: what file systems allow."""
PARTIAL = ".strata-partial-"
"""Files in a local folder that begin so are being written, or were by a process that died."""


def check_name(name: str) -> str:
    """Return ``name`` if every backend can store a file under it; ``ValueError`` if not."""
    if not isinstance(name, str):
        raise TypeError(f"a name in storage is a str, not {type(name).__name__}")
    fault = _fault_of(name)
    if fault:
        raise ValueError(
            f"{name[:200]!r} cannot be a name in storage: {fault}. Write a relative name such as "
            "'step-100/model.pack'"
        )
    return name


def check_prefix(prefix: str) -> str:
    """Return the folder that a listing is limited to, without a slash at its end; "" for all."""
    if prefix == "":
        return prefix
    return check_name(prefix.removesuffix("/"))


def _fault_of(name: str) -> str:
    try:
        parts = [part.encode() for part in name.split("/")]
    except UnicodeEncodeError:
        return "it has characters that UTF-8 does not know"
    if not all(parts):
        return "it is empty, begins or ends with a slash, or has two in a row"
    if b"." in parts or b".." in parts:
        return "'.' and '..' are not allowed as parts"
    if "\\" in name or any(unicodedata.category(char) == "Cc" for char in name):
        return "backslashes and control characters are not allowed"
    if any(part.startswith(PARTIAL.encode()) for part in parts):
        return f"{PARTIAL!r} marks files that are not complete"
    if len(name.encode()) > MAX_BYTES:
        return f"it is longer than {MAX_BYTES} bytes"
    longest = max(map(len, parts))
    return f"a part is longer than {MAX_PART_BYTES} bytes" if longest > MAX_PART_BYTES else ""
