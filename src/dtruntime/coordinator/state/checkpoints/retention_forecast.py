"""What the retention of checkpoints will drop, as their writer told with its commits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from ....retention import (
    IDENTITY_KEY,
    PLACE_KEY,
    RETENTION_KEY,
    SECONDS_KEY,
    WRITTEN_KEY,
    Retention,
    RetentionCandidate,
)
from ..machine import Job
from ..records import CheckpointRecord

_TOLD = frozenset({RETENTION_KEY, PLACE_KEY, WRITTEN_KEY, IDENTITY_KEY, SECONDS_KEY})


class RetentionForecast:
    """Which checkpoints of one place are kept beyond the next commit.

    Nothing is known of other places, nor where the best by some metric are kept: metrics are not
    told.
    """

    def __init__(self, records: Iterable[CheckpointRecord]) -> None:
        """``records`` in the order of their commits; the writer of the last one decides."""
        known = list(records)
        self._place = known[-1].metadata.get(PLACE_KEY) if known else None
        policy = Retention.from_told(known[-1].metadata.get(RETENTION_KEY, "")) if known else None
        self._dropped: frozenset[int] | None = None
        if policy is not None and not policy.keep_best:
            here = [r for r in known if r.metadata.get(PLACE_KEY) == self._place]
            kept = [RetentionCandidate(record.sequence, record.step, {}) for record in here]
            following = RetentionCandidate(known[-1].sequence + 1, -1, {})
            self._dropped = frozenset(one.sequence for one in policy.dropped([*kept, following]))

    def will_be_dropped(self, record: CheckpointRecord) -> bool | None:
        """Whether a checkpoint is gone after the next commit, or is already; None: not known."""
        if self._dropped is None or record.metadata.get(PLACE_KEY) != self._place:
            return None
        return record.sequence in self._dropped


class RetentionForecasts:
    """The fates of each job's checkpoints, looked up anew when something has changed."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[tuple[float, int], RetentionForecast]] = {}

    def of(self, job: Job) -> RetentionForecast:
        """Those of a job."""
        history = job.checkpoints.history
        # A job may have been removed and begun again under the same name.
        version = job.roster.created_at, history.version
        known = self._known.get(job.name)
        if known is None or known[0] != version:
            known = self._known[job.name] = version, RetentionForecast(history.oldest())
        return known[1]


def written_bytes(record: CheckpointRecord) -> int | None:
    """How much had to be stored, where one writer told."""
    told = record.metadata.get(WRITTEN_KEY, "")
    return int(told) if told.isascii() and told.isdigit() and len(told) < 20 else None


def seconds_taken(record: CheckpointRecord) -> float | None:
    """How long it took from the call of a single writer to its commit, where that one told."""
    try:
        seconds = float(record.metadata.get(SECONDS_KEY, ""))
    except ValueError:
        return None
    return seconds if 0 <= seconds < math.inf else None


def users_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    """Without what writers tell of themselves."""
    return {key: value for key, value in metadata.items() if key not in _TOLD}
