"""A run's options, and the components that an open run is made of."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from .._sync_bridge import io
from ..checkpoint import CheckpointManager
from ..client import TrainingOrchestrator, WorkerConfig
from ..client.dataset_registration import OPTIONAL_PACKAGES
from ..errors import ConfigError, install_command
from ..types import MAX_ID_LENGTH, CheckpointInfo, check_seconds
from .crew import CrewMembership, Together
from .formation import Formation
from .preemption import PreemptionNotices
from .recovery import Failures, Recovery
from .run_checkpoints import CheckpointLocation, CrewCommits, RunCheckpoints
from .step_agreement import PreemptionWatch, StepAgreements, StepGate
from .streams import DataOptions, StepNumbers, Stream, is_iterated
from .tracked_state import Tracked
from .user_iterables import UserStream

if TYPE_CHECKING:
    from .pytorch.gradients import Gradients
    from .pytorch.process_group import ProcessGroup


REPORTED = frozenset({"step", "epoch", "state", "step_seconds", "samples_used"})
"""Reported by the run itself; metrics have other names."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The arguments of a run that its components need."""

    checkpoints: str | os.PathLike[str]
    manager: Mapping[str, Any]
    """Options of `CheckpointManager`."""
    data: DataOptions
    epochs: int
    max_steps: int | None
    seed: int
    save_seconds: float | None
    grace_seconds: float
    recovery: Recovery
    process_group: str | None
    """The backend of the process group that the run makes, or ``auto``."""
    independent: bool
    """Whether the run leaves gradients alone."""
    collective_seconds: float

    def __post_init__(self) -> None:
        if self.data.data is None and self.max_steps is None:
            raise ValueError("a run without data has no end: give max_steps")
        if self.save_seconds is not None:
            check_seconds("save_seconds", self.save_seconds)
        check_seconds("grace_seconds", self.grace_seconds, may_be_zero=True)
        check_seconds("collective_seconds", self.collective_seconds)
        if self.process_group is not None and not isinstance(self.process_group, str):
            raise TypeError(
                f"process_group must be 'auto' or a backend of torch, not "
                f"{type(self.process_group).__name__}"
            )
        if not isinstance(self.independent, bool):
            raise TypeError(f"independent must be a bool, not {type(self.independent).__name__}")
        if not isinstance(self.recovery, Recovery):
            raise TypeError(f"recovery must be a Recovery, not {type(self.recovery).__name__}")

    def length(self, steps: int | None) -> dict[str, float]:
        """The length of the run for reports, given the number of ``steps`` in its epochs."""
        length = {} if self.data.data is None else {"epochs": float(self.epochs)}
        if limits := [count for count in (steps, self.max_steps) if count is not None]:
            length["steps"] = float(min(limits))
        return length

    def is_over(self, step: int) -> bool:
        """Whether the last step has been done."""
        return self.max_steps is not None and step >= self.max_steps

    def is_reached_by(self, finished: CheckpointInfo) -> bool:
        """Whether a run that finished with this checkpoint is complete; it may be longer now."""
        if self.is_over(finished.step):
            return True
        return self.data.data is not None and finished.epoch >= self.epochs


def as_mapping(name: str, value: Any) -> Mapping[str, Any]:
    """An argument that is a mapping, or nothing; ``TypeError`` otherwise."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a dict with names, not {type(value).__name__}")
    return value


@dataclass(frozen=True, slots=True)
class RunComponents:
    """The components of an open run."""

    manager: CheckpointManager
    stream: Stream
    saves: RunCheckpoints
    formation: Formation
    gradients: Gradients | None
    """None without torch."""
    agreements: StepAgreements | None
    watch: PreemptionWatch | None

    def close(self, *, give_up: bool) -> None:
        """Close everything; with ``give_up``, do not wait for what needs other workers."""
        if self.watch is not None:
            self.watch.close()
        if self.agreements is not None:
            self.agreements.end()
        if give_up:
            self.formation.break_up()
        else:
            self.formation.disband()
        self.manager.close()
        if not give_up:
            self.saves.check(tolerated=0)


def job_of_program(argv: list[str] | None = None) -> str | None:
    """The default job of a run: ``STRATA_JOB``, else the name of its program.

    All workers run the same program, while their folders may be mounted at different paths. None
    if there is no program, as in an interactive session.
    """
    if os.environ.get("STRATA_JOB"):
        return os.environ["STRATA_JOB"]
    words = sys.argv if argv is None else argv
    program = PurePath(words[0] if words else "")
    name = program.parent.name if program.stem == "__main__" else program.stem
    if not name or name in _NO_PROGRAMS or hasattr(sys, "ps1"):
        return None
    valid = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.").replace("..", ".")
    return valid[:MAX_ID_LENGTH] or None


_NO_PROGRAMS = frozenset({"-c", "-m", "ipykernel_launcher", "ipython"})


def worker_of(
    url: str | None,
    job: str | None,
    rank: int | None,
    world_size: int | None,
    worker_id: str | None = None,
) -> TrainingOrchestrator | None:
    """This worker's membership in a job; None for a run of one process."""
    if url is None and not os.environ.get("COORDINATOR_URL"):
        config = WorkerConfig(rank=rank, world_size=world_size).resolved()
        if (config.world_size or 1) > 1:
            raise ConfigError(
                f"this is one of {config.world_size} workers, and workers find each other through "
                "a coordinator: start one (strata coordinator) and set COORDINATOR_URL or "
                "coordinator_url="
            )
        return None
    return TrainingOrchestrator(
        coordinator_url=url, job=job, rank=rank, world_size=world_size, worker_id=worker_id
    )


