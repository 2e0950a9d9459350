"""The contract of every storage backend, and the translation of storage errors."""

from __future__ import annotations

import abc
import errno
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar, Self, TypeAlias

from .._buffers import Data, Memory, Views, flat, views_of, writable_views_of
from ..errors import (
    ShardError,
    ShardNotFoundError,
    StorageError,
    StorageNotFoundError,
    StoragePermissionError,
    StorageThrottledError,
    StrataError,
)

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
    """When it was written, in seconds of the store's wall clock."""


class StreamWriter(abc.ABC):
    """Writes one file piece by piece; it becomes visible with :meth:`finish`.

    As a context manager it finishes when the block ends, and aborts if the block raises. It belongs
    to one thread at a time.
    """

    def __init__(self, name: str, location: str) -> None:
        self.name = name
        self.location = location
        self.written = 0
        """How many bytes it was given."""
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
        """Add bytes that may be read later: the buffer must not change until ``done`` is called.

        That happens once, on any thread, also if writing fails. Where memory has to be copied
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
        """Discard the file. Does nothing after :meth:`finish`."""
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

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._ended != "aborted":
            self.finish()
        else:
            self.abort()


class StorageBackend(abc.ABC):
    """Files by name, in a folder, a bucket or memory.

    Names are relative, with ``/`` between their parts; ``ValueError`` for others. A file is
    complete or not there: writes are atomic, also for concurrent readers, and durable when they
    return. All methods block, and any thread may call them.

    ``StorageNotFoundError`` if a file is missing, ``StoragePermissionError``,
    ``StorageThrottledError`` and otherwise ``StorageError`` if the store fails; each says where.
    A failing store is never mistaken for an empty one.

    A new kind of store implements the methods that begin with an underscore; their arguments have
    been checked. ``dtruntime.testing.StorageConformance`` tests every promise made here.
    """

    kind: ClassVar[str]
    """The kind of store: ``local``, ``s3``, ``gcs``, ``azure`` or ``memory``."""
    url: str
    """Where it is, as :func:`open_backend` takes it; without credentials."""

    @abc.abstractmethod
    def location(self, name: str = "") -> str:
        """Where a file is, for people to read; without credentials."""

    def read(self, name: str) -> bytes:
        """Return a whole file; prefer :meth:`read_into` for a large one."""
        return self._read(check_name(name))

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """Return ``length`` bytes from ``offset`` on; ``StorageError`` if the file is shorter."""
        return self.read_ranges(name, [(offset, length)])[0]

    def read_ranges(self, name: str, ranges: Sequence[Range]) -> Pieces:
        """Return the bytes of each ``(offset, length)``, all from the same version of the file.

        Ranges near each other are read together, the others in parallel.
        """
        spans = [(int(offset), int(length)) for offset, length in ranges]
        if any(offset < 0 or length < 0 for offset, length in spans):
            raise ValueError(f"offsets and lengths must not be negative: {spans[:8]}")
        return self._read_ranges(check_name(name), spans) if spans else []

    def read_into(self, name: str, offset: int, buffer: Data) -> None:
        """Fill a writable buffer, or a list of them in turn, with the bytes from ``offset`` on.

        ``StorageError`` if the file ends before the buffer does, whose content is undefined then.
        """
        if offset < 0:
            raise ValueError(f"offset must not be negative: {offset}")
        self._read_into(check_name(name), int(offset), writable_views_of(buffer))

    def write(self, name: str, data: Data) -> None:
        """Store a file, replacing any other of the name.

        ``data`` is bytes-like, or a sequence of bytes-like pieces, which are not joined in memory.
        """
        self._write(check_name(name), views_of(data))

    def create(self, name: str, data: Data) -> bool:
        """Store a file unless there is one already; False if there is.

        Of several that create the same name at the same time exactly one gets True.
        """
        return self._create(check_name(name), views_of(data))

    def writer(self, name: str) -> StreamWriter:
        """Begin a file of unknown length, replacing any other of the name."""
        return self._writer(check_name(name))

    def delete(self, name: str) -> None:
        """Delete a file; it need not exist."""
        self._delete(check_name(name))

    def delete_many(self, names: Iterable[str]) -> Failures:
        """Delete files in any order; return those that could not be deleted, with the reason."""
        return self._delete_many([check_name(name) for name in names])

    def stat(self, name: str) -> StoredFile:
        """Return a file's size and time; ``StorageNotFoundError`` if it does not exist."""
        return self._stat(check_name(name))

    def exists(self, name: str) -> bool:
        """Whether a file exists."""
        try:
            self.stat(name)
        except StorageNotFoundError:
            return False
        return True

    def size(self, name: str) -> int:
        """A file's size in bytes; ``StorageNotFoundError`` if it does not exist."""
        return self.stat(name).size

    def list(self, prefix: str = "") -> Iterator[StoredFile]:
        """Yield the files under a folder, to any depth and in no particular order.

        ``prefix`` counts in whole parts: ``a/b`` yields ``a/b/c``, but neither ``a/b`` nor
        ``a/bc``; a slash at its end changes nothing. Files that come or go meanwhile may be
        missed.
        """
        return self._list(check_prefix(prefix))

    def sweep(self, older_than: float = 3600.0) -> int:
        """Remove what dead writers left, untouched for ``older_than`` seconds; returns how many.

        What provably belongs to a dead writer goes at once. Stores that clean up by themselves
        remove nothing.
        """
        if older_than < 0:
            raise ValueError(f"older_than must not be negative: {older_than}")
        return self._sweep(older_than)

    def close(self) -> None:  # noqa: B027 - most backends hold nothing
        """Release memory and connections; what was stored stays."""

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

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"


