"""How long a worker's own steps take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from ..client import TrainingOrchestrator

SMOOTH = 0.2
"""Weight of the newest step in the mean."""


class StepTimer:
    """The mean time of steps, without what is spent waiting for other workers."""

    def __init__(self, worker: TrainingOrchestrator | None) -> None:
        self._worker = worker
        self._waited = 0.0
        self._began = 0.0
        self.step_seconds = 0.0

    def begin(self) -> None:
        """A step begins."""
        self._began = self._now()

    def end(self) -> None:
        """A step has ended."""
        # Waits in the background, for an agreement, may overlap with the step's own.
        seconds, mean = max(0.0, self._now() - self._began), self.step_seconds
        self.step_seconds = mean + SMOOTH * (seconds - mean) if mean else seconds

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Leave out the time of a block."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._waited += time.perf_counter() - began

    def _now(self) -> float:
        """A clock that stands still while others are waited for."""
        waited = 0.0 if self._worker is None else self._worker.waited_seconds
        return time.perf_counter() - self._waited - waited
