"""Who is slow: step times of a job's members, measured against the median."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .effects import Outbox
from .members import Member
from .roster import Roster

SLOW_SCORE = 3.5
"""Deviations above the median from which on a member is slow, ..."""
SLOW_RATIO = 1.25
"""... if its steps also take this many times the median."""
RECOVERED_SCORE = 2.5
LEAST_REPORTERS = 3
LEAST_SPREAD = 0.05
"""Of the median: where all are alike, less than this is noise."""
MAD_TO_SIGMA = 1.4826
"""The median absolute deviation of a normal distribution, times this, is its deviation."""


class Stragglers:
    """The step times of one job's live members; all of it is soft."""

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
        """A member's step time as a multiple of the median; none if it reports none."""
        seconds = member.pulse.step_seconds if member.pulse else 0.0
        return slowness(seconds, self.median, live=member.live)

    def measure(self, since: float, out: Outbox) -> None:
        """Find those who are slow among the members whose last heartbeat came after ``since``."""
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
        found = {members[i].incarnation: members[i] for i in np.flatnonzero(begins | stays)}
        for incarnation, member in self.slow.items():
            if incarnation not in found and member.live:
                self._tell("worker.recovered_speed", member, out)
        for index in np.flatnonzero(begins):
            self._tell("worker.slow", members[index], out)
        self.slow = found

    def _tell(self, kind: str, member: Member, out: Outbox) -> None:
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
    """A step time as a multiple of the median; none where either is not known."""
    return step_seconds / median if step_seconds and median and live else None


def _scores(times: NDArray[np.float64], median: float) -> NDArray[np.float64]:
    """How many deviations each is above the median; nothing where too few report."""
    if len(times) < LEAST_REPORTERS:
        return np.zeros(len(times))
    spread = MAD_TO_SIGMA * float(np.median(np.abs(times - median)))
    return (times - median) / max(spread, LEAST_SPREAD * median)
