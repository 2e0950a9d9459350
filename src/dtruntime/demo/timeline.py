"""What happened in one run, and how long it took."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..display import count, duration
from .launcher import DemoWorker
from .progress import StepNote, StepTally
from .terminal_view import TerminalView


class Timeline:
    """Keeps the incidents of a run, with their times, and says what happens as it happens."""

    def __init__(self, workers: int, view: TerminalView) -> None:
        self._workers = workers
        self._say = view.say
        self._joined: set[str] = set()
        self.tally = StepTally()
        self.incidents: list[Incident] = []

    @property
    def losses(self) -> list[WorkerLoss]:
        """The workers that were killed."""
        return [incident for incident in self.incidents if isinstance(incident, WorkerLoss)]

    # What the workers note

    def noted(self, notes: Sequence[StepNote]) -> None:
        """Steps were done; the first of a crew ends what held it up."""
        if notes and not self.tally.first_at:
            self._say("training", "has begun", at=notes[0].at)
        for incident in self.incidents:
            if isinstance(incident, Outage) and not incident.is_over:
                self._see_end_of_outage(incident, notes)
            elif isinstance(incident, WorkerLoss) and not incident.is_over:
                self._see_end_of_loss(incident, notes)
        self.tally.add(notes)

    def _see_end_of_outage(self, outage: Outage, notes: Sequence[StepNote]) -> None:
        first = next((m for m in notes if outage.back_at and m.at > outage.back_at), None)
        if first is None:
            before = (note.at for note in notes)
            outage.last_step_at = max(outage.last_step_at, *before, 0.0)
            return
        outage.resumed_at = first.at
        outage.is_rolled_back = first.generation > self.tally.generation
        away = duration(first.at - outage.killed_at)
        text = f"goes on with step {first.step:,}, {away} after the kill"
        self._say("training", text, "green", at=first.at)

    def _see_end_of_loss(self, loss: WorkerLoss, notes: Sequence[StepNote]) -> None:
        joined = loss.generation
        first = next((m for m in notes if joined and m.generation >= joined), None)
        if first is None:
            return
        loss.resumed_at, loss.resumed_from = first.at, first.step - 1
        before = (note.step for note in notes if note.generation < joined)
        loss.repeated = max(self.tally.furthest, *before, 0) - loss.resumed_from
        text = f"to the checkpoint of step {loss.resumed_from:,}; "
        text += f"{count(loss.repeated, 'step')} to do again"
        self._say("rolled back", text, "yellow", at=first.at)
        away = duration(first.at - loss.killed_at)
        self._say("training", f"again, all workers, {away} after the kill", "green", at=first.at)

    # What the coordinator's journal says

    def journal(self, at: float, kind: str, fields: Mapping[str, str]) -> None:
        """Tell an entry, if it matters."""
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
            if loss.replacement == name and not loss.joined_at:
                loss.joined_at, loss.generation = at, generation
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
        took = duration(at - loss.killed_at)
        self._say("detected", f"{took} after the kill: {reason}", "yellow", at=at)
        text = f"for a replacement; rank {loss.rank}'s share of the data is kept for it"
        self._say("waiting", text, "yellow", at=at)

    # What is killed, and mended

    def killed(self, worker: DemoWorker, rank: int | None, at: float) -> None:
        """A worker was killed; reported once."""
        if any(loss.worker == worker.name for loss in self.losses):
            return
        self.incidents.append(WorkerLoss(worker.name, worker.pid, rank, at))
        place = "no rank yet" if rank is None else f"rank {rank}"
        who = f"{worker.name} ({place}, process {worker.pid})"
        text = f"{who}, SIGKILL, after step {self.tally.step:,}"
        self._say("KILLED", text, "bold red", at=at)

    def replaced(self, lost: DemoWorker, replacement: DemoWorker) -> None:
        """A replacement was started."""
        loss = next(loss for loss in self.losses if loss.worker == lost.name)
        loss.replacement, loss.started_at = replacement.name, replacement.started_at
        text = f"{replacement.name} starts, process {replacement.pid}"
        self._say("replaced", text, at=replacement.started_at)

    def down(self, pid: int, at: float) -> Outage:
        """The coordinator was killed; reported once."""
        for incident in self.incidents:
            if isinstance(incident, Outage) and not incident.back_at:
                return incident
        outage = Outage(pid, at, self.tally.last_at)
        self.incidents.append(outage)
        text = f"the coordinator (process {pid}), SIGKILL, after step {self.tally.step:,}"
        self._say("KILLED", text, "bold red", at=at)
        return outage

    def restarted(self, outage: Outage, pid: int) -> None:
        """The coordinator serves again."""
        outage.back_at = time.time()
        took = duration(outage.back_at - outage.killed_at)
        text = f"it serves again {took} after the kill, process {pid}"
        self._say("restarted", text, "yellow", at=outage.back_at)


@dataclass(slots=True)
class WorkerLoss:
    """A worker that was killed. Times are seconds since 1970, 0 before it has happened."""

    worker: str
    pid: int
    rank: int | None
    """Nothing when it had none yet."""
    killed_at: float
    detected_at: float = 0.0
    """When the coordinator took it for dead."""
    replacement: str = ""
    started_at: float = 0.0
    joined_at: float = 0.0
    generation: int = 0
    """The membership with the replacement."""
    resumed_at: float = 0.0
    """When the first step was done again by all of them."""
    resumed_from: int = 0
    """The step of the checkpoint that it went on from."""
    repeated: int = 0
    """Steps after that checkpoint that had been done, and were done again."""

    @property
    def is_over(self) -> bool:
        """Whether everybody trains again."""
        return self.resumed_at > 0

    def facts(self) -> dict[str, str]:
        """What happened, in words."""
        killed = f"{self.worker}, rank {self.rank}, process {self.pid}"
        if not self.is_over:
            return {"killed": f"{killed}; nobody had to train after that"}
        detected = f"{duration(self.detected_at - self.killed_at)} after the kill"
        took = duration(self.joined_at - self.started_at)
        return {
            "killed": killed,
            "detected": detected if self.detected_at else "before it was a member",
            "replaced": f"by {self.replacement}, {took} from its start to rank {self.rank}",
            "rolled back": f"to the checkpoint of step {self.resumed_from:,}; "
            f"{count(self.repeated, 'step')} done again",
            "recovered": f"{duration(self.resumed_at - self.killed_at)} from the kill to the next "
            "step that all did",
        }


@dataclass(slots=True)
class Outage:
    """A coordinator that was killed. Times are seconds since 1970, 0 before it has happened."""

    pid: int
    killed_at: float
    last_step_at: float
    """When the last step was done before it was missed."""
    back_at: float = 0.0
    resumed_at: float = 0.0
    is_rolled_back: bool = False
    """Whether training went on from a checkpoint, since workers were taken for dead."""

    @property
    def is_over(self) -> bool:
        """Whether everybody trains again."""
        return self.resumed_at > 0

    def facts(self) -> dict[str, str]:
        """What happened, in words."""
        killed = f"the coordinator, process {self.pid}"
        if not self.is_over:
            return {"killed": f"{killed}; nobody had to train after that"}
        return {
            "killed": killed,
            "restarted": f"serving again {duration(self.back_at - self.killed_at)} after the kill",
            "carried on": f"{duration(self.resumed_at - self.last_step_at)} passed between two "
            f"steps, {'some were' if self.is_rolled_back else 'none was'} done again",
        }


Incident = WorkerLoss | Outage