class FolderBackend(StorageBackend):
    """A folder within another backend, which it does not close."""

    def __init__(self, inner: StorageBackend, folder: str) -> None:
        self._inner = inner
        self._under = f"{check_name(folder)}/"
        self.kind = inner.kind  # type: ignore[misc]
        self.url = f"{inner.url.rstrip('/')}/{folder}"

    def location(self, name: str = "") -> str:
        """Where the inner backend has a file."""
        return self._inner.location((self._under + name).rstrip("/"))

    def _read(self, name: str) -> bytes:
        return self._inner.read(self._under + name)

    def _read_ranges(self, name: str, ranges: Sequence[Range]) -> Pieces:
        return self._inner.read_ranges(self._under + name, ranges)

    def _read_into(self, name: str, offset: int, views: Views) -> None:
        self._inner.read_into(self._under + name, offset, views)

    def _write(self, name: str, views: Views) -> None:
        self._inner.write(self._under + name, views)

    def _create(self, name: str, views: Views) -> bool:
        return self._inner.create(self._under + name, views)

    def _writer(self, name: str) -> StreamWriter:
        return self._inner.writer(self._under + name)

    def _delete(self, name: str) -> None:
        self._inner.delete(self._under + name)

    def _delete_many(self, names: Names) -> Failures:
        failures = self._inner.delete_many([self._under + name for name in names])
        return [(name.removeprefix(self._under), error) for name, error in failures]

    def _stat(self, name: str) -> StoredFile:
        return self._own(self._inner.stat(self._under + name))

    def _list(self, prefix: str) -> Iterator[StoredFile]:
        return map(self._own, self._inner.list(self._under + prefix))

    def _sweep(self, older_than: float) -> int:
        return self._inner.sweep(older_than)

    def _own(self, file: StoredFile) -> StoredFile:
        return replace(file, name=file.name.removeprefix(self._under))


MAX_BYTES = 768
"""The longest name in UTF-8. Stores allow 1024 for the name and its prefix together."""
MAX_PART_BYTES = 255
"""The longest part of a name: what file systems allow."""
PARTIAL = ".strata-partial-"
"""Local files with this prefix are being written, or were by a process that died."""


def check_name(name: str) -> str:
    """Return ``name`` if every backend can store a file under it; ``ValueError`` otherwise."""
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
        return "it has characters that UTF-8 cannot encode"
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


STORE_VARIABLES = ("AWS_", "GOOGLE_", "AZURE_")
"""The environment variables of object stores begin so."""
_SECRET = re.compile(r"SECRET|TOKEN|PASSWORD|KEY$|SAS|CREDENTIAL", re.IGNORECASE)
_URL = re.compile(r"(\w[\w+.-]*://)(?:[^\s/?#]*@)?([^\s?#\"'<>()]*)(?:[?#][^\s\"'<>()]*)?")
_MESSAGE_LIMIT = 600
_REMEDIES = {
    errno.ENOSPC: "the disk is full: make room, or keep fewer checkpoints",
    errno.EDQUOT: "the disk quota is used up: make room, or keep fewer checkpoints",
    errno.EROFS: "the file system is read-only: choose another folder, or mount it writable",
    errno.ENOTDIR: "a file or a symbolic link is where a folder should be: move it away",
    errno.EISDIR: "a folder is where the file should be: move it away",
    errno.ELOOP: "it is a symbolic link, and links are not followed: put the file itself there",
    errno.ENAMETOOLONG: "the name is too long for this file system",
    errno.EMFILE: "this process has too many open files: raise the limit (ulimit -n)",
    errno.EIO: "the disk fails: check the system log",
}
_STATUS = re.compile(r"status code: (\d{3})\b")
_EXPIRED = re.compile(
    r"<Code>(ExpiredToken|TokenRefreshRequired|RequestExpired|RequestTimeTooSkewed)</Code>"
)
_THROTTLED = re.compile(r"<Code>(SlowDown|ServerBusy)</Code>")


