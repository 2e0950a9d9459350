"""What happened in a run: the steps that its workers note, its kills, and how long all took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ..display import count, duration
from ..types import JobStatus, WorkerStatus
from .scenario import Scenario


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


class NoteReader:
    """Reads the notes of a run while they are written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self._decoder = msgspec.json.Decoder(StepNote)

    def news(self) -> list[StepNote]:
        """The notes since the last call, in the order of time, without any unfinished one."""
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

    What earlier crews did of that step was undone when the run went back to a checkpoint.
    """
    steps: dict[int, list[StepNote]] = {}
    for note in sorted(notes, key=lambda note: (note.step, note.generation)):
        same = steps.setdefault(note.step, [])
        if same and note.generation > same[0].generation:
            same.clear()
        same.append(note)
    return steps


@dataclass(slots=True)
class StepTally:
    """Progress according to the workers' notes so far."""

    step: int = 0
    """The last one done."""
    furthest: int = 0
    """The highest that was ever done."""
    generation: int = 0
    """Of the crew that trains."""
    loss: float | None = None
    first_at: float = 0.0
    last_at: float = 0.0
    crew_began: tuple[float, int] = (0.0, 0)
    """When the crew that trains did its first step, and which one that was."""

    @property
    def steps_per_second(self) -> float:
        """The speed of the crew that trains; 0 before it can be measured."""
        seconds = self.last_at - self.crew_began[0]
        return (self.step - self.crew_began[1]) / seconds if seconds else 0.0

    def add(self, notes: Iterable[StepNote]) -> None:
        """Count more notes."""
        for note in notes:
            if note.generation > self.generation:
                self.generation, self.crew_began = note.generation, (note.at, note.step)
            self.furthest = max(self.furthest, note.step)
            self.first_at = self.first_at or note.at
            self.step, self.loss, self.last_at = note.step, note.loss, note.at


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """A run at one moment."""

    plan: Scenario
    title: str
    elapsed: float
    job: JobStatus | None
    """As its coordinator sees it; None before it knows the job."""
    tally: StepTally
    killed: frozenset[str] = frozenset()
    """Killed workers that the coordinator still takes for members."""
    replacing: frozenset[int | None] = frozenset()
    """Ranks for which a replacement is starting."""
    is_held: bool = False
    """Whether a worker is missing."""
    is_alone: bool = False
    """Whether the coordinator is away."""

    def worker(self, rank: int) -> WorkerStatus | None:
        """The worker that has a rank, or had it last."""
        workers = self.job.workers if self.job else ()
        return next((w for w in workers if w.rank == rank and w.incarnation), None)


@dataclass(slots=True)
class Incident:
    """A kill: of a worker, or of the coordinator. Times are seconds since 1970, 0: not yet."""

    pid: int
    killed_at: float
    worker: str = ""
    """Empty: the coordinator was killed."""
    rank: int | None = None
    """None when the worker had none yet."""
    last_step_at: float = 0.0
    """When the last step was done before the coordinator was missed."""
    detected_at: float = 0.0
    """When the coordinator declared the worker dead."""
    replacement: str = ""
    started_at: float = 0.0
    """When the replacement was started."""
    back_at: float = 0.0
    """When the replacement had joined, or the coordinator served again."""
    generation: int = 0
    """The membership with the replacement."""
    resumed_at: float = 0.0
    """When all did the next step."""
    facts: dict[str, str] = field(default_factory=dict)
    """What happened, in words, for the end."""

    @property
    def is_over(self) -> bool:
        """Whether all train again."""
        return self.resumed_at > 0

    def after_kill(self, at: float) -> str:
        """How long after the kill something happened."""
        return f"{duration(at - self.killed_at)} after the kill"


