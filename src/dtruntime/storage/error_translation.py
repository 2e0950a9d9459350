"""One way in which errors of file systems and stores become Strata's."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import (
    StorageError,
    StorageNotFoundError,
    StoragePermissionError,
    StorageThrottledError,
    StrataError,
)
from .object_client import message_of

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
