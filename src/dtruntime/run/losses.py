"""Telling the loss of another worker from other errors, and whether the run can go on after it."""

from __future__ import annotations

import sys
import time

from ..client import TrainingOrchestrator
from ..errors import ConnectionError, SyncError
from ..telemetry import EventLog
from ..types import WorkerState
from .crew import Crew
from .formation import Formation
from .recovery import Recovery

log = EventLog("run")

LOOK_SECONDS = 0.1
BRIEF = 240


def brief(error: BaseException) -> str:
    """An error in a log: libraries add pages of advice to what went wrong."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= BRIEF else text[:BRIEF] + '...'}"


class LossDetector:
    """What this worker is told about those that were lost."""

    def __init__(
        self, worker: TrainingOrchestrator | None, recovery: Recovery, *, makes_group: bool
    ) -> None:
        """``makes_group``: the run makes torch's process group, and can make it anew."""
        self._worker = worker
        self._recovery = recovery
        self._makes_group = makes_group

    def explain(self, error: Exception, step: int, crew: Crew, formation: Formation) -> bool:
        """Whether a worker was lost, so that an error is its consequence; waits to be told."""
        worker = self._worker
        if worker is None or self._has_foreign_group():
            return False
        if crew.size == 1 and worker.is_registered:
            return False
        seconds = self._recovery.detects_within(worker.heartbeat_timeout_seconds)
        wait = f"up to {seconds:g} s, in case a worker was lost"
        log.warning("run.step_failed", step=step, error=brief(error), waits=wait)
        worker.report(state=WorkerState.RECOVERING)
        deadline = time.monotonic() + seconds
        while not formation.has_lost(crew):
            if time.monotonic() > deadline:
                return False
            time.sleep(LOOK_SECONDS)
            try:
                worker.beat()
            except (SyncError, ConnectionError) as exc:
                log.info("run.not_told", reason=str(exc))
        return True

    def count(self) -> int:
        """How many workers were lost lately; one that was lost itself is not told."""
        if self._worker is None:
            return 0
        try:
            return self._worker.recent_losses(self._recovery.window_seconds)
        except SyncError as exc:
            log.warning("run.lost_itself", reason=str(exc))
            return 0

    def check_group(self) -> None:
        """Raise when only a restart of all processes can help."""
        worker = self._worker
        if worker is not None and self._has_foreign_group():
            raise SyncError(
                "a worker was lost, left or came, and only a restart of all workers can mend a "
                "process group that the run did not make: this process ends, so that its launcher "
                "restarts all of them; the run then resumes from its last checkpoint",
                reason="membership_changed",
                generation=worker.generation,
            )

    def _has_foreign_group(self) -> bool:
        """Whether the process has a process group of torch that is not the run's."""
        if self._makes_group or "torch.distributed" not in sys.modules:
            return False
        from .pytorch.process_group import is_initialized

        return is_initialized()
