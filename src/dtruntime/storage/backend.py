"""What every place for checkpoints promises, whatever it is made of."""

from __future__ import annotations

import abc
import errno
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
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


STORE_VARIABLES = ("AWS_", "GOOGLE_", "AZURE_")
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
    errno.EIO: "the disk fails: look into the system's log",
}
_STATUS = re.compile(r"status code: (\d{3})\b")
_EXPIRED = re.compile(
    r"<Code>(ExpiredToken|TokenRefreshRequired|RequestExpired|RequestTimeTooSkewed)</Code>"
)
_THROTTLED = re.compile(r"<Code>(SlowDown|ServerBusy)</Code>")


@contextmanager
def storage_errors(doing: str, where: str, secrets: tuple[str, ...] = ()) -> Iterator[None]:
    """Turn errors of the file system and of obstore into ``StorageError`` and its kin.

    The message says what was being done to ``where``, what the store said, and the remedy.
    """
    try:
        yield
    except StrataError:
        raise
    except OSError as exc:
        raise _of_system(exc, f"cannot {doing} {where}", secrets) from exc
    except Exception as exc:
        if not type(exc).__module__.startswith("obstore"):
            raise
        raise _of_store(exc, f"cannot {doing} {where}", secrets) from exc


def _of_system(exc: OSError, what: str, secrets: tuple[str, ...]) -> StorageError:
    # obstore raises FileNotFoundError and its like too, with what the store said and no number.
    said = exc.strerror or message_of(exc, secrets)
    error: StorageError
    if isinstance(exc, FileNotFoundError):
        error = StorageNotFoundError(f"{what}: it does not exist ({said})")
    elif isinstance(exc, PermissionError):
        error = _no_permission(what, said)
    else:
        error = StorageError(f"{what}: {_REMEDIES.get(exc.errno or 0, said)}")
    error.errno = exc.errno
    return error


def _no_permission(what: str, said: str) -> StoragePermissionError:
    return StoragePermissionError(
        f"{what}: it is not permitted; change the permissions, or use credentials or a user that "
        f"have them ({said})"
    )


def _of_store(exc: Exception, what: str, secrets: tuple[str, ...]) -> StorageError:
    said = message_of(exc, secrets)
    # Only some calls of obstore tell the kinds of errors apart by their class.
    status = found[1] if (found := _STATUS.search(str(exc))) else ""
    if status == "404":
        return StorageNotFoundError(f"{what}: it does not exist ({said})")
    if _EXPIRED.search(str(exc)):
        return StoragePermissionError(
            f"{what}: the credentials have expired, or this machine's clock is wrong; renew them "
            f"and start again, or use a role, whose credentials are renewed by themselves ({said})"
        )
    if status in ("401", "403"):
        return _no_permission(what, said)
    if status in ("429", "503") or (status == "200" and _THROTTLED.search(str(exc))):
        return StorageThrottledError(
            f"{what}: the store is overloaded or away, also after retries; ask it less, or "
            f"raise its limits ({said})"
        )
    return StorageError(f"{what}: {said}")


@contextmanager
def data_errors(doing: str, what: str) -> Iterator[None]:
    """Turn errors of a store or of the file system into Strata's, naming ``what``."""
    try:
        yield
    except (ShardError, StorageError):
        raise
    except FileNotFoundError as exc:
        name = exc.filename or what
        raise ShardNotFoundError(f"cannot {doing} {name}: it does not exist") from exc
    except PermissionError as exc:
        raise ShardError(
            f"cannot {doing} {exc.filename or what}: this user has no permission to; change the "
            "permissions, or run as a user who has them"
        ) from exc
    except OSError as exc:
        raise StorageError(f"cannot {doing} {exc.filename or what}: {exc.strerror or exc}") from exc
    except Exception as exc:
        if not type(exc).__module__.startswith("obstore"):
            raise
        if type(exc).__name__ == "PreconditionError":
            raise changed(what) from exc
        raise StorageError(f"cannot {doing} {what}: {message_of(exc)}") from exc


def changed(what: str) -> ShardError:
    """The error for a file that is not the one that was indexed."""
    return ShardError(
        f"{what} has changed since it was indexed: index the dataset again, or restore the file"
    )


def message_of(error: Exception, secrets: Iterable[str] = ()) -> str:
    """What a store said, on one line, without its debug output and without credentials.

    ``secrets`` are to be left out besides those in the environment. URLs lose their queries, which
    may be signatures.
    """
    text = _URL.sub(r"\1\2", " ".join(str(error).partition("\n\nDebug source")[0].split()))
    for secret in {*secrets, *secrets_in(os.environ)}:
        text = text.replace(secret, "***")
    return text if len(text) <= _MESSAGE_LIMIT else text[:_MESSAGE_LIMIT] + "..."


def secrets_in(settings: Mapping[str, str]) -> set[str]:
    """The values that nobody may see among environment variables of stores."""
    return {
        value
        for name, value in settings.items()
        if name.upper().startswith(STORE_VARIABLES) and is_secret(name, value)
    }


def is_secret(name: str, value: str) -> bool:
    """Whether nobody may see the value of a setting."""
    return bool(_SECRET.search(name)) and len(value) > 3
