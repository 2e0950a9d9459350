"""Losses of workers, and when their job trained again."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ...types import WorkerState
from ..state.members import Member
from .views import Recovery

KEPT = 256


class Recoveries:
    """The newest losses of one job.

    A job trains again when a live worker that is not recovering reports a higher step than in an
    earlier heartbeat after the loss was noticed.
    """

    def __init__(self, known: Iterable[Recovery] = ()) -> None:
        self.known: list[Recovery] = list(known)[-KEPT:]
        """Oldest first."""
        self._steps: dict[int, int] = {}
        """By incarnation, the step in its last heartbeat since the newest loss."""

    @property
    def open(self) -> bool:
        """Whether the job has not trained since a loss."""
        return bool(self.known) and self.known[-1].training_at is None

    def lost(self, worker_id: str, lost_at: float, detected_at: float) -> None:
        """A worker was lost."""
        self.known.append(Recovery(lost_at, detected_at, None, worker_id))
        del self.known[:-KEPT]
        self._steps.clear()

    def look(self, members: Iterable[Member]) -> None:
        """See whether the members train again."""
        if not self.open:
            return
        since = self.known[-1].detected_at
        for member in members:
            pulse = member.pulse
            if not member.live or pulse is None or pulse.step is None or member.beat_at <= since:
                continue
            if pulse.state == WorkerState.RECOVERING:
                continue
            first = self._steps.setdefault(member.incarnation, pulse.step)
            if pulse.step > first:
                self._trains(member.beat_at)
                return
            self._steps[member.incarnation] = pulse.step

    def _trains(self, at: float) -> None:
        self.known = [
            msgspec.structs.replace(recovery, training_at=at)
            if recovery.training_at is None
            else recovery
            for recovery in self.known
        ]
        self._steps.clear()

    def done_since(self, at: float) -> int:
        """How many losses were made up for since then."""
        return sum(r.training_at is not None and r.training_at >= at for r in self.known)

    @property
    def last_seconds(self) -> float | None:
        """How long the newest recovery took, from the last sign of life to training."""
        for recovery in reversed(self.known):
            if recovery.training_at is not None:
                return recovery.training_at - recovery.lost_at
        return None
