"""One member of a job."""

from __future__ import annotations

from ...types import Membership, WorkerState
from .commands import Heartbeat
from .records import ReportRecord, WorkerRecord


class Member:
    """The current or last holder of a rank."""

    __slots__ = (
        "beat_at",
        "epoch",
        "heard",
        "incarnation",
        "last_seen",
        "live",
        "pulse",
        "rank",
        "record",
    )

    def __init__(self, record: WorkerRecord, heard: int, job: str, now: float) -> None:
        self.record = record
        self.rank = record.rank
        self.incarnation = record.incarnation
        self.live = record.membership == Membership.LIVE
        self.last_seen = now if self.live else record.heard_at or record.registered_at
        self.heard = heard
        """The job's next incarnation when it was last heard: the order of events, by no clock."""
        self.pulse = _stored_pulse(record, job)
        self.beat_at = 0.0
        """When its last heartbeat came."""
        self.epoch: int | None = None

    @property
    def worker_id(self) -> str:
        """The name it registered under."""
        return self.record.worker_id

    @property
    def last_step(self) -> int | None:
        """The newest step it reported."""
        return self.pulse.step if self.pulse else None

    @property
    def last_report(self) -> ReportRecord | None:
        """What it said of itself last, for its record."""
        said = self.pulse
        if said is None:
            return None
        return ReportRecord(
            said.state, said.step, said.epoch, said.report, said.step_seconds, said.samples
        )

    @property
    def has_finished(self) -> bool:
        """Whether it has left because there was nothing left to do."""
        left = self.record.membership == Membership.LEFT
        return left and self.record.detail == WorkerState.FINISHED

    def knew(self, other: Member) -> bool:
        """Whether ``other`` was heard from while this member was registered."""
        return other.heard > self.incarnation


def _stored_pulse(record: WorkerRecord, job: str) -> Heartbeat | None:
    said = record.report
    if said is None:
        return None
    return Heartbeat(
        job,
        record.worker_id,
        record.incarnation,
        said.state,
        said.step,
        said.epoch,
        said.message,
        said.step_seconds,
        said.samples,
    )
