"""The training loop of an open run: steps, saves, operators' requests, and regrouping."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from .._sync_bridge import io
from ..checkpoint.save.handle import SaveHandle
from ..client import TrainingOrchestrator
from ..errors import (
    CheckpointAbortedError,
    CheckpointDamagedError,
    ConnectionError,
    StrataError,
    SyncError,
)
from ..telemetry import EventLog
from ..types import Action, WorkerState
from .components import RunComponents, RunOptions, open_run
from .crew import Crew
from .preemption import Interrupts, PreemptionNotices
from .recovery import Failures
from .step_agreement import StepGate
from .tracked_state import Tracked

log = EventLog("run")

POLL_SECONDS = 0.1
BRIEF = 240
SMOOTHING = 0.2
"""The weight of the newest step in the mean step time."""


class Regroup(Exception):
    """The crew has to come together again."""

    def __init__(self, reason: str, *, is_failure: bool = True) -> None:
        """Without a failure nobody was lost: all have agreed on it, and everything is saved."""
        super().__init__(reason)
        self.is_failure = is_failure


class TrainingLoop:
    """The state of a run, and what it does between two batches."""

    def __init__(
        self,
        options: RunOptions,
        tracked: Tracked,
        worker: TrainingOrchestrator | None,
        notices: PreemptionNotices,
    ) -> None:
        self._options = options
        self._tracked = tracked
        self._worker = worker
        self._notices = notices
        self._gate = StepGate()
        self._failures = Failures(options.recovery)
        self._parts: RunComponents | None = None
        self._crew: Crew | None = None
        self.broken: Exception | None = None
        """The error by which another worker's loss has ended the current step."""
        self._in_step = False
        self._steps: int | None = None
        """The number of steps in all, if that is known."""
        self.timer = StepTimer(worker)
        self.metrics: dict[str, float] = {}
        """What the program reports."""
        self.samples = 0
        """The number of samples in the current batch."""
        self.guarded = False
        """Whether a guarded block has done the work on the current batch."""
        self.ending = ""
        self.is_unsaved = False
        """Whether it leaves without what was done since the last checkpoint."""
        notices.progress = self._progress

    @property
    def step(self) -> int:
        """The number of steps done."""
        return self._gate.step

    @property
    def is_open(self) -> bool:
        """Whether the run has been opened."""
        return self._parts is not None

    @property
    def parts(self) -> RunComponents:
        """The components of the run, which is open."""
        if self._parts is None:
            raise StrataError("the run is not open: use it in a 'with' statement")
        return self._parts

    @property
    def crew(self) -> Crew:
        """The crew of the run, which is open."""
        if self._crew is None:
            raise StrataError("the run is not open: use it in a 'with' statement")
        return self._crew

    # Forming crews

    def open(self) -> None:
        """Open everything, and form the first crew."""
        self._parts = open_run(
            self._options,
            self._tracked,
            self._worker,
            self._gate,
            self._failures,
            self._notices,
            self.timer.waiting,
        )
        self._begin()

    def _begin(self) -> None:
        parts = self.parts
        finished = parts.saves.finished()
        if finished is None or not self._options.is_reached_by(finished):
            self._assemble()
            return
        # There is nothing left to do, and nobody to wait for.
        self._crew = Crew((0,), 0, 0)
        parts.stream.open(self._crew)
        try:
            parts.saves.restore(self._crew, finished)
        except CheckpointDamagedError as exc:
            log.error("run.checkpoint_damaged", checkpoint=finished.checkpoint_id, reason=str(exc))
            self._assemble()
            return
        self._gate.reset(finished.step)
        self._end_finished()

    def _assemble(self) -> None:
        parts = self.parts
        self._crew = crew = parts.formation.assemble()
        self._gate.reset(parts.saves.last_step)
        self.broken = None
        if parts.agreements is not None:
            parts.agreements.begin(crew)
        log.info("run.training", step=self.step, workers=crew.size, place=crew.index)

    def regroup(self, reason: str, *, is_failure: bool = True) -> None:
        """Form a crew again, and go back to the last checkpoint."""
        log.warning("run.regrouping", step=self.step, reason=reason)
        parts, worker = self.parts, self._worker
        assert worker is not None
        assert parts.agreements is not None
        parts.agreements.end()
        parts.formation.break_up()
        worker.report(state=WorkerState.RECOVERING)
        if is_failure:
            time.sleep(self._failures.count(reason))
        # Before it looks at checkpoints: the others may finish and leave while it waits for a rank.
        self._notices.wait(io.submit(worker.rejoin_async()))
        self._begin()

    def explains(self, error: Exception) -> bool:
        """Whether an error comes from the loss of another worker; waits for word of it."""
        worker, crew, recovery = self._worker, self.crew, self._options.recovery
        if worker is None or self._has_foreign_group():
            return False
        if crew.size == 1 and worker.is_registered:
            return False
        seconds = recovery.detects_within(worker.heartbeat_timeout_seconds)
        wait = f"up to {seconds:g} s, in case a worker was lost"
        log.warning("run.step_failed", step=self.step, error=brief(error), waits=wait)
        worker.report(state=WorkerState.RECOVERING)
        deadline = time.monotonic() + seconds
        while not self.parts.formation.has_lost(crew):
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
            try:
                worker.beat()
            except (SyncError, ConnectionError) as exc:
                log.info("run.not_told", reason=str(exc))
        return True

    def _changed(self, *, is_failure: bool = True) -> Regroup:
        self._check_group()
        assert self._worker is not None
        reason = f"the membership changed (generation {self._worker.generation})"
        return Regroup(reason, is_failure=is_failure)

    def _check_group(self) -> None:
        """Raise if only a restart of all processes can help."""
        if self._worker is not None and self._has_foreign_group():
            raise SyncError(
                "a worker was lost, left or came, and only a restart of all workers can replace a "
                "process group that the run did not make: this process ends, so that its launcher "
                "restarts all of them; the run then resumes from its last checkpoint",
                reason="membership_changed",
                generation=self._worker.generation,
            )

    def _has_foreign_group(self) -> bool:
        """Whether the process has a process group of torch that the run did not make."""
        if self._options.process_group is not None or "torch.distributed" not in sys.modules:
            return False
        from .pytorch.process_group import is_initialized

        return is_initialized()

    # Steps

    def steps(self) -> Iterator[Any]:
        """Yield batches, and do after each what is due, until the run ends or is over."""
        stream, gradients = self.parts.stream, self.parts.gradients
        with self._notices.during(Interrupts.WHEN_LATE):
            while stream.epoch < self._options.epochs and not self._options.is_over(self.step):
                self._steps = stream.steps_in(self._options.epochs, self.step)
                for batch, self.samples in stream.batches():
                    self.timer.begin()
                    self._in_step, self.guarded = True, False
                    if gradients is not None:
                        gradients.begin_step(self.step + 1, self.samples)
                    with self._notices.during(Interrupts.NEVER):
                        yield batch
                    self._in_step = False
                    self._after_step()
                    if self.ending or self._options.is_over(self.step):
                        return

    def _after_step(self) -> None:
        if self.broken is not None:
            raise Regroup(brief(self.broken))
        parts = self.parts
        if parts.gradients is not None:
            parts.gradients.end_step()
        parts.stream.used()
        due = self._gate.pass_step(self._notices.check)
        self._report()
        if due:
            self._obey(due)
        elif not self._is_last() and self._is_time_to_save():
            self._save()
        parts.saves.check()
        if not self.ending and parts.formation.has_lost(self.crew):
            raise self._changed()
        if not self.ending and self._notices.look():
            self._leave_if_due()

    def _report(self) -> None:
        self.timer.end()
        if self._worker is not None:
            self._worker.report(
                step=self.step,
                epoch=self.parts.stream.epoch,
                state=WorkerState.TRAINING,
                step_seconds=self.timer.step_seconds,
                samples_used=self.samples,
                **{**self._options.length(self._steps), **self.metrics},
            )

    def average_gradients(self, parameters: Iterable[Any]) -> None:
        """Average the gradients of parameters over the crew, unless that has been done."""
        crew, gradients = self.crew, self.parts.gradients
        if gradients is None:  # torch was imported after the run had been entered
            from .pytorch.gradients import Gradients

            gradients = Gradients(self._tracked, automatic=False, independent=True)
            gradients.begin(crew)
            gradients.begin_step(self.step + 1, self.samples)
        gradients.average(parameters)

    # Saves and requests

    def _is_last(self) -> bool:
        """Whether this step is known to be the last, which `finish` saves."""
        return self._options.is_over(self.step) or self.step == self._steps

    def _is_time_to_save(self) -> bool:
        if self.parts.manager.should_save(self.step):
            return True
        seconds, saves = self._options.save_seconds, self.parts.saves
        if seconds is None or not self.crew.leads or time.monotonic() - saves.last_time < seconds:
            return False
        if self._worker is None:
            return True
        # All ranks have to save after the same step, so this is agreed on like other requests.
        saves.last_time = time.monotonic()
        self._worker.request_action("checkpoint", reason=f"every {seconds:g} s")
        return False

    def _save(self, **options: Any) -> SaveHandle:
        return self.parts.saves.save(self.crew, self.step, metrics=self.metrics, **options)

    def _commit(self, **options: Any) -> None:
        """Save, and wait until it is committed."""
        try:
            self.parts.saves.wait(self._save(**options), self._notices.check)
        except CheckpointAbortedError as exc:
            self._check_group()
            raise Regroup(str(exc)) from exc

    def _obey(self, actions: list[Action]) -> None:
        """Save, then do what was requested; all ranks do so after the same step."""
        worker = self._worker
        assert worker is not None
        worker.report(state=WorkerState.CHECKPOINTING)
        self._commit(is_full=self._has_time_for_full())
        for action in actions:
            self._gate.done(action)
            if self.crew.leads:
                self._complete(worker, action)
        if any(action.kind == "stop" for action in actions):
            self.ending = "stopped"
        leaving = {action.worker_id for action in actions if action.kind == "drain"}
        has_notice = self._notices.look()
        if worker.worker_id in leaving or (leaving and has_notice):
            # With a notice of its own it need not wait for its turn: everything is saved.
            self.ending = "preempted" if has_notice else "drained"
        elif leaving and not self.ending:
            self._check_group()
            raise Regroup(f"{', '.join(sorted(leaving))} left", is_failure=False)
        elif not self.ending and self._gate.lets_in:
            raise self._changed(is_failure=False)

    def _complete(self, worker: TrainingOrchestrator, action: Action) -> None:
        try:
            worker.complete_action(action.action_id, f"saved step {self.step}")
        except StrataError as exc:
            log.warning("run.action_not_completed", action=action.kind, reason=str(exc))

    def _has_time_for_full(self) -> bool:
        """Whether a full checkpoint fits into what is left of the grace period."""
        if not self._notices.look():
            return True
        seconds = self.parts.manager.estimate_seconds()
        return seconds is None or seconds < self._options.grace_seconds - self._notices.seconds

    # Ending

    def _leave_if_due(self) -> None:
        """After a notice: save alone, or leave unsaved if the others take too long."""
        if self._worker is None:
            self._commit(is_full=self._has_time_for_full())
            self.ending = "preempted"
        else:
            self._notices.check()

    def leave_unsaved(self) -> None:
        """There is no time left to save, or nothing to save with the others."""
        self.ending = "preempted"
        self.is_unsaved = True
        log.error("run.leaves_unsaved", **self._progress())

    def _progress(self) -> dict[str, object]:
        if self._parts is None:
            return {}
        return {"step": self.step, "last_saved": self._parts.saves.committed_step}

    def give_up_saves(self) -> None:
        """Do not wait for other workers with saves under way."""
        if self._parts is not None:
            self._parts.saves.give_up()

    def finish(self) -> None:
        """Everything is done: save the end."""
        self._commit(is_full=False, finished=True)
        self._end_finished()
        log.info("run.finished", step=self.step, epoch=self.parts.stream.epoch)

    def _end_finished(self) -> None:
        self.ending = "finished"
        if self._worker is not None:
            # The next epoch: all before it are complete.
            self._worker.report(epoch=self.parts.stream.epoch, state=WorkerState.FINISHED)

    def explain(self, error: BaseException) -> None:
        """Add to an error in the work on a batch what may be behind it."""
        note = "" if self._parts is None else self._parts.stream.explain(error)
        if note:
            error.add_note(note)

    def save_unfinished(self) -> None:
        """Save after the loop was left early, if it is clear what was done with its last batch."""
        parts = self.parts
        if self._in_step and self.guarded:
            if parts.gradients is not None:
                parts.gradients.end_step()
            parts.stream.used()
            self._gate.pass_step()
        elif self._in_step:
            last = parts.saves.last_step
            log.warning("run.left_in_a_step", step=self.step + 1, resumes_after=last)
            return
        if self.step > parts.saves.last_step:
            parts.saves.wait(self._save(), self._notices.check)

    def close(self, *, give_up: bool) -> None:
        """Close everything; with ``give_up``, do not wait for what needs other workers."""
        if self._parts is not None:
            self._parts.close(give_up=give_up)


def brief(error: BaseException) -> str:
    """An error for the log: libraries add pages of advice to what went wrong."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= BRIEF else text[:BRIEF] + '...'}"


class StepTimer:
    """The mean time of a step, without the time spent waiting for other workers."""

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
        self.step_seconds = mean + SMOOTHING * (seconds - mean) if mean else seconds

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Leave out the time of a block."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._waited += time.perf_counter() - began

    def _now(self) -> float:
        """A clock that stands still while this worker waits for others."""
        waited = 0.0 if self._worker is None else self._worker.waited_seconds
        return time.perf_counter() - self._waited - waited
