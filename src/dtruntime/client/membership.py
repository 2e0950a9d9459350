"""What a member is, and what it says of itself."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
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


@dataclass(frozen=True, slots=True)
class Report:
    """What the next heartbeat says."""

    state: WorkerState = WorkerState.IDLE
    step: int | None = None
    epoch: int = 0
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


def _seconds(value: float) -> float:
    seconds = float(value)
    if not 0 <= seconds < math.inf:
        raise ValueError(f"step_seconds must be a time in seconds, not {value}")
    return seconds


def heartbeat_delays(interval: float) -> Iterator[float]:
    """Delays between attempts to reach a coordinator that is away, up to the interval."""
    return Backoff(first=0.1, longest=max(0.1, interval)).delays()
