"""How far a demonstration is, as its coordinator sees it."""

from __future__ import annotations

from dataclasses import dataclass

from ..client import Observer
from ..display import size
from ..types import CheckpointInfo, WorkerStatus
from .plan import JOB


@dataclass(frozen=True, slots=True)
class Happening:
    """One line about something that happened."""

    elapsed: float
    topic: str
    text: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class MethodUse:
    """How often the coordinator was asked something, and how long its answers took."""

    method: str
    calls: int = 0
    errors: int = 0
    p50: float = 0.0
    p99: float = 0.0


@dataclass(frozen=True, slots=True)
class Progress:
    """The run at one moment."""

    workers: tuple[WorkerStatus, ...] = ()
    checkpoint_count: int = 0
    latest_checkpoint: CheckpointInfo | None = None
    methods: tuple[MethodUse, ...] = ()

    @property
    def barrier(self) -> MethodUse:
        """What the barriers did."""
        waits = (use for use in self.methods if use.method == "WaitBarrier")
        return next(waits, MethodUse("WaitBarrier"))

    @property
    def accuracy(self) -> float | None:
        """Of the latest checkpoint, on pictures held out from training."""
        latest = self.latest_checkpoint
        return float(latest.metadata["accuracy"]) if latest else None

    @property
    def step(self) -> int:
        """The step that every worker has reached."""
        return min((worker.step or 0 for worker in self.workers), default=0)

    def worker(self, rank: int) -> WorkerStatus | None:
        """A worker that has registered."""
        return next((w for w in self.workers if w.rank == rank and w.incarnation), None)


class Watch:
    """Reads a coordinator again and again; ``began`` is the time (since 1970) of second 0."""

    def __init__(self, observer: Observer, began: float) -> None:
        self._observer = observer
        self._began = began
        self._last_event = 0

    def look(self) -> tuple[Progress, list[Happening]]:
        """How far the run is, and what the journal has gained since the last look."""
        # Events first: the checkpoint that one tells of is then known to the status, too.
        events = self._observer.events(after_id=self._last_event)
        progress = self._progress()
        if events:
            self._last_event = events[-1].id
        return progress, [
            _tell(event.at - self._began, event.kind, dict(event.fields), progress)
            for event in events
        ]

    def _progress(self) -> Progress:
        methods = tuple(
            MethodUse(m.method, m.calls, m.errors, m.p50_seconds, m.p99_seconds)
            for m in self._observer.server_info().methods
            if m.calls
        )
        if JOB not in self._observer.jobs():
            return Progress(methods=methods)
        status = self._observer.status(JOB)
        return Progress(status.workers, status.checkpoint_count, status.latest_checkpoint, methods)


def _tell(elapsed: float, kind: str, fields: dict[str, str], progress: Progress) -> Happening:
    """A journal entry in words."""
    match kind, fields:
        case "worker.registered", {"worker": worker, "rank": rank, "generation": generation}:
            return Happening(elapsed, "joined", f"{worker} as rank {rank}, generation {generation}")
        case "worker.left", {"worker": worker, "reason": reason}:
            return Happening(elapsed, "left", f"{worker}{f': {reason}' if reason else ''}", "dim")
        case "worker.dead", {"worker": worker, "reason": reason}:
            return Happening(elapsed, "dead", f"{worker}: {reason}", "red")
        case "dataset.registered", {"dataset": dataset, "samples": samples, "shards": shards}:
            text = f"{dataset}: {int(samples):,} samples in {int(shards):,} shards"
            return Happening(elapsed, "dataset", text)
        case "epoch.completed", {"epoch": epoch}:
            return Happening(elapsed, "epoch", f"{int(epoch) + 1} completed by all workers")
        case "checkpoint.committed", {"step": step, "bytes": bytes_}:
            text = f"step {int(step):,} committed, {size(int(bytes_))}"
            latest = progress.latest_checkpoint
            if latest is not None and latest.step == int(step):
                text += f", accuracy {progress.accuracy:.1%}"
            return Happening(elapsed, "checkpoint", text, "green")
    details = ", ".join(f"{name} {value}" for name, value in fields.items())
    return Happening(elapsed, kind, details, "yellow")
