"""One member of a job."""

from __future__ import annotations

from ...types import Membership
from .commands import Heartbeat
from .records import WorkerRecord


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

    def __init__(self, record: WorkerRecord, heard: int, now: float) -> None:
        self.record = record
        self.rank = record.rank
        self.incarnation = record.incarnation
        self.live = record.membership == Membership.LIVE
        self.last_seen = now
        self.heard = heard
        """The job's next incarnation when it was last heard: the order of events, by no clock."""
        self.pulse: Heartbeat | None = None
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

    def knew(self, other: Member) -> bool:
        """Whether ``other`` was heard from while this member was registered."""
        return other.heard > self.incarnation
