"""Stragglers: members whose steps take much longer than the median."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .effects import Outbox
from .members import Member
from .roster import Roster

SLOW_SCORE = 3.5
"""A member is slow when it is this many deviations above the median, ..."""
SLOW_RATIO = 1.25
"""... and its steps take this many times the median."""
RECOVERED_SCORE = 2.5
LEAST_REPORTERS = 3
LEAST_SPREAD = 0.05
"""As a fraction of the median; a smaller spread is noise."""
MAD_TO_SIGMA = 1.4826
"""Times the median absolute deviation, this is a normal distribution's standard deviation."""


class Stragglers:
    """The stragglers of one job; nothing of it is stored."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self.slow: dict[int, Member] = {}
        """By incarnation."""
        self.median = 0.0
        """0: nobody has reported."""
        self.reported = False
        """Whether there may be something to measure."""

    def is_straggler(self, member: Member) -> bool:
        """Whether a member was slow when it was last measured."""
        return member.live and member.incarnation in self.slow

    def slowness(self, member: Member) -> float | None:
        """A member's step time as a multiple of the median; None if it reports none."""
        seconds = member.pulse.step_seconds if member.pulse else 0.0
        return slowness(seconds, self.median, live=member.live)

    def measure(self, since: float, out: Outbox) -> None:
        """Find the stragglers among the members whose last heartbeat came after ``since``."""
        members = [
            member
            for member in self._roster.slots.held()
            if member.live
            and member.beat_at >= since
            and member.pulse is not None
            and member.pulse.step_seconds
        ]
        self.reported = bool(members)
        times = np.array([m.pulse.step_seconds for m in members if m.pulse is not None])
        self.median = float(np.median(times)) if members else 0.0
        scores = _scores(times, self.median)
        was = np.array([m.incarnation in self.slow for m in members], dtype=bool)
        begins = ~was & (scores > SLOW_SCORE) & (times > SLOW_RATIO * self.median)
        stays = was & (scores >= RECOVERED_SCORE)
        slow = {members[i].incarnation: members[i] for i in np.flatnonzero(begins | stays)}
        for incarnation, member in self.slow.items():
            if incarnation not in slow and member.live:
                self._emit("worker.recovered_speed", member, out)
        for index in np.flatnonzero(begins):
            self._emit("worker.slow", members[index], out)
        self.slow = slow

    def _emit(self, kind: str, member: Member, out: Outbox) -> None:
        seconds = member.pulse.step_seconds if member.pulse else 0.0
        out.emit(
            self._roster.job,
            kind,
            worker=member.worker_id,
            rank=member.rank,
            step_seconds=f"{seconds:.6g}",
            median_seconds=f"{self.median:.6g}",
        )


def slowness(step_seconds: float | None, median: float, *, live: bool) -> float | None:
    """A step time as a multiple of the median; None if either is unknown."""
    return step_seconds / median if step_seconds and median and live else None


def _scores(times: NDArray[np.float64], median: float) -> NDArray[np.float64]:
    """How many deviations each is above the median; 0 where too few report."""
    if len(times) < LEAST_REPORTERS:
        return np.zeros(len(times))
    spread = MAD_TO_SIGMA * float(np.median(np.abs(times - median)))
    return (times - median) / max(spread, LEAST_SPREAD * median)