@contextmanager
def storage_errors(
    doing: str, where: str, secrets: tuple[str, ...] = (), *, data: bool = False
) -> Iterator[None]:
    """Turn errors of the file system and of obstore into ``StorageError`` and its subclasses.

    The message says what was being done to ``where``, what the store said, and the remedy. With
    ``data``, of training data, a file that is missing, forbidden or changed is a ``ShardError``.
    """
    try:
        yield
    except StrataError:
        raise
    except Exception as exc:
        if not isinstance(exc, OSError) and not type(exc).__module__.startswith("obstore"):
            raise
        raise (
            data_error(exc, doing, where) if data else _error(exc, doing, where, secrets)
        ) from exc


def data_error(exc: Exception, doing: str, where: str) -> StrataError:
    """The error for training data that could not be read or written."""
    where = getattr(exc, "filename", None) or where
    if isinstance(exc, FileNotFoundError):
        return ShardNotFoundError(f"cannot {doing} {where}: it does not exist")
    if isinstance(exc, PermissionError):
        return ShardError(
            f"cannot {doing} {where}: this user has no permission to; change the permissions, or "
            "run as a user who has them"
        )
    is_changed = type(exc).__name__ == "PreconditionError"
    return changed(where) if is_changed else _error(exc, doing, where, ())


def changed(what: str) -> ShardError:
    """The error for a file that is not the one that was indexed."""
    return ShardError(
        f"{what} has changed since it was indexed: index the dataset again, or restore the file"
    )


def _error(exc: Exception, doing: str, where: str, secrets: tuple[str, ...]) -> StorageError:
    what, text = f"cannot {doing} {where}", str(exc)
    reason = getattr(exc, "strerror", None) or message_of(exc, secrets)
    # obstore raises FileNotFoundError and the like too, but only some of its calls do.
    match = None if isinstance(exc, OSError) else _STATUS.search(text)
    status = match[1] if match else ""
    error = StorageError(f"{what}: {reason}")
    if isinstance(exc, FileNotFoundError) or status == "404":
        error = StorageNotFoundError(f"{what}: it does not exist ({reason})")
    elif not isinstance(exc, OSError) and _EXPIRED.search(text):
        error = StoragePermissionError(
            f"{what}: the credentials have expired, or this machine's clock is wrong; renew them "
            "and start again, or use a role, whose credentials are renewed automatically "
            f"({reason})"
        )
    elif isinstance(exc, PermissionError) or status in ("401", "403"):
        error = StoragePermissionError(
            f"{what}: it is not permitted; change the permissions, or use credentials or a user "
            f"that has them ({reason})"
        )
    elif status in ("429", "503") or (status == "200" and _THROTTLED.search(text)):
        error = StorageThrottledError(
            f"{what}: the store is overloaded or unavailable, also after retries; send fewer "
            f"requests, or raise its limits ({reason})"
        )
    if isinstance(exc, OSError):
        if type(error) is StorageError and exc.errno in _REMEDIES:
            error = StorageError(f"{what}: {_REMEDIES[exc.errno]}")
        error.errno = exc.errno
    return error


def message_of(error: Exception, secrets: Iterable[str] = ()) -> str:
    """What a store said, on one line, without its debug output and without credentials.

    ``secrets`` are left out besides those in the environment. URLs lose their queries, which may be
    signatures.
    """
    text = _URL.sub(r"\1\2", " ".join(str(error).partition("\n\nDebug source")[0].split()))
    for secret in {*secrets, *secrets_in(os.environ)}:
        text = text.replace(secret, "***")
    return text if len(text) <= _MESSAGE_LIMIT else text[:_MESSAGE_LIMIT] + "..."


def secrets_in(settings: Mapping[str, str]) -> set[str]:
    """The secret values among environment variables of stores."""
    return {
        value
        for name, value in settings.items()
        if name.upper().startswith(STORE_VARIABLES) and is_secret(name, value)
    }


def is_secret(name: str, value: str) -> bool:
    """Whether a setting must not be shown."""
    return bool(_SECRET.search(name)) and len(value) > 3
