"""`Run`: a training loop that survives, in a few lines."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, Self

from ..checkpoint import CheckpointManager
from ..client import DatasetRegistry, TrainingOrchestrator
from ..errors import CheckpointAbortedError, ConnectionError, StrataError, SyncError
from ..telemetry import EventLog
from ..types import Action, CheckpointInfo, EpochCoverage, WorkerState, check_whole
from .batches import DataOptions
from .crew import Crew, Leaving
from .gate import Gate
from .notices import Notices
from .opening import Opened, open_run, worker_of
from .pace import Pace
from .recovery import Failures, Recovery
from .tracking import Tracked

log = EventLog("run")

LOOK_SECONDS = 0.1
_REPORTED = frozenset({"step", "epoch", "state", "step_seconds"})
PREEMPTED = 143
"""The exit status of a process that SIGTERM has ended."""


class _Regroup(Exception):
    """The crew has to come together again."""


class Run:
    """A training run that resumes, saves, recovers and ends by itself.

    ::

        with Run("checkpoints", data="data/train", batch_size=256, epochs=3,
                 track={"model": model, "optimizer": optimizer}) as run:
            for batch in run:
                with run.guard():
                    loss = train_step(model, optimizer, batch)
                    run.report(loss=loss)

    Iterating gives batches from where the newest checkpoint left off up to the last epoch. With a
    coordinator (``coordinator_url`` or ``COORDINATOR_URL``) all workers of the job form a crew:
    they save together, and when one is lost the others wait for a replacement or go on without
    it, everybody from the last checkpoint. Without one, a single process resumes and saves.
    """

    def __init__(
        self,
        checkpoints: str | os.PathLike[str],
        data: Any = None,
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        epochs: int = 1,
        max_steps: int | None = None,
        track: Mapping[str, Any] | None = None,
        state: Mapping[str, Any] | None = None,
        seed: int = 0,
        save_steps: int | None = None,
        save_seconds: float | None = None,
        keep_count: int | None = None,
        coordinator_url: str | None = None,
        job: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        worker_id: str | None = None,
        recovery: Recovery | None = None,
        process_group: str | None = None,
        collective_seconds: float = 60.0,
        dataset: str = "train",
        format: str | None = None,
        loader: Mapping[str, Any] | None = None,
        checkpoint: Mapping[str, Any] | None = None,
        preemption_file: str | os.PathLike[str] | None = None,
        grace_seconds: float = 25.0,
        handle_signals: bool = True,
    ) -> None:
        """Nothing is opened before the run is entered.

        - ``checkpoints``: a folder or a URL.
        - ``data``: files (a path, glob or URL, read as ``format``; with a coordinator they are
          registered as ``dataset``), a number of samples, a source for `Loader`, or anything that
          can be iterated once per epoch. Without data, batches are the numbers of the steps.
        - ``track``: objects with a ``state_dict``. ``state``: values, replaced in `Run.state`.
        - ``save_steps``, ``save_seconds``: how often to save (by default as ``[checkpoint]
          interval_steps`` says). ``checkpoint`` has more options of `CheckpointManager`,
          ``loader`` of `Loader`.
        - ``process_group``: a backend of torch (``gloo``, ``nccl``): the run makes the default
          process group, and makes it anew when the crew changes. Leave it out when a launcher
          restarts all workers together, as torchrun does; then make the group yourself.
        - ``grace_seconds``: how long there is after SIGTERM, or after ``preemption_file``
          (``STRATA_PREEMPTION_FILE``) has appeared, to save and leave.
        """
        self.epochs = check_whole("epochs", epochs, 1)
        self.max_steps = None if max_steps is None else check_whole("max_steps", max_steps)
        if data is None and self.max_steps is None:
            raise ValueError("a run without data has no end: give max_steps")
        self.recovery = recovery or Recovery()
        self._seed = check_whole("seed", seed)
        self._tracked = Tracked(track or {}, state)
        self._checkpoints = checkpoints
        self._checkpoint_options = {
            "keep_count": keep_count,
            "interval_steps": save_steps,
            **(checkpoint or {}),
        }
        self._save_seconds = save_seconds
        self._orchestrator = worker_of(coordinator_url, job, rank, world_size, worker_id)
        sizes = {"batch_size": batch_size, "global_batch_size": global_batch_size}
        given = {name: size for name, size in sizes.items() if size is not None}
        options = {"seed": self._seed, **given, **(loader or {})}
        self._data = DataOptions(data, format, dataset, options)
        self._group = process_group, collective_seconds
        self._notices = Notices(preemption_file, signals=handle_signals)
        self._grace = grace_seconds
        self._failures = Failures(self.recovery)
        self._gate = Gate()
        self._metrics: dict[str, float] = {}
        self._crew: Crew | None = None
        self._parts: Opened | None = None
        self._broken: BaseException | None = None
        self._pace = Pace(self._orchestrator)
        self._samples = 0
        self._length = {} if data is None else {"epochs": float(self.epochs)}
        """Tells how much there is to do; without data, nobody knows it in samples."""
        self._in_step = self._guarded = False
        self._welcomed = 0
        """The generation with newcomers that were noticed last."""
        self._ending = ""

    # What is known

    @property
    def state(self) -> dict[str, Any]:
        """The values that are saved and restored; put new ones here."""
        return self._tracked.values

    @property
    def step(self) -> int:
        """How many steps are done."""
        return self._gate.step

    @property
    def epoch(self) -> int:
        """The epoch that is read."""
        return self._open.stream.epoch

    @property
    def crew(self) -> Crew:
        """Those who train together now."""
        if self._crew is None:
            raise StrataError("the run is not open: use it in a 'with' statement")
        return self._crew

    @property
    def rank(self) -> int:
        """This worker's place in the crew, from 0."""
        return self.crew.index

    @property
    def world_size(self) -> int:
        """How many workers train together."""
        return self.crew.size

    @property
    def ending(self) -> str:
        """Why the loop ended: ``finished``, ``stopped``, ``drained``, ``preempted``; or nothing."""
        return self._ending

    @property
    def checkpoints(self) -> CheckpointManager:
        """The run's checkpoints."""
        return self._open.manager

    @property
    def orchestrator(self) -> TrainingOrchestrator | None:
        """This worker's membership; ``None`` without a coordinator."""
        return self._orchestrator

    def coverage(self) -> list[EpochCoverage]:
        """Which samples of each epoch were consumed, as far as the coordinator was told."""
        worker = self._orchestrator
        if worker is None:
            raise StrataError("coverage is kept by a coordinator: this run has none")
        registry = DatasetRegistry(worker.config.coordinator_url, job=worker.job)
        return registry.coverage(self._data.dataset)

    # Opening and closing

    def track(self, **objects: Any) -> None:
        """Track more objects, before the run is entered."""
        if self._parts is not None:
            raise StrataError("track objects before the run is entered, so that they are restored")
        self._tracked.add(objects)

    def __enter__(self) -> Self:
        if self._parts is not None:
            raise StrataError("a run can be entered once: make another")
        self._notices.install()
        try:
            self._parts = open_run(
                self._checkpoints,
                self._checkpoint_options,
                self._data,
                self._tracked,
                self._seed,
                worker=self._orchestrator,
                recovery=self.recovery,
                group=self._group,
                gate=self._gate,
                notices=self._notices,
            )
            self._begin()
        except Leaving:
            self._ending = "preempted"
        except BaseException as exc:
            self._close(f"failed to open: {type(exc).__name__}")
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None and not self._ending:
                self._keep_unfinished()
        finally:
            self._close("" if error is None else f"failed: {type(error).__name__}")
        if error is None and self._ending == "preempted":
            raise SystemExit(PREEMPTED)

    def _keep_unfinished(self) -> None:
        """Save when the loop was left early, if what was done with its last batch is clear."""
        if self._in_step and self._guarded:
            self._open.stream.used()
            self._gate.pass_step()
        elif self._in_step:
            last = self._open.saves.last_step
            log.warning("run.left_in_a_step", step=self.step + 1, resumes_after=last)
            return
        if self.step > self._open.saves.last_step:
            self._save().wait()

    @property
    def _open(self) -> Opened:
        if self._parts is None:
            raise StrataError("the run is not open: use it in a 'with' statement")
        return self._parts

    def _begin(self) -> None:
        finished = self._open.saves.finished()
        if finished is None or not self._reaches(finished):
            self._assemble()
            return
        # Nobody has to come: there is nothing left to do.
        self._crew = Crew((0,), 0, 0)
        self._open.stream.open(self._crew)
        self._open.saves.restore(self._crew, finished)
        self._gate.reset(finished.step)
        self._ending = "finished"

    def _reaches(self, finished: CheckpointInfo) -> bool:
        """Whether a checkpoint is where this run ends; it may be longer than it was."""
        if self.max_steps is not None and finished.step >= self.max_steps:
            return True
        return self._data.data is not None and finished.epoch >= self.epochs

    def _close(self, reason: str) -> None:
        self._notices.remove()
        try:
            if self._parts is not None:
                self._parts.close(give_up=bool(reason))
        finally:
            worker = self._orchestrator
            if worker is not None:
                with worker.goodbye_may_fail():
                    worker.deregister(reason or self._ending)

    # Coming together

    def _assemble(self) -> None:
        self._crew = crew = self._open.formation.assemble()
        self._gate.reset(self._open.saves.last_step)
        self._broken = None
        if self._open.agreements is not None:
            self._open.agreements.begin(crew)
        log.info("run.training", step=self.step, workers=crew.size, place=crew.index)

    def _regroup_or_leave(self, reason: str) -> None:
        try:
            self._regroup(reason)
        except Leaving:
            self._ending = "preempted"

    def _regroup(self, reason: str) -> None:
        """Come together again and go back to the last checkpoint."""
        log.warning("run.regrouping", step=self.step, reason=reason)
        worker, agreements = self._orchestrator, self._open.agreements
        assert worker is not None
        assert agreements is not None
        agreements.end()
        self._open.formation.break_up()
        worker.report(state=WorkerState.RECOVERING)
        time.sleep(self._failures.count(self._recent_losses(worker), reason))
        # Before it looks: the others may finish and leave until there is room for it.
        worker.register()
        self._begin()

    def _recent_losses(self, worker: TrainingOrchestrator) -> int:
        """How many workers were lost lately; one that was lost itself is not told."""
        try:
            return worker.recent_losses(self.recovery.window_seconds)
        except SyncError as exc:
            log.warning("run.lost_itself", reason=str(exc))
            return 0

    # Training

    def __iter__(self) -> Iterator[Any]:
        """Batches up to the end of the last epoch.

        A batch has been used when the next one is asked for, or when its `guard` block has ended.
        Whoever leaves the loop early after that finds everything saved; in the middle of a step
        nothing is, and the next time the run goes on from its last checkpoint.
        """
        while not self._ending:
            try:
                yield from self._steps()
                if not self._ending:
                    self._finish()
            except SyncError as exc:
                # From the stream: what was consumed could not be reported.
                if not self._lost_somebody(exc):
                    raise
                self._regroup_or_leave(f"{type(exc).__name__}: {exc}")
            except _Regroup as why:
                self._regroup_or_leave(str(why))

    def _steps(self) -> Iterator[Any]:
        stream = self._open.stream
        while stream.epoch < self.epochs and not self._is_over():
            for batch, self._samples in stream.batches():
                self._pace.begin()
                self._in_step, self._guarded = True, False
                yield batch
                self._in_step = False
                self._after_step()
                if self._ending or self._is_over():
                    return

    def _is_over(self) -> bool:
        return self.max_steps is not None and self.step >= self.max_steps

    def _after_step(self) -> None:
        if self._broken is not None:
            raise _Regroup(f"{type(self._broken).__name__}: {self._broken}")
        self._open.stream.used()
        due = self._gate.pass_step()
        self._note()
        if due:
            self._obey(due)
        elif self._is_time_to_save():
            self._save()
        self._open.saves.check()
        if not self._ending and self._open.formation.has_lost(self.crew):
            raise _Regroup(self._change())
        if not self._ending and self._open.formation.has_changed(self.crew):
            self._welcome()
        if not self._ending and self._notices.look():
            self._leave_if_due()

    def _welcome(self) -> None:
        """Somebody has come: save first, so that nothing is lost when the crew forms again."""
        worker = self._orchestrator
        assert worker is not None
        if self.crew.leads and self._welcomed != worker.generation:
            self._welcomed = worker.generation
            worker.request_action("checkpoint", reason="a worker has joined")

    def _save(self, **options: Any) -> Any:
        return self._open.saves.save(self.crew, self.step, metrics=self._metrics, **options)

    def _is_time_to_save(self) -> bool:
        if self._open.manager.should_save(self.step):
            return True
        if self._save_seconds is None or not self.crew.leads:
            return False
        saves = self._open.saves
        if time.monotonic() - saves.last_time < self._save_seconds:
            return False
        if self._orchestrator is not None:
            # All ranks have to save after the same step: this is agreed on like other requests.
            saves.last_time = time.monotonic()
            reason = f"every {self._save_seconds:g} s"
            self._orchestrator.request_action("checkpoint", reason=reason)
        return self._orchestrator is None

    def _note(self) -> None:
        """Report how far this worker is."""
        self._pace.end()
        if self._orchestrator is not None:
            self._orchestrator.report(
                step=self.step,
                epoch=self.epoch,
                state=WorkerState.TRAINING,
                step_seconds=self._pace.step_seconds,
                **{**self._length, **self._metrics},
            )

    def report(self, **metrics: float) -> None:
        """Say how training goes; heartbeats and checkpoints carry it."""
        if own := _REPORTED & metrics.keys():
            raise ValueError(f"the run itself reports {', '.join(sorted(own))}: name it otherwise")
        self._metrics.update({name: float(value) for name, value in metrics.items()})

    def waiting(self) -> AbstractContextManager[None]:
        """Do not count the time of a block as the step's: it is spent waiting for others.

        Step times tell which worker is slow only as far as they leave out such waits. Barriers,
        `exchange` and `average_gradients` are left out by themselves.
        """
        return self._pace.waiting()

    def average_gradients(self, module: Any) -> None:
        """Replace a module's gradients by their mean over the samples of all workers' batches.

        Also takes an iterable of parameters. Needs ``process_group``.
        """
        from .process_group import average_gradients

        parameters: Iterable[Any] = module.parameters() if hasattr(module, "parameters") else module
        with self.waiting():
            average_gradients(parameters, self._samples, self.crew)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Let errors end only this step when they come from the loss of another worker.

        A collective that fails because a worker died raises in all others. Inside ``guard`` that
        ends the block, and the loop goes on from the last checkpoint with those who are there.
        Other errors are raised as ever.
        """
        try:
            yield
            self._guarded = True
        except (RuntimeError, OSError, SyncError) as exc:
            if not self._lost_somebody(exc):
                raise
            self._broken = exc

    def _lost_somebody(self, error: Exception) -> bool:
        worker = self._orchestrator
        if worker is None or self._has_foreign_group():
            return False
        if self.crew.size == 1 and worker.is_registered:
            return False
        wait = f"up to {self.recovery.detect_seconds:g} s, in case a worker was lost"
        log.warning("run.step_failed", step=self.step, error=repr(error), waits=wait)
        deadline = time.monotonic() + self.recovery.detect_seconds
        while not self._open.formation.has_lost(self.crew):
            if time.monotonic() > deadline:
                return False
            time.sleep(LOOK_SECONDS)
            try:
                worker.beat()
            except (SyncError, ConnectionError) as exc:
                log.info("run.not_told", reason=str(exc))
        return True

    def _has_foreign_group(self) -> bool:
        """Whether the process has a process group of torch that is not the run's."""
        if self._group[0] is not None or "torch.distributed" not in sys.modules:
            return False
        from .process_group import is_initialized

        return is_initialized()

    def _change(self) -> str:
        self._check_own_group()
        assert self._orchestrator is not None
        return f"the membership changed (generation {self._orchestrator.generation})"

    def _check_own_group(self) -> None:
        """Raise when only a restart of all processes can help."""
        worker = self._orchestrator
        if worker is not None and self._has_foreign_group():
            raise SyncError(
                "a worker was lost, left or came, and only a restart of all workers can mend a "
                "process group that the run did not make: this process ends, so that its launcher "
                "restarts all of them; the run then resumes from its last checkpoint",
                reason="membership_changed",
                generation=worker.generation,
            )

    # Ending

    def _obey(self, actions: list[Action]) -> None:
        """Save, then do what was asked for; all ranks do it after the same step."""
        worker = self._orchestrator
        assert worker is not None
        worker.report(state=WorkerState.CHECKPOINTING)
        self._commit(is_full=self._full_fits())
        for action in actions:
            self._gate.done(action)
            if self.crew.leads:
                self._complete(action)
        if any(action.kind == "stop" for action in actions):
            self._ending = "stopped"
        leaving = {action.worker_id for action in actions if action.kind == "drain"}
        noticed = self._notices.look()
        if worker.worker_id in leaving or (leaving and noticed):
            # With a notice of its own it need not wait for its turn: everything is saved.
            self._ending = "preempted" if noticed else "drained"
        elif leaving and not self._ending:
            self._change()
            raise _Regroup(f"{', '.join(sorted(leaving))} left")
        elif not self._ending and self._open.formation.has_changed(self.crew):
            raise _Regroup(self._change())

    def _complete(self, action: Action) -> None:
        assert self._orchestrator is not None
        try:
            self._orchestrator.complete_action(action.action_id, f"saved step {self.step}")
        except StrataError as exc:
            log.warning("run.action_not_completed", action=action.kind, reason=str(exc))

    def _leave_if_due(self) -> None:
        """With a notice: save alone, or leave without when it takes the others too long."""
        if self._orchestrator is None:
            self._commit(is_full=self._full_fits())
            self._ending = "preempted"
        elif self._notices.seconds > self._grace:
            last = self._open.saves.last_step
            log.error("run.leaves_unsaved", step=self.step, last_saved=last)
            self._ending = "preempted"

    def _full_fits(self) -> bool:
        """Whether a full checkpoint fits into what is left of the grace period."""
        if not self._notices.look():
            return True
        seconds = self._open.manager.estimate_seconds()
        return seconds is None or seconds < self._grace - self._notices.seconds

    def _finish(self) -> None:
        self._commit(is_full=False, finished=True)
        self._ending = "finished"
        if self._orchestrator is not None:
            self._orchestrator.report(state=WorkerState.FINISHED)
        log.info("run.finished", step=self.step, epoch=self.epoch)

    def _commit(self, **options: Any) -> None:
        """Save, and wait until it is committed."""
        try:
            self._save(**options).wait()
        except CheckpointAbortedError as exc:
            self._check_own_group()
            raise _Regroup(str(exc)) from exc