class Timeline:
    """The incidents of a run, with their times; says what happens as it happens."""

    def __init__(self, workers: int, say: Callable[..., None]) -> None:
        self._workers = workers
        self._say = say
        self._joined: set[str] = set()
        self.tally = StepTally()
        self.incidents: list[Incident] = []

    @property
    def losses(self) -> list[Incident]:
        """The workers that were killed."""
        return [incident for incident in self.incidents if incident.worker]

    def noted(self, notes: Sequence[StepNote]) -> None:
        """Steps were done; the first one after an incident ends it."""
        if notes and not self.tally.first_at:
            self._say("training", "has begun", at=notes[0].at)
        for incident in self.incidents:
            if not incident.is_over:
                see_end = self._see_end_of_loss if incident.worker else self._see_end_of_outage
                see_end(incident, notes)
        self.tally.add(notes)

    def _see_end_of_outage(self, outage: Incident, notes: Sequence[StepNote]) -> None:
        first = next((n for n in notes if outage.back_at and n.at > outage.back_at), None)
        if first is None:
            outage.last_step_at = max([outage.last_step_at, *(note.at for note in notes)])
            return
        outage.resumed_at = first.at
        again = "some were" if first.generation > self.tally.generation else "none was"
        passed = duration(first.at - outage.last_step_at)
        outage.facts["carried on"] = f"{passed} passed between two steps, {again} done again"
        text = f"goes on with step {first.step:,}, {outage.after_kill(first.at)}"
        self._say("training", text, "green", at=first.at)

    def _see_end_of_loss(self, loss: Incident, notes: Sequence[StepNote]) -> None:
        joined = loss.generation
        first = next((n for n in notes if joined and n.generation >= joined), None)
        if first is None:
            return
        loss.resumed_at, saved = first.at, first.step - 1
        before = (note.step for note in notes if note.generation < joined)
        repeated = count(max(self.tally.furthest, *before, 0) - saved, "step")
        text = f"to the checkpoint of step {saved:,}; {repeated}"
        loss.facts["rolled back"] = f"{text} done again"
        self._say("rolled back", f"{text} to do again", "yellow", at=first.at)
        away = duration(first.at - loss.killed_at)
        loss.facts["recovered"] = f"{away} from the kill to the next step that all did"
        self._say("training", f"again, all workers, {away} after the kill", "green", at=first.at)

    def journal(self, at: float, kind: str, fields: Mapping[str, str]) -> None:
        """An entry of the coordinator's journal."""
        match kind, dict(fields):
            case "dataset.registered", {"dataset": name, "samples": samples, "shards": shards}:
                text = f"{name}: {count(int(samples), 'sample')} in {count(int(shards), 'shard')}"
                self._say("dataset", text, at=at)
            case "worker.registered", {"worker": name, "rank": rank, "generation": generation}:
                self._registered(at, name, int(rank), int(generation))
            case "worker.dead", {"worker": name, "reason": reason}:
                self._died(at, name, reason)

    def _registered(self, at: float, name: str, rank: int, generation: int) -> None:
        for loss in self.losses:
            if loss.replacement == name and not loss.back_at:
                loss.back_at, loss.generation = at, generation
                took = duration(at - loss.started_at)
                loss.facts["replaced"] = f"by {name}, {took} from its start to rank {rank}"
                self._say("joined", f"{name} takes rank {rank}", "green", at=at)
                return
        if name in self._joined:
            self._say("joined", f"{name} is back as rank {rank}", "green", at=at)
        self._joined.add(name)
        if len(self._joined) == self._workers:
            self._say("joined", f"all {self._workers} workers have their ranks", at=at)

    def _died(self, at: float, name: str, reason: str) -> None:
        loss = next((loss for loss in self.losses if loss.worker == name), None)
        if loss is None:
            self._say("dead", f"{name}: {reason}", "red", at=at)
            return
        loss.detected_at = at
        loss.facts["detected"] = loss.after_kill(at)
        self._say("detected", f"{loss.facts['detected']}: {reason}", "yellow", at=at)
        text = f"for a replacement; rank {loss.rank}'s share of the data is kept for it"
        self._say("waiting", text, "yellow", at=at)

    def killed(self, worker: str, pid: int, rank: int | None) -> None:
        """A worker was killed; reported once."""
        if not any(loss.worker == worker for loss in self.losses):
            place = "no rank yet" if rank is None else f"rank {rank}"
            loss = Incident(pid, time.time(), worker, rank)
            self._add(loss, f"{worker} ({place}, process {pid})")

    def replaced(self, lost: str, replacement: str, pid: int) -> None:
        """A replacement was started."""
        loss = next(loss for loss in self.losses if loss.worker == lost)
        loss.replacement, loss.started_at = replacement, time.time()
        self._say("replaced", f"{replacement} starts, process {pid}")

    def down(self, pid: int) -> Incident:
        """The coordinator was killed; reported once."""
        for incident in self.incidents:
            if not incident.worker and not incident.back_at:
                return incident
        outage = Incident(pid, time.time(), last_step_at=self.tally.last_at)
        self._add(outage, f"the coordinator (process {pid})")
        return outage

    def restarted(self, outage: Incident, pid: int) -> None:
        """The coordinator serves again."""
        outage.back_at = time.time()
        text = f"serving again {outage.after_kill(outage.back_at)}"
        outage.facts["restarted"] = text
        self._say("restarted", f"{text}, process {pid}", "yellow")

    def _add(self, incident: Incident, who: str) -> None:
        self.incidents.append(incident)
        incident.facts["killed"] = who
        text = f"{who}, SIGKILL, after step {self.tally.step:,}"
        self._say("KILLED", text, "bold red", at=incident.killed_at)
