"""The errors that Strata raises.

    StrataError
    ├── ConnectionError           also builtins.ConnectionError
    ├── StorageError              also OSError
    │   ├── CheckpointNotFoundError   also FileNotFoundError
    │   ├── CheckpointDamagedError
    │   ├── CheckpointAbortedError
    │   ├── StorageNotFoundError      also FileNotFoundError
    │   ├── StoragePermissionError    also PermissionError
    │   └── StorageThrottledError
    ├── SyncError                 barrier outcomes, fenced workers
    ├── ShardError                invalid dataset or shard request
    │   ├── ShardNotFoundError        also LookupError
    │   └── ShardValueError           also ValueError
    └── ConfigError               also ValueError

Wrong argument types and values raise plain ``TypeError`` and ``ValueError`` before
anything is sent. Every message says what happened, to which object, and what to do.
"""

from __future__ import annotations

import builtins
import functools
from collections.abc import Mapping
from typing import Any, Literal

_DISTRIBUTIONS = {"google_crc32c": "google-crc32c"}
"""Packages whose distribution has another name than their module."""


def install_command(module: str) -> str:
    """The command that installs the package of a module."""
    package = module.partition(".")[0]
    return f"pip install {_DISTRIBUTIONS.get(package, package)}"


SyncReason = Literal["timeout", "membership_changed", "superseded"]


class StrataError(Exception):
    """The base class of Strata's errors."""


class ConnectionError(StrataError, builtins.ConnectionError):
    """The coordinator could not be reached, or refused the call."""


class StorageError(StrataError, OSError):
    """A read or write of durable data failed."""


class CheckpointNotFoundError(StorageError, FileNotFoundError):
    """No committed checkpoint matches the request."""


class CheckpointDamagedError(StorageError):
    """A stored checkpoint differs from what was committed, or parts of it are gone.

    ``file`` is the damaged file, if known, and ``detail`` what is wrong with it.
    """

    def __init__(self, message: str, *, file: str = "", detail: str = "") -> None:
        super().__init__(message)
        self.file = file
        self.detail = detail or message


class CheckpointAbortedError(StorageError):
    """A checkpoint of all ranks was not committed, and never will be.

    With ``may_be_committed`` the coordinator lost its state meanwhile: it may have committed the
    checkpoint before, so its parts have to be kept.
    """

    may_be_committed = False


class StorageNotFoundError(StorageError, FileNotFoundError):
    """A file, object or bucket does not exist."""


class StoragePermissionError(StorageError, PermissionError):
    """This user may not read or write there."""


class StorageThrottledError(StorageError):
    """A store kept throttling requests for longer than it is worth waiting."""


class SyncError(StrataError):
    """A barrier ended without completing, or this worker is no longer a member.

    ``reason`` is ``"timeout"``, ``"membership_changed"`` or ``"superseded"``.
    ``missing`` maps each worker that had not arrived to the last step it reported
    (``None`` when it reported none); it is cut at 256 entries, ``missing_count`` is exact.
    ``lost`` maps each worker that died or left since this worker last heard of it to the reason.
    ``survivors`` are the ranks that remain; ``generation`` is the membership's number.
    """

    def __init__(
        self,
        message: str,
        *,
        reason: SyncReason,
        missing: Mapping[str, int | None] | None = None,
        missing_count: int | None = None,
        lost: Mapping[str, str] | None = None,
        survivors: tuple[int, ...] = (),
        generation: int = 0,
    ) -> None:
        super().__init__(message)
        self.reason: SyncReason = reason
        self.missing: dict[str, int | None] = dict(missing or {})
        self.missing_count = len(self.missing) if missing_count is None else missing_count
        self.lost: dict[str, str] = dict(lost or {})
        self.survivors = survivors
        self.generation = generation

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors travel between processes; by default only the message would reach __init__.
        return functools.partial(type(self), reason=self.reason), self.args, self.__dict__


class ShardError(StrataError):
    """A dataset or shard request is invalid, or contradicts what is registered."""


class ShardNotFoundError(ShardError, LookupError):
    """The dataset or shard named in the request does not exist."""


class ShardValueError(ShardError, ValueError):
    """A value that is invalid for a dataset."""


class ConfigError(StrataError, ValueError):
    """A configuration file, variable or argument is unknown or has a bad value."""


def without_frames(error: BaseException) -> BaseException:
    """The same error without its traceback, nor those of its causes.

    For errors whose message says everything: the traceback then shows the caller's code only.
    """
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return error
