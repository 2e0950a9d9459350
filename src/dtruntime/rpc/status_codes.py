"""Refusals as gRPC status codes, and status codes as errors.

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

ABSENT = frozenset({_Code.UNAVAILABLE, _Code.DEADLINE_EXCEEDED, _Code.CANCELLED, _Code.UNKNOWN})
"""Codes that mean that the coordinator could not be reached."""


class ForeignStateError(SyncError):
    """The coordinator has another state than the one that the caller was registered in."""


_REASONS: dict[str, tuple[grpc.StatusCode, type[Exception]]] = {
    "invalid": (_Code.INVALID_ARGUMENT, ValueError),
    "superseded": (_Code.FAILED_PRECONDITION, SyncError),
    "unknown_worker": (_Code.FAILED_PRECONDITION, SyncError),
    "foreign_state": (_Code.FAILED_PRECONDITION, ForeignStateError),
    "world_size_conflict": (_Code.FAILED_PRECONDITION, ConnectionError),
    "not_ready": (_Code.FAILED_PRECONDITION, ConnectionError),
    "job_is_live": (_Code.FAILED_PRECONDITION, StrataError),
    "dataset_conflict": (_Code.ALREADY_EXISTS, ShardError),
    "checkpoint_conflict": (_Code.ALREADY_EXISTS, StorageError),
    "unknown_dataset": (_Code.NOT_FOUND, ShardNotFoundError),
    "unknown_rank": (_Code.NOT_FOUND, ShardNotFoundError),
    "unknown_job": (_Code.NOT_FOUND, StrataError),
    "unknown_epoch": (_Code.NOT_FOUND, ShardError),
    "unknown_action": (_Code.NOT_FOUND, StrataError),
    "no_such_worker": (_Code.NOT_FOUND, StrataError),
    "epoch_complete": (_Code.FAILED_PRECONDITION, ShardError),
    "plan_conflict": (_Code.FAILED_PRECONDITION, ShardError),
    "lane_conflict": (_Code.FAILED_PRECONDITION, ShardError),
    "digest_conflict": (_Code.FAILED_PRECONDITION, ShardError),
    "job_full": (_Code.RESOURCE_EXHAUSTED, ConnectionError),
    "rate_limited": (_Code.RESOURCE_EXHAUSTED, ConnectionError),
    "request_too_large": (_Code.RESOURCE_EXHAUSTED, ConnectionError),
    "too_many_jobs": (_Code.RESOURCE_EXHAUSTED, ConnectionError),
    "too_many_barriers": (_Code.RESOURCE_EXHAUSTED, ConnectionError),
    "too_many_datasets": (_Code.RESOURCE_EXHAUSTED, ShardError),
    "too_many_segments": (_Code.RESOURCE_EXHAUSTED, ShardError),
    "too_many_actions": (_Code.RESOURCE_EXHAUSTED, StrataError),
    "shutting_down": (_Code.UNAVAILABLE, ConnectionError),
    "storage": (_Code.UNAVAILABLE, ConnectionError),
}
"""Each reason for a refusal: its status code, and the error that the caller gets."""
CODES: dict[str, grpc.StatusCode] = {reason: code for reason, (code, _) in _REASONS.items()}


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
        """Whether the connection broke, rather than timing out."""
        return self.means_absent and self.code != _Code.DEADLINE_EXCEEDED

    def error(self) -> Exception:
        """The exception that a user gets."""
        if self.code == _Code.INVALID_ARGUMENT:
            return ValueError(self.message)
        if self.code == _Code.UNIMPLEMENTED:
            return StrataError(
                f"the coordinator does not know this call and is older than this client: upgrade "
                f"it ({self.message})"
            )
        _, kind = _REASONS.get(self.reason, (None, ConnectionError))
        if issubclass(kind, SyncError):
            return kind(self.message, reason="superseded")
        return kind(self.message)


def trailing_metadata(reason: str, retry_after: float | None) -> Metadata:
    """What a refusal carries beside its code and message."""
    if retry_after is None:
        return ((REASON_KEY, reason),)
    return (REASON_KEY, reason), (RETRY_KEY, str(max(1, round(retry_after * 1000))))


def failure_of(error: grpc.aio.AioRpcError) -> CallFailure:
    """Read a failed call."""
    metadata: dict[str, str] = {}
    trailing: Iterable[tuple[str, str | bytes]] = error.trailing_metadata() or ()
    for key, value in trailing:
        metadata[key] = value if isinstance(value, str) else value.decode(errors="replace")
    hint = metadata.get(RETRY_KEY, "")
    return CallFailure(
        error.code(),
        error.details() or error.code().name,
        metadata.get(REASON_KEY, ""),
        int(hint) / 1000 if hint.isdigit() else None,
    )
