"""How far a run is: by what its coordinator says, and by what its workers note."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..client import Observer
from ..types import Membership, WorkerStatus
from .notes import StepMark
from .scenario import Plan

RATE_SECONDS = 2.0
RATE_LEAST = 0.5


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line about something that happened."""

    elapsed: float
    topic: str
    text: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class Members:
    """A job as its coordinator sees it."""

    workers: tuple[WorkerStatus, ...] = ()
    checkpoint_step: int | None = None
    """Of the last checkpoint that was committed."""

    @property
    def live(self) -> frozenset[str]:
        """Who is a member."""
        live = (w for w in self.workers if w.membership is Membership.LIVE)
        return frozenset(worker.worker_id for worker in live)

    def rank(self, rank: int) -> WorkerStatus | None:
        """Who has a rank, or had it last."""
        return next((w for w in self.workers if w.rank == rank and w.incarnation), None)


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """A run at one moment."""

    plan: Plan
    title: str
    elapsed: float
    members: Members
    tally: StepTally
    killed: frozenset[str] = frozenset()
    """Killed workers that the coordinator still takes for members."""
    replacing: frozenset[int | None] = frozenset()
    """Ranks for which a replacement is starting."""
    is_held: bool = False
    """Whether somebody is missing."""
    is_alone: bool = False
    """Whether the coordinator is away."""


class JobWatch:
    """Reads about one job again and again."""

    def __init__(self, observer: Observer, job: str) -> None:
        self._observer = observer
        self._job = job
        self._last_event = 0

    def look(self) -> tuple[Members, list[Any]]:
        """The job, and what its journal has gained; raises `ConnectionError`."""
        if self._job not in self._observer.jobs():
            return Members(), []
        # Events first: what one tells of is then known to the status, too.
        events = self._observer.events(self._job, self._last_event)
        status = self._observer.status(self._job)
        if events:
            self._last_event = events[-1].id
        latest = status.latest_checkpoint
        return Members(status.workers, None if latest is None else latest.step), events


class StepTally:
    """What the workers' notes say so far."""

    def __init__(self) -> None:
        self.step = 0
        """Done last."""
        self.furthest = 0
        """The highest that was ever done."""
        self.loss: float | None = None
        self.first_at = 0.0
        self.last_at = 0.0
        self._times: deque[tuple[float, int]] = deque()
        """When steps were done, of the present crew."""
        self.generation = 0
        """Of the crew that trains."""

    def add(self, marks: Iterable[StepMark]) -> None:
        """Count more notes."""
        for mark in marks:
            if mark.generation > self.generation:
                self.generation = mark.generation
                self._times.clear()
            self.furthest = max(self.furthest, mark.step)
            self.first_at = self.first_at or mark.at
            self.loss, self.last_at = mark.loss, mark.at
            if not self._times or mark.step > self.step:
                self._times.append((mark.at, mark.step))
            self.step = mark.step
        while self._times and self._times[0][0] < self.last_at - RATE_SECONDS:
            self._times.popleft()

    @property
    def steps_per_second(self) -> float | None:
        """How fast it goes; ``None`` when there is too little to tell by."""
        if not self._times or (seconds := self._times[-1][0] - self._times[0][0]) < RATE_LEAST:
            return None
        return (self._times[-1][1] - self._times[0][1]) / seconds
