"""How far a run is: by what its coordinator says, and by what its workers note."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..client import Observer
from ..run import Run
from ..types import Membership, WorkerStatus
from .scenario import Scenario

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

    plan: Scenario
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


class StepMark(msgspec.Struct, frozen=True, kw_only=True):
    """A step that a worker has done."""

    at: float
    """Seconds since 1970."""
    generation: int
    """Of the crew that did it."""
    step: int
    """From 1."""
    rank: int
    loss: float
    """Mean over the batch of all workers."""


class StepNote(StepMark, frozen=True, kw_only=True):
    """A step that a worker has done, with the samples that it used."""

    epoch: int
    ids: list[int]


class Notebook:
    """A worker's notes. They outlive the process, however it ends."""

    def __init__(self, folder: Path, run: Run) -> None:
        self._folder = folder
        self._run = run
        self.samples = 0
        """How many samples this process has used."""

    def __enter__(self) -> Self:
        worker = self._run.orchestrator
        assert worker is not None
        self._file = (self._folder / f"{worker.worker_id}.jsonl").open("ab", buffering=0)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def write(self, ids: NDArray[np.int64], loss: float) -> None:
        """Note the step that is being done."""
        run = self._run
        note = StepNote(
            at=time.time(),
            generation=run.crew.generation,
            step=run.step + 1,
            epoch=run.epoch,
            rank=run.rank,
            loss=loss,
            ids=ids.tolist(),
        )
        self._file.write(msgspec.json.encode(note) + b"\n")
        self.samples += len(ids)


class Follower:
    """Reads the notes of a run while they are written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self._decoder = msgspec.json.Decoder(StepMark)

    def news(self) -> list[StepMark]:
        """What was noted since the last call, in the order of time."""
        marks = [mark for path in self._folder.glob("*.jsonl") for mark in self._more(path)]
        return sorted(marks, key=lambda mark: mark.at)

    def _more(self, path: Path) -> Iterator[StepMark]:
        with path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read[path] = self._read.get(path, 0) + len(whole)
        return map(self._decoder.decode, whole.splitlines())


def read_notes(folder: Path) -> list[StepNote]:
    """All notes of a run; one that a killed worker did not finish is left out."""
    decoder = msgspec.json.Decoder(StepNote)
    notes = []
    for path in sorted(folder.glob("*.jsonl")):
        text = path.read_bytes()
        notes += [decoder.decode(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]
    return notes


def kept(notes: Iterable[StepNote]) -> dict[int, list[StepNote]]:
    """The notes of each step that count: those of the last crew that did it.

    What crews before it did of that step was undone when the run went back to a checkpoint.
    """
    found: dict[int, list[StepNote]] = {}
    for note in notes:
        others = found.setdefault(note.step, [])
        if others and note.generation > others[0].generation:
            others.clear()
        if not others or note.generation == others[0].generation:
            others.append(note)
    return dict(sorted(found.items()))
