"""A worker's session in a training loop of another library."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from ..client import TrainingOrchestrator, WorkerConfig
from ..errors import StrataError
from ..run.components import REPORTED, worker_of
from ..run.crew import Crew
from ..run.preemption import PreemptionNotices
from ..run.step_agreement import PreemptionWatch, StepAgreements, StepGate
from ..telemetry import EventLog
from ..types import Action, WorkerState

log = EventLog("run")

SAVED_MS = 600_000
"""How long ranks wait for each other's files."""


@dataclass(frozen=True, slots=True)
class StepRequest:
    """What all ranks have to do after the same step."""

    save: bool = False
    stop: bool = False


class WorkerSession:
    """Reports a worker's progress, and passes on operators' requests and preemption notices.

    The launcher restarts all ranks together, so when one has to go, all of them save and end.
    """

    def __init__(
        self,
        coordinator_url: str | None = None,
        job: str | None = None,
        *,
        preemption_file: str | os.PathLike[str] | None = None,
        handle_signals: bool = True,
    ) -> None:
        self._given = WorkerConfig(coordinator_url=coordinator_url, job=job)
        self.worker: TrainingOrchestrator | None = None
        self._notices = PreemptionNotices(preemption_file, signals=handle_signals)
        self._gate = StepGate()
        self._agreements: StepAgreements | None = None
        self._watch: PreemptionWatch | None = None
        self._pending: list[Action] = []
        self._step_began = 0.0
        self._stopping = False
        self.is_first = True
        """Whether this worker does what only one has to do."""

    def begin(self, step: int) -> None:
        """Register; training continues after ``step``.

        The environment is read only here: trainers with a launcher of their own set it late.
        """
        self._gate.reset(step)
        worker = self.worker = worker_of(self._given.coordinator_url, self._given.job, None, None)
        self._notices.install()
        if worker is None:
            return
        worker.register()
        size = worker.config.world_size or 1
        crew = Crew(tuple(range(size)), worker.rank, worker.generation)
        self.is_first = crew.leads
        self._agreements = StepAgreements(worker, self._gate)
        self._agreements.begin(crew)
        self._watch = PreemptionWatch(
            worker, lambda: self._notices.reason if self._notices.look() else ""
        )
        self._step_began = time.perf_counter()

    def after_step(self, step: int, epoch: int, metrics: dict[str, float]) -> StepRequest:
        """Report a step; does not wait for other ranks."""
        due = self._gate.pass_step()
        worker = self.worker
        if worker is None:
            if self._stopping or not self._notices.look():
                return StepRequest()
            self._stopping = True
            log.warning("run.notice", reason=self._notices.reason)
            return StepRequest(save=True, stop=True)
        now = time.perf_counter()
        took, self._step_began = now - self._step_began, now
        reported = {name: value for name, value in metrics.items() if name not in REPORTED}
        worker.report(step, epoch, WorkerState.TRAINING, step_seconds=took, **reported)
        self._pending += due
        return StepRequest(bool(due), any(action.kind in {"stop", "drain"} for action in due))

    def gather(self, step: int) -> None:
        """Wait until all ranks have written their files; ``SyncError`` when one is lost."""
        worker = self.worker
        if worker is not None and (worker.config.world_size or 1) > 1:
            worker.barrier(f"written:{step}", timeout_ms=SAVED_MS)

    def saved(self, step: int) -> None:
        """Complete the requests that this save answers."""
        done, self._pending = self._pending, []
        for action in done:
            self._gate.done(action)
            if self.worker is None or not self.is_first:
                continue
            try:
                self.worker.complete_action(action.action_id, f"saved step {step}")
            except StrataError as exc:
                log.warning("run.action_not_completed", action=action.kind, reason=str(exc))

    def end(self, reason: str = "") -> None:
        """Leave the job."""
        self._notices.remove()
        if self._watch is not None:
            self._watch.close()
        if self._agreements is not None:
            self._agreements.end()
        if self.worker is not None:
            if not reason:
                self.worker.report(state=WorkerState.FINISHED)
            with self.worker.goodbye_may_fail():
                self.worker.deregister(reason)
