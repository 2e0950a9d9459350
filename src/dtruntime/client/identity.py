"""What a member is, and what it says of itself."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from ..retry import Backoff
from ..types import WorkerState, check_whole

METRICS_LIMIT = 64
METRIC_NAME_LENGTH = 128
"""With these a heartbeat stays within the size that the coordinator accepts."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What registration gave this worker; every call carries it."""

    job: str
    worker_id: str
    rank: int
    incarnation: int
    world_size: int
    heartbeat_interval: float
    heartbeat_timeout: float
    """After so many seconds of silence a member is declared dead."""


@dataclass(frozen=True, slots=True)
class Report:
    """What the program says, for the next heartbeat."""

    state: WorkerState | None = None
    """None: what it does is known by its calls alone."""
    step: int | None = None
    epoch: int | None = None
    metrics: tuple[tuple[str, float], ...] = ()
    step_seconds: float = 0.0
    """0: not reported."""
    samples: int = 0
    """How many were used in all; 0: not reported."""

    def updated(
        self,
        step: int | None,
        epoch: int | None,
        state: WorkerState | str | None,
        metrics: Mapping[str, float],
        step_seconds: float | None = None,
        samples: int = 0,
    ) -> Report:
        """A report with what is given replaced, ``samples`` added; metrics not given stay."""
        values = {**dict(self.metrics), **{name: float(x) for name, x in metrics.items()}}
        if len(values) > METRICS_LIMIT or any(len(name) > METRIC_NAME_LENGTH for name in values):
            raise ValueError(
                f"a worker reports at most {METRICS_LIMIT} metrics, with names of at most "
                f"{METRIC_NAME_LENGTH} characters; these would be {len(values)}"
            )
        for name in metrics:
            if any("\ud800" <= letter <= "\udfff" for letter in name):
                raise ValueError(f"the name of a metric must be text, not {name!r}")
        return Report(
            self.state if state is None else WorkerState(state),
            self.step if step is None else check_whole("step", step),
            self.epoch if epoch is None else check_whole("epoch", epoch),
            tuple(values.items()),
            self.step_seconds if step_seconds is None else _seconds(step_seconds),
            self.samples + check_whole("samples", samples),
        )


class Activity:
    """What a program does, as far as its calls show it; heartbeats carry it.

    A call that keeps the program is what it does: waiting for others, saving, loading. Between
    such calls it trains, once it has reported a step or got a batch, until the batches end.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: Counter[WorkerState] = Counter()
        self._trains = False
        self.epoch: int | None = None
        """The highest that a loader has come to."""
        self.samples = 0
        """How many loaders have handed out."""

    @contextmanager
    def doing(self, state: WorkerState) -> Iterator[None]:
        """The program is kept by a block that does this."""
        with self._lock:
            self._under_way[state] += 1
        try:
            yield
        finally:
            with self._lock:
                self._under_way[state] -= 1

    def state(self, said: WorkerState | None) -> WorkerState:
        """What the program does, where it says ``said`` of itself."""
        for kept in (WorkerState.WAITING, WorkerState.CHECKPOINTING, WorkerState.LOADING):
            if self.under_way(kept):
                return kept
        return said or (WorkerState.TRAINING if self._trains else WorkerState.IDLE)

    def under_way(self, state: WorkerState) -> int:
        """How many calls do this at the moment."""
        return self._under_way[state]

    def trains(self) -> None:
        """The program has something to train on, or says that it does."""
        self._trains = True

    # What a loader tells

    def fetching(self) -> AbstractContextManager[None]:
        """A block in which a batch is waited for."""
        return self.doing(WorkerState.LOADING)

    def handed_out(self, epoch: int, samples: int) -> None:
        """The program got a batch of an epoch."""
        self._trains = True
        with self._lock:
            self.samples += samples
            self._reached(epoch)

    def ended(self, epoch: int) -> None:
        """There are no more batches of an epoch."""
        self._trains = False
        with self._lock:
            self._reached(epoch + 1)

    def _reached(self, epoch: int) -> None:
        self.epoch = epoch if self.epoch is None else max(self.epoch, epoch)


def _seconds(value: float) -> float:
    seconds = float(value)
    if not 0 <= seconds < math.inf:
        raise ValueError(f"step_seconds must be a time in seconds, not {value}")
    return seconds


def heartbeat_delays(interval: float) -> Iterator[float]:
    """Delays between attempts to reach a coordinator that is away, up to the interval."""
    return Backoff(first=0.1, longest=max(0.1, interval)).delays()
