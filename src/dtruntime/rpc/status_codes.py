"""Status codes and errors: what the coordinator refuses, and what the caller gets raised.

The status code says what kind of refusal it is, trailing metadata say which
(``strata-reason``) and when to try again (``retry-after-ms``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import grpc

from ..errors import (
    ConnectionError,
    ShardError,
    ShardNotFoundError,
    StorageError,
    StrataError,
    SyncError,
)

REASON_KEY = "strata-reason"
RETRY_KEY = "retry-after-ms"

Metadata = tuple[tuple[str, str | bytes], ...]
"""A tuple, since grpc.aio refuses anything else."""

_Code = grpc.StatusCode

CODES: dict[str, grpc.StatusCode] = {
    "invalid": _Code.INVALID_ARGUMENT,
    "superseded": _Code.FAILED_PRECONDITION,
    "unknown_worker": _Code.FAILED_PRECONDITION,
    "foreign_state": _Code.FAILED_PRECONDITION,
    "world_size_conflict": _Code.FAILED_PRECONDITION,
    "not_ready": _Code.FAILED_PRECONDITION,
    "job_is_live": _Code.FAILED_PRECONDITION,
    "dataset_conflict": _Code.ALREADY_EXISTS,
    "checkpoint_conflict": _Code.ALREADY_EXISTS,
    "unknown_dataset": _Code.NOT_FOUND,
    "unknown_rank": _Code.NOT_FOUND,
    "unknown_job": _Code.NOT_FOUND,
    "unknown_epoch": _Code.NOT_FOUND,
    "unknown_action": _Code.NOT_FOUND,
    "no_such_worker": _Code.NOT_FOUND,
    "epoch_complete": _Code.FAILED_PRECONDITION,
    "plan_conflict": _Code.FAILED_PRECONDITION,
    "lane_conflict": _Code.FAILED_PRECONDITION,
    "digest_conflict": _Code.FAILED_PRECONDITION,
    "job_full": _Code.RESOURCE_EXHAUSTED,
    "rate_limited": _Code.RESOURCE_EXHAUSTED,
    "request_too_large": _Code.RESOURCE_EXHAUSTED,
    "too_many_jobs": _Code.RESOURCE_EXHAUSTED,
    "too_many_barriers": _Code.RESOURCE_EXHAUSTED,
    "too_many_datasets": _Code.RESOURCE_EXHAUSTED,
    "too_many_segments": _Code.RESOURCE_EXHAUSTED,
    "too_many_actions": _Code.RESOURCE_EXHAUSTED,
    "shutting_down": _Code.UNAVAILABLE,
    "storage": _Code.UNAVAILABLE,
}
"""Status code of each reason for a refusal."""

ABSENT = frozenset({_Code.UNAVAILABLE, _Code.DEADLINE_EXCEEDED, _Code.CANCELLED, _Code.UNKNOWN})
"""Codes that say nothing about the request: the coordinator is away, or was cut off."""


class ForeignStateError(SyncError):
    """The coordinator has another state than the one that the caller was registered in."""


@dataclass(frozen=True, slots=True)
class CallFailure:
    """A failed call as the caller sees it."""

    code: grpc.StatusCode
    message: str
    reason: str = ""
    retry_after: float | None = None

    @property
    def means_absent(self) -> bool:
        """Whether the coordinator could not answer at all."""
        return self.code in ABSENT

    @property
    def broke_off(self) -> bool:
        """Whether the connection ended, rather than the time."""
        return self.means_absent and self.code != _Code.DEADLINE_EXCEEDED

    def error(self) -> Exception:
        """The exception that a user gets."""
        if self.reason == "foreign_state":
            return ForeignStateError(self.message, reason="superseded")
        if self.reason in ("superseded", "unknown_worker"):
            return SyncError(self.message, reason="superseded")
        if self.code == _Code.INVALID_ARGUMENT:
            return ValueError(self.message)
        if self.code == _Code.UNIMPLEMENTED:
            return StrataError(
                f"the coordinator does not know this call and is older than this client: upgrade "
                f"it ({self.message})"
            )
        by_reason: dict[str, type[StrataError]] = {
            "unknown_dataset": ShardNotFoundError,
            "unknown_rank": ShardNotFoundError,
            "dataset_conflict": ShardError,
            "too_many_datasets": ShardError,
            "unknown_epoch": ShardError,
            "epoch_complete": ShardError,
            "plan_conflict": ShardError,
            "lane_conflict": ShardError,
            "digest_conflict": ShardError,
            "too_many_segments": ShardError,
            "checkpoint_conflict": StorageError,
            "unknown_job": StrataError,
            "job_is_live": StrataError,
            "unknown_action": StrataError,
            "no_such_worker": StrataError,
            "too_many_actions": StrataError,
        }
        return by_reason.get(self.reason, ConnectionError)(self.message)


def trailing_metadata(reason: str, retry_after: float | None) -> Metadata:
    """What a refusal carries beside its code and message."""
    if retry_after is None:
        return ((REASON_KEY, reason),)
    return (REASON_KEY, reason), (RETRY_KEY, str(max(1, round(retry_after * 1000))))


def failure_of(error: grpc.aio.AioRpcError) -> CallFailure:
    """Read a failed call."""
    found: dict[str, str] = {}
    trailing: Iterable[tuple[str, str | bytes]] = error.trailing_metadata() or ()
    for key, value in trailing:
        found[key] = value if isinstance(value, str) else value.decode(errors="replace")
    hint = found.get(RETRY_KEY, "")
    return CallFailure(
        error.code(),
        error.details() or error.code().name,
        found.get(REASON_KEY, ""),
        int(hint) / 1000 if hint.isdigit() else None,
    )
