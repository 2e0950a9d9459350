"""Committed checkpoints of a job: their condition, and which of them retention will drop."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import msgspec

from ....retention import (
    IDENTITY_KEY,
    PLACE_KEY,
    RETENTION_KEY,
    SECONDS_KEY,
    WRITTEN_KEY,
    Retention,
    RetentionCandidate,
)
from ....types import CheckpointCondition
from ..commands import CheckpointsReported, ReportCheckpoints
from ..effects import Outbox
from ..records import CheckpointRecord

if TYPE_CHECKING:
    from ..machine import Job


CHECKPOINTS_KEPT = 10_000
SAME_VERDICT_SECONDS = 60.0
"""The same condition is not stored again so soon: all ranks load the same checkpoint."""


class CommittedCheckpoints:
    """Checkpoints in the order of their commits; deleted ones stay on record as such.

    The coordinator never looks into storage itself; those who can report what they find.
    """

    def __init__(self, job: str) -> None:
        self._job = job
        self.records: OrderedDict[str, CheckpointRecord] = OrderedDict()
        self.sequence = 0
        """The number of the newest commit."""
        self.version = 0
        """Incremented with every change."""
        self._removed = 0

    @property
    def latest(self) -> CheckpointRecord | None:
        """The last committed checkpoint that still exists, whatever its step."""
        return next(self.newest(), None)

    @property
    def present(self) -> int:
        """How many are there."""
        return len(self.records) - self._removed

    def newest(self) -> Iterator[CheckpointRecord]:
        """Those that exist, newest first."""
        return (record for record in reversed(self.records.values()) if not record.removed_at)

    def oldest(self) -> Iterator[CheckpointRecord]:
        """Those that exist, oldest first."""
        return (record for record in self.records.values() if not record.removed_at)

    def is_present(self, checkpoint_id: str) -> bool:
        """Whether a checkpoint is known and exists."""
        record = self.records.get(checkpoint_id)
        return record is not None and not record.removed_at

    def add(self, record: CheckpointRecord, out: Outbox) -> None:
        """Add a commit; beyond `CHECKPOINTS_KEPT` the oldest is forgotten."""
        self._keep(record)
        out.put(self._job, record)
        while len(self.records) > CHECKPOINTS_KEPT:
            _, oldest = self.records.popitem(last=False)
            self._removed -= bool(oldest.removed_at)
            out.delete(self._job, oldest)

    def restore(self, records: Iterable[CheckpointRecord]) -> None:
        """Restore what was stored."""
        for record in sorted(records, key=lambda r: r.sequence):
            self._keep(record)
            self._removed += bool(record.removed_at)

    def report(self, c: ReportCheckpoints, out: Outbox) -> CheckpointsReported:
        """Record the reported condition of checkpoints; unknown ones are ignored."""
        keys = dict.fromkeys(c.checkpoint_ids)
        matches = [self.records[key] for key in keys if key in self.records]
        if c.path:
            matches += [record for record in self.newest() if record.path == c.path][:1]
        for record in matches:
            if not record.removed_at:
                self._note(record, c, out)
        return CheckpointsReported(len(matches))

    def _note(self, record: CheckpointRecord, c: ReportCheckpoints, out: Outbox) -> None:
        replace = msgspec.structs.replace
        if c.condition is CheckpointCondition.REMOVED:
            self._removed += 1
            self._change(replace(record, removed_at=out.now), out)
            self._emit("checkpoint.removed", record, c, out)
            return
        good = c.condition is CheckpointCondition.GOOD
        changed = record.verified is not good
        if not changed and out.now - record.verified_at < SAME_VERDICT_SECONDS:
            return
        checked = replace(record, verified=good, verified_at=out.now, verified_by=c.reported_by)
        self._change(checked, out)
        if changed:
            self._emit("checkpoint.verified" if good else "checkpoint.damaged", record, c, out)

    def _emit(self, kind: str, record: CheckpointRecord, c: ReportCheckpoints, out: Outbox) -> None:
        out.emit(
            self._job,
            kind,
            checkpoint=record.checkpoint_id,
            step=record.step,
            reason=c.detail,
            by=c.reported_by,
        )

    def _keep(self, record: CheckpointRecord) -> None:
        self.records[record.checkpoint_id] = record
        self.sequence = record.sequence
        self.version += 1

    def _change(self, record: CheckpointRecord, out: Outbox) -> None:
        self.records[record.checkpoint_id] = record
        self.version += 1
        out.put(self._job, record)


_WRITER_KEYS = frozenset({RETENTION_KEY, PLACE_KEY, WRITTEN_KEY, IDENTITY_KEY, SECONDS_KEY})


class RetentionForecast:
    """Which checkpoints at one location survive the next commit.

    Nothing is known of other locations, nor if the best by some metric are kept: the coordinator
    does not know metrics.
    """

    def __init__(self, records: Iterable[CheckpointRecord]) -> None:
        """``records`` in the order of their commits; the writer of the last one decides."""
        history = list(records)
        newest = history[-1].metadata if history else {}
        self._place = newest.get(PLACE_KEY)
        policy = Retention.from_json(newest.get(RETENTION_KEY, ""))
        self._dropped: frozenset[int] | None = None
        if policy is not None and not policy.keep_best:
            here = [r for r in history if r.metadata.get(PLACE_KEY) == self._place]
            kept = [RetentionCandidate(record.sequence, record.step, {}) for record in here]
            following = RetentionCandidate(history[-1].sequence + 1, -1, {})
            self._dropped = frozenset(one.sequence for one in policy.dropped([*kept, following]))

    def will_be_dropped(self, record: CheckpointRecord) -> bool | None:
        """Whether a checkpoint is gone after the next commit; None: unknown."""
        if self._dropped is None or record.metadata.get(PLACE_KEY) != self._place:
            return None
        return record.sequence in self._dropped


class RetentionForecasts:
    """The forecasts of all jobs, cached until a job's checkpoints change."""

    def __init__(self) -> None:
        self._cached: dict[str, tuple[tuple[float, int], RetentionForecast]] = {}

    def of(self, job: Job) -> RetentionForecast:
        """Those of a job."""
        history = job.checkpoints.history
        # A job may have been removed and started again under the same name.
        version = job.roster.created_at, history.version
        cached = self._cached.get(job.name)
        if cached is None or cached[0] != version:
            cached = self._cached[job.name] = version, RetentionForecast(history.oldest())
        return cached[1]


def written_bytes(record: CheckpointRecord) -> int | None:
    """How many bytes were written, if the writer said so."""
    text = record.metadata.get(WRITTEN_KEY, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None


def seconds_taken(record: CheckpointRecord) -> float | None:
    """How long the save took from the call to the commit, if the writer said so."""
    try:
        seconds = float(record.metadata.get(SECONDS_KEY, ""))
    except ValueError:
        return None
    return seconds if 0 <= seconds < math.inf else None


def users_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    """The user's metadata, without what writers add."""
    return {key: value for key, value in metadata.items() if key not in _WRITER_KEYS}
