"""`Run`: a training loop that survives, in a few lines."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, Self

from ..checkpoint import CheckpointManager
from ..client import DatasetRegistry, TrainingOrchestrator
from ..errors import StrataError, SyncError
from ..telemetry import EventLog
from ..telemetry.logs import is_debugging
from ..types import EpochCoverage, check_whole
from .components import REPORTED, RunOptions, as_mapping, job_of_program, worker_of
from .crew import Crew
from .loop import Regroup, TrainingLoop, brief
from .preemption import PREEMPTED, Interrupts, Leaving, PreemptionNotices
from .recovery import Recovery
from .streams import DataOptions, check_data, check_lockstep
from .tracked_state import Tracked

log = EventLog("run")

_OWN = frozenset({"dtruntime", "asyncio", "concurrent", "contextlib", "threading"})
"""Packages whose frames in a traceback say nothing about the program."""
GOODBYE_SECONDS = 7.0
"""How long an absent coordinator is tried when a worker leaves."""


class Run:
    """A training run that resumes, saves, recovers and ends by itself.

    ::

        with Run("checkpoints", data="data/train", batch_size=256, epochs=3,
                 process_group="auto",
                 track={"model": model, "optimizer": optimizer}) as run:
            for batch in run:
                with run.guard():
                    loss = train_step(model, optimizer, batch)
                    run.report(loss=loss)

    Iterating gives batches from where the newest checkpoint left off to the end of the last epoch.
    With a coordinator (``coordinator_url`` or ``COORDINATOR_URL``) all workers of the job form a
    crew: they save together, and when one is lost the others wait for a replacement or go on
    without it, all from the last checkpoint. Without one, a single process resumes and saves.
    """

    def __init__(  # noqa: PLR0913
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
        independent: bool = False,
        collective_seconds: float = 60.0,
        dataset: str = "train",
        format: str | None = None,
        loader: Mapping[str, Any] | None = None,
        checkpoint: Mapping[str, Any] | None = None,
        preemption_file: str | os.PathLike[str] | None = None,
        grace_seconds: float = 25.0,
        handle_signals: bool = True,
    ) -> None:
        """Check the arguments; nothing is opened before the run is entered.

        - ``checkpoints``: a folder or a URL.
        - ``data``: files (a path, glob or URL, read as ``format``; with a coordinator they are
          registered as ``dataset``), a number of samples, a source for `Loader`, or anything that
          can be iterated once per epoch. Without data, batches are the numbers of the steps.
        - ``track``: objects with a ``state_dict``. ``state``: the initial values of `Run.state`.
        - ``save_steps``, ``save_seconds``: how often to save (by default every ``[checkpoint]
          interval_steps``). ``checkpoint`` has more options of `CheckpointManager`, ``loader`` of
          `Loader`.
        - ``process_group``: on several workers, make torch's default process group, anew when
          the crew changes, and average the gradients of tracked modules at the end of every
          ``backward()``. ``"auto"`` chooses the backend for the devices of the tracked parameters;
          ``"gloo"`` and ``"nccl"`` name it. A single worker needs no group and makes none.
          Leave it out if a launcher restarts all workers together, as torchrun does; then make
          the group, and wrap the model in DDP or FSDP, before the run is entered. Modules whose
          gradients nobody averages are an error before the first step.
        - ``independent``: leave gradients alone, because each worker trains a model of its own or
          the program averages them. Checkpoints have the first worker's model.
        - ``grace_seconds``: the time to save and leave after SIGTERM, or after ``preemption_file``
          (``STRATA_PREEMPTION_FILE``) has appeared. A process that still runs then is ended.
        """
        seed = check_whole("seed", seed)
        sizes = {"batch_size": batch_size, "global_batch_size": global_batch_size}
        reading: dict[str, Any] = {name: size for name, size in sizes.items() if size is not None}
        reading |= as_mapping("loader", loader)
        if data is not None:
            check_data(data, reading if format is None else {**reading, "format": format})
        every = None if save_steps is None else check_whole("save_steps", save_steps, 1)
        saving = {"keep_count": keep_count, "interval_steps": every}
        self._options = RunOptions(
            checkpoints=checkpoints,
            manager={**saving, **as_mapping("checkpoint", checkpoint)},
            data=DataOptions(data, format, dataset, {"seed": seed, **reading}),
            epochs=check_whole("epochs", epochs, 1),
            max_steps=None if max_steps is None else check_whole("max_steps", max_steps),
            seed=seed,
            save_seconds=save_seconds,
            grace_seconds=grace_seconds,
            recovery=recovery or Recovery(),
            process_group=process_group,
            independent=independent,
            collective_seconds=collective_seconds,
        )
        self._tracked = Tracked(as_mapping("track", track), as_mapping("state", state))
        self._orchestrator = worker_of(
            coordinator_url, job or job_of_program(), rank, world_size, worker_id
        )
        if self._orchestrator is not None and self._orchestrator.config.world_size != 1:
            check_lockstep(reading)
        self._notices = PreemptionNotices(
            preemption_file, signals=handle_signals, grace_seconds=grace_seconds
        )
        self._training = TrainingLoop(
            self._options, self._tracked, self._orchestrator, self._notices
        )

    # Properties

    @property
    def epochs(self) -> int:
        """The number of epochs in all."""
        return self._options.epochs

    @property
    def max_steps(self) -> int | None:
        """The limit on the number of steps, if there is one."""
        return self._options.max_steps

    @property
    def recovery(self) -> Recovery:
        """The policy for lost workers."""
        return self._options.recovery

    @property
    def state(self) -> dict[str, Any]:
        """The values that are saved and restored; assign new ones here."""
        return self._tracked.values

    @property
    def step(self) -> int:
        """The number of steps done."""
        return self._training.step

    @property
    def epoch(self) -> int:
        """The current epoch."""
        return self._training.parts.stream.epoch

    @property
    def crew(self) -> Crew:
        """The ranks that train together now."""
        return self._training.crew

    @property
    def rank(self) -> int:
        """This worker's index in the crew, from 0."""
        return self.crew.index

    @property
    def world_size(self) -> int:
        """The number of workers in the crew."""
        return self.crew.size

    @property
    def ending(self) -> str:
        """Why the run ended: ``finished``, ``stopped``, ``drained`` or ``preempted``.

        Empty while it trains, and after the program itself has left the loop early.
        """
        return self._training.ending

    @property
    def checkpoints(self) -> CheckpointManager:
        """The run's checkpoints."""
        return self._training.parts.manager

    @property
    def orchestrator(self) -> TrainingOrchestrator | None:
        """This worker's membership; None without a coordinator."""
        return self._orchestrator

    def coverage(self) -> list[EpochCoverage]:
        """Which samples of each epoch were consumed, as reported to the coordinator."""
        worker = self._orchestrator
        if worker is None:
            raise StrataError("coverage is kept by a coordinator: this run has none")
        with DatasetRegistry(worker.config.coordinator_url, job=worker.job) as registry:
            return registry.coverage(self._options.data.dataset)

    # Opening and closing

    def track(self, **objects: Any) -> None:
        """Track more objects; only before the run is entered."""
        if self._training.is_open:
            raise StrataError("track objects before the run is entered, so that they are restored")
        self._tracked.add(objects)

    def __enter__(self) -> Self:
        if self._training.is_open:
            raise StrataError("a run can be entered once: make another")
        self._notices.install()
        try:
            with self._notices.during(Interrupts.AT_ONCE):
                self._training.open()
        except Leaving as why:
            self._training.ending = "preempted"
            log.warning(
                "run.left_before_training",
                reason=str(why),
                detail="the run was not open yet: nothing was trained, nothing has to be saved",
            )
            self._close("preempted")
            raise SystemExit(PREEMPTED) from None
        except BaseException as exc:
            self._close(f"failed to open: {type(exc).__name__}")
            if isinstance(exc, StrataError):
                raise _without_own_frames(exc) from _shown_cause(exc)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._training.explain(error)
        try:
            if error is None and not self.ending:
                with self._notices.during(Interrupts.WHEN_LATE):
                    self._training.save_unfinished()
        except Leaving:
            self._training.leave_unsaved()
        finally:
            self._close("" if error is None else f"failed: {type(error).__name__}")
        if error is None and self.ending == "preempted":
            raise SystemExit(PREEMPTED)

    def _close(self, reason: str) -> None:
        if self._training.is_unsaved:
            # First of all, so that the others do not wait for what takes long here.
            self._training.give_up_saves()
            self._deregister(self.ending)
        try:
            self._training.close(give_up=bool(reason) or self._training.is_unsaved)
        finally:
            self._deregister(reason or self.ending)
            self._notices.remove()

    def _deregister(self, reason: str) -> None:
        worker = self._orchestrator
        if worker is not None:
            worker.leave(reason, self._notices.seconds_left(GOODBYE_SECONDS))

    # Training

    def __iter__(self) -> Iterator[Any]:
        """Batches up to the end of the last epoch.

        A batch counts as used when the next one is asked for, or when its `guard` block has ended.
        If the loop is left early after that, everything is saved; if it is left in the middle of a
        step, nothing is, and the run goes on from its last checkpoint next time.
        """
        while not self.ending:
            try:
                yield from self._training.steps()
                if not self.ending:
                    with self._notices.during(Interrupts.WHEN_LATE):
                        self._training.finish()
            except Leaving:
                self._training.leave_unsaved()
            except StrataError as exc:
                # From the stream, which could not report what was consumed.
                if not (isinstance(exc, SyncError) and self._training.explains(exc)):
                    raise _without_own_frames(exc) from _shown_cause(exc)
                self._regroup(brief(exc))
            except Regroup as why:
                self._regroup(str(why), is_failure=why.is_failure)

    def _regroup(self, reason: str, *, is_failure: bool = True) -> None:
        try:
            with self._notices.during(Interrupts.AT_ONCE):
                self._training.regroup(reason, is_failure=is_failure)
        except Leaving:
            self._training.leave_unsaved()
        except StrataError as exc:
            raise _without_own_frames(exc) from _shown_cause(exc)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Let errors that come from the loss of another worker end only this step.

        A collective that fails because a worker died raises on all others. Inside ``guard`` that
        ends the block, and the loop goes on from the last checkpoint with the remaining workers.
        Other errors are raised as usual.
        """
        try:
            yield
            self._training.guarded = True
        except (RuntimeError, OSError, SyncError) as exc:
            if not self._training.explains(exc):
                raise
            self._training.broken = exc

    def report(self, **metrics: float) -> None:
        """Report metrics; heartbeats and checkpoints carry them."""
        if own := REPORTED & metrics.keys():
            raise ValueError(f"the run itself reports {', '.join(sorted(own))}: use another name")
        self._training.metrics.update({name: float(value) for name, value in metrics.items()})

    def waiting(self) -> AbstractContextManager[None]:
        """Leave the time of a block out of the step time: it is spent waiting for others.

        Step times show which worker is slow only without such waits. Barriers, `exchange` and
        `average_gradients` are left out anyway.
        """
        return self._training.timer.waiting()

    def average_gradients(self, module: Any) -> None:
        """Replace a module's gradients by their mean over the samples of all workers' batches.

        Also takes an iterable of parameters. With ``process_group`` the run does this for tracked
        modules at the end of each ``backward()``, and repeating it changes nothing; it is for other
        modules, and for the program's own process group.
        """
        parameters: Iterable[Any] = module.parameters() if hasattr(module, "parameters") else module
        self._training.average_gradients(parameters)


def _without_own_frames(error: StrataError) -> StrataError:
    """An error whose traceback has only the program's frames, unless ``STRATA_LOG=debug``."""
    if is_debugging():
        return error
    kept: TracebackType | None = None
    entries: list[TracebackType] = []
    entry = error.__traceback__
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    for entry in reversed(entries):
        if entry.tb_frame.f_globals.get("__name__", "").partition(".")[0] not in _OWN:
            kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return error.with_traceback(kept)


def _shown_cause(error: StrataError) -> BaseException | None:
    return error.__cause__ if is_debugging() else None