def open_run(
    options: RunOptions,
    tracked: Tracked,
    worker: TrainingOrchestrator | None,
    gate: StepGate,
    failures: Failures,
    notices: PreemptionNotices,
    waiting: Callable[[], AbstractContextManager[None]],
) -> RunComponents:
    """Register with the coordinator, and open checkpoints and data.

    ``waiting`` is entered while this worker waits for others.
    """
    if options.process_group is not None and tracked.is_sharded:
        raise ConfigError(
            "a sharded model is tied to the process group that it was sharded in, and cannot go on "
            "in another: leave out process_group=, make the group with torch.distributed."
            "init_process_group(), and let a launcher restart all workers together (torchrun)"
        )
    gradients = _gradients(options, tracked, waiting)
    if gradients is not None and worker is not None:
        gradients.check(worker.config.world_size or 1)
    membership, commits = CrewMembership(), None
    agreements = watch = location = None
    if worker is not None:
        with CheckpointManager(options.checkpoints, **options.manager) as manager:
            # A worker with the wrong place must not become a member: the others would wait for it.
            CheckpointLocation(manager, worker, notices).check_record()
        notices.wait(io.submit(worker.register_worker()))
        membership = Together(worker, options.recovery, failures, notices)
        commits = CrewCommits(worker)
        agreements = StepAgreements(worker, gate, lets_in=True)
        watch = PreemptionWatch(worker, lambda: notices.reason if notices.look() else "")
    manager = CheckpointManager(
        options.checkpoints, orchestrator=commits, sharded=commits is not None, **options.manager
    )
    if worker is not None and commits is not None:
        location = CheckpointLocation(manager, worker, notices)
        commits.place = location.identity
    stream = open_stream(options.data, worker)
    saves = RunCheckpoints(manager, commits, tracked, stream, options.seed)
    saves.warn_of_others()
    group = _group(options, tracked, worker)
    formation = Formation(membership, worker, stream, saves, location, group, gradients)
    return RunComponents(manager, stream, saves, formation, gradients, agreements, watch)


def _gradients(
    options: RunOptions,
    tracked: Tracked,
    waiting: Callable[[], AbstractContextManager[None]],
) -> Gradients | None:
    if options.process_group is None and "torch" not in sys.modules:
        return None
    try:
        from .pytorch.gradients import Gradients
    except ModuleNotFoundError as exc:
        if exc.name != "torch":
            raise
        raise ConfigError(
            "process_group= is for programs with torch, which is not installed: pip install torch, "
            "or leave it out"
        ) from exc
    return Gradients(
        tracked,
        automatic=options.process_group is not None,
        independent=options.independent,
        waiting=waiting,
    )


def _group(
    options: RunOptions, tracked: Tracked, worker: TrainingOrchestrator | None
) -> ProcessGroup | None:
    if options.process_group is None or worker is None:
        return None
    from .pytorch.gradients import devices_of
    from .pytorch.process_group import ProcessGroup

    return ProcessGroup(
        options.process_group,
        options.collective_seconds,
        worker.coordinator_host,
        lambda: devices_of(tracked),
    )


def open_stream(options: DataOptions, worker: TrainingOrchestrator | None) -> Stream:
    """Open the source of batches."""
    data = options.data
    if data is None:
        return StepNumbers()
    if is_iterated(data):
        return UserStream(data)
    try:
        from .dataset_stream import dataset_stream
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] not in OPTIONAL_PACKAGES:
            raise
        raise ConfigError(
            f"reading data needs {exc.name}, which is not installed: "
            f"{install_command(exc.name or '')}"
        ) from exc
    return dataset_stream(options, worker)
