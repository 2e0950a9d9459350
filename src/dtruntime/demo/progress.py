"""How far a run is, by the steps that its workers note in files."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ..types import JobStatus, WorkerStatus
from .scenario import Scenario

RATE_SECONDS = 2.0
RATE_LEAST = 0.5


class StepNote(msgspec.Struct, frozen=True, kw_only=True):
    """A step that a worker has done, with the samples that it used."""

    at: float
    """Seconds since 1970."""
    generation: int
    """Of the crew that did it."""
    step: int
    """From 1."""
    epoch: int
    rank: int
    loss: float
    """Mean over the batch of all workers."""
    ids: list[int]


class NoteFile:
    """A worker's notes. They outlive the process, however it ends."""

    def __init__(self, folder: Path, worker_id: str) -> None:
        self._path = folder / f"{worker_id}.jsonl"
        self.samples = 0
        """How many samples this process has used."""

    def write(self, note: StepNote) -> None:
        """Note a step."""
        with self._path.open("ab", buffering=0) as file:
            file.write(msgspec.json.encode(note) + b"\n")
        self.samples += len(note.ids)


class NoteReader:
    """Reads the notes of a run while they are written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self._decoder = msgspec.json.Decoder(StepNote)

    def news(self) -> list[StepNote]:
        """What was noted since the last call, in the order of time.

        A note that a worker has not finished is left out.
        """
        notes: list[StepNote] = []
        for path in sorted(self._folder.glob("*.jsonl")):
            offset = self._offsets.get(path, 0)
            with path.open("rb") as file:
                file.seek(offset)
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._offsets[path] = offset + len(whole)
            notes += map(self._decoder.decode, whole.splitlines())
        return sorted(notes, key=lambda note: note.at)


def last_notes(notes: Iterable[StepNote]) -> dict[int, list[StepNote]]:
    """The notes of each step that count: those of the last crew that did it.

    What crews before it did of that step was undone when the run went back to a checkpoint.
    """
    steps: dict[int, list[StepNote]] = {}
    for note in sorted(notes, key=lambda note: (note.step, note.generation)):
        same = steps.setdefault(note.step, [])
        if same and note.generation > same[0].generation:
            same.clear()
        same.append(note)
    return steps


class StepTally:
    """What the workers' notes say so far."""

    def __init__(self) -> None:
        self.step = 0
        """Done last."""
        self.furthest = 0
        """The highest that was ever done."""
        self.loss: float | None = None
        self.first_at = self.last_at = 0.0
        self.generation = 0
        """Of the crew that trains."""
        self._times: deque[tuple[float, int]] = deque()
        """When steps were done, of the present crew."""

    def add(self, notes: Iterable[StepNote]) -> None:
        """Count more notes."""
        for note in notes:
            if note.generation > self.generation:
                self.generation = note.generation
                self._times.clear()
            self.furthest = max(self.furthest, note.step)
            self.first_at = self.first_at or note.at
            self.loss, self.last_at = note.loss, note.at
            if not self._times or note.step > self.step:
                self._times.append((note.at, note.step))
            self.step = note.step
        while self._times and self._times[0][0] < self.last_at - RATE_SECONDS:
            self._times.popleft()

    @property
    def steps_per_second(self) -> float | None:
        """How fast it goes; ``None`` when there is too little to tell by."""
        if not self._times or (seconds := self._times[-1][0] - self._times[0][0]) < RATE_LEAST:
            return None
        return (self._times[-1][1] - self._times[0][1]) / seconds


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """A run at one moment."""

    plan: Scenario
    title: str
    elapsed: float
    job: JobStatus | None
    """As its coordinator sees it; nothing before it knows the job."""
    tally: StepTally
    killed: frozenset[str] = frozenset()
    """Killed workers that the coordinator still takes for members."""
    replacing: frozenset[int | None] = frozenset()
    """Ranks for which a replacement is starting."""
    is_held: bool = False
    """Whether somebody is missing."""
    is_alone: bool = False
    """Whether the coordinator is away."""

    def worker(self, rank: int) -> WorkerStatus | None:
        """Who has a rank, or had it last."""
        workers = self.job.workers if self.job else ()
        return next((w for w in workers if w.rank == rank and w.incarnation), None)
