"""Value types of the public interface, and checks of names and numbers."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Real
from typing import Any

DEFAULT_JOB = "default"
"""The job of callers that give none."""

ACTION_KINDS = ("checkpoint", "stop", "drain")
"""What an operator can request of a running job."""

FORMATS = ("parquet", "csv", "tfrecord")
"""File formats of datasets."""

REPORTED_AT_ONCE = 1000
"""How many checkpoints one call may report on."""

LONGEST_WAIT_SECONDS = 24 * 3600.0
"""The coordinator holds no call for longer."""

VALUE_BYTES = 1024
"""The largest value that a worker may exchange."""

MAX_ID_LENGTH = 200
_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_ .:@/+=#-]{0,199}")


def check_id(kind: str, value: str) -> str:
    """Return ``value`` if it is usable as an identifier, else raise ``ValueError``.

    The same rule holds for jobs, workers, barriers, datasets and checkpoints.
    """
    if not isinstance(value, str):
        raise TypeError(f"{kind} must be a str, not {type(value).__name__}")
    if not _ID.fullmatch(value) or ".." in value:
        raise ValueError(
            f"{kind} {value[:80]!r} is not a valid identifier: use 1 to {MAX_ID_LENGTH} letters, "
            "digits, spaces or any of _ . : @ / + = # -, starting with a letter, digit or _, "
            "without '..'"
        )
    return value


def check_whole(name: str, value: Any, least: int = 0, most: int = 2**63 - 1) -> int:
    """Return ``value`` as an ``int`` if it is a whole number within bounds.

    Raises ``TypeError`` or ``ValueError``. Whole numbers of numpy and the like are as good as
    Python's; booleans and floats are not.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}")
    if not least <= number <= most:
        raise ValueError(f"{name} must be between {least} and {most}, not {number}")
    return number


def check_seconds(name: str, value: Any, *, may_be_zero: bool = False) -> float:
    """Return ``value`` as a ``float`` if it is a number of seconds, also an infinite one.

    Raises ``TypeError`` or ``ValueError``.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number of seconds, not {type(value).__name__}")
    seconds = float(value)
    if math.isnan(seconds) or seconds < 0 or not (seconds or may_be_zero):
        bound = "not be negative" if may_be_zero else "be positive"
        raise ValueError(f"{name} must {bound}: {value}")
    return seconds


def check_timeout_ms(timeout_ms: Any) -> float:
    """Return how many seconds the coordinator may hold a call: at most a day."""
    if not isinstance(timeout_ms, int | float) or isinstance(timeout_ms, bool):
        raise TypeError(f"timeout_ms must be a number, not {type(timeout_ms).__name__}")
    if not 0 < timeout_ms < math.inf:
        raise ValueError(f"timeout_ms must be positive and finite, not {timeout_ms}")
    return min(timeout_ms / 1000, LONGEST_WAIT_SECONDS)


def check_flag(name: str, value: Any) -> bool:
    """Return ``value`` if it is true or false, of Python or numpy, else raise ``TypeError``."""
    if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    raise TypeError(f"{name} must be True or False, not {value!r}")


class WorkerState(StrEnum):
    """What a worker is doing."""

    IDLE = "idle"
    LOADING = "loading"
    TRAINING = "training"
    CHECKPOINTING = "checkpointing"
    WAITING = "waiting"
    RECOVERING = "recovering"
    FINISHED = "finished"


class Membership(StrEnum):
    """What the coordinator knows about a rank."""

    EXPECTED = "expected"
    """Part of a fixed world, not registered yet; counts as present."""
    LIVE = "live"
    DEAD = "dead"
    LEFT = "left"


class CheckpointCondition(StrEnum):
    """The condition of a committed checkpoint, as reported by someone who can see the store."""

    GOOD = "good"
    """All of it was read, and is as it was committed."""
    DAMAGED = "damaged"
    REMOVED = "removed"
    """Deleted, by retention or by someone."""


@dataclass(frozen=True, slots=True)
class GpuUsage:
    """One GPU as its worker sees it."""

    index: int
    utilization_percent: float = 0.0
    memory_used_bytes: int = 0
    memory_total_bytes: int = 0
    temperature_celsius: float = 0.0


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """Resources of a worker's process and its machine."""

    cpu_percent: float = 0.0
    """CPU of the worker's process; 100 is one core."""
    memory_used_bytes: int = 0
    """Resident memory of the worker's process."""
    memory_total_bytes: int = 0
    """Memory of its machine."""
    gpus: tuple[GpuUsage, ...] = ()


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """One shard of a dataset: a range of samples and where they are.

    Samples are numbered from 0 through all files of the dataset, rows from 0 in each file.
    """

    shard_id: int
    start_index: int
    """The number of its first sample in the dataset, not a row of a file."""
    end_index: int
    """Exclusive."""
    file_paths: list[str] = field(default_factory=list)
    """The files that hold it, in order. Other rows of them may belong to other shards."""
    row_ranges: list[tuple[int, int]] = field(default_factory=list)
    """The rows ``[start, stop)`` of each of ``file_paths`` that belong to this shard.

    Together ``end_index - start_index`` rows. Empty when nobody has seen the files: each of them
    is then one shard.
    """

    def __len__(self) -> int:
        return self.end_index - self.start_index


@dataclass(frozen=True, slots=True)
class DatasetSummary:
    """A registered dataset, and who shares it."""

    dataset_id: str
    path: str
    """Empty for a dataset of sample numbers, without files."""
    format: str
    total_samples: int
    shard_size: int
    shard_count: int
    shuffle: bool
    seed: int
    exact: bool = False
    """Whether every shard but the last has exactly ``shard_size`` samples."""
    fingerprint: str = ""
    """Identifies the files and their content; empty when nobody has seen them."""
    total_bytes: int = 0
    columns: tuple[str, ...] = ()
    """``name: type`` of each column."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    slot_count: int = 0
    """How many slots the job has; 0 when it has no members."""
    dead_slots: tuple[int, ...] = ()
    """Slots that nobody holds at the moment."""
    order: str = ""
    """How workers read it: ``"global"`` (ranks share the batches), ``"affinity"`` (ranks share the
    shards), or empty when unknown."""


@dataclass(frozen=True, slots=True)
class EpochCoverage:
    """What was consumed of an epoch, compared with all of its samples.

    ``missing`` and ``repeated`` are lower bounds; `suspect` says where.
    """

    epoch: int
    total: int
    """How many samples the dataset has."""
    covered: int
    """Samples known to have been consumed."""
    missing: int
    """Samples neither consumed, nor assumed, nor dropped; while not ``complete``, yet to come."""
    repeated: int
    assumed: int = 0
    """Samples before a resumed position whose consumption was not recorded."""
    dropped: int = 0
    """Samples that the epoch leaves out on purpose."""
    complete: bool = False
    """Whether everybody has finished the epoch."""
    workers: int = 0
    """How many workers reported."""
    segments: int = 0
    """How many times the samples were distributed, because the membership changed."""
    suspect: tuple[tuple[int, int], ...] = ()
    """Ranges ``[start, stop)`` of samples in which some are missing or repeated."""
    ended_incomplete: bool = False
    """Whether all workers have moved on to other epochs while samples are missing."""

    @property
    def exact(self) -> bool:
        """Whether every sample was consumed exactly once, or left out on purpose."""
        return self.complete and not (self.missing or self.repeated or self.assumed)


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A committed checkpoint."""

    checkpoint_id: str
    step: int
    epoch: int = 0
    path: str = ""
    size_bytes: int = 0
    is_full: bool = True
    worker_id: str = ""
    parts: int = 1
    """How many workers wrote it."""
    committed_at: float = 0.0
    """Seconds since 1970."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    verified: bool | None = None
    """Whether the last complete read found it good; None: not reported."""
    verified_at: float | None = None
    verified_by: str = ""
    """The member that read it; empty: someone outside the job."""
    will_be_dropped: bool | None = None
    """Whether retention will delete it with the next commit; None: not known."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker as the coordinator sees it."""

    worker_id: str
    rank: int
    incarnation: int
    membership: Membership
    state: WorkerState
    step: int | None
    epoch: int
    heartbeat_age: float
    """Seconds since the coordinator last heard from it."""
    hostname: str = ""
    port: int = 0
    process: str = ""
    gpu_count: int = 0
    memory_bytes: int = 0
    registered_at: float = 0.0
    resources: ResourceUsage = field(default_factory=ResourceUsage)
    metrics: Mapping[str, float] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    detail: str = ""
    """Why it is dead or has left."""
    step_seconds: float | None = None
    """How long its steps take, as reported."""
    slowness: float | None = None
    """``step_seconds`` as a multiple of the median of all live workers that report it."""
    is_straggler: bool = False
    """Whether it is markedly slower than the others."""


@dataclass(frozen=True, slots=True)
class Action:
    """A pending request to a running job."""

    action_id: str
    kind: str
    """``"checkpoint"``, ``"stop"`` or ``"drain"``."""
    worker_id: str = ""
    """With ``"drain"``: the worker that is to leave."""
    reason: str = ""
    requested_at: float = 0.0
    """Seconds since 1970."""
    requested_by: str = ""
    """The requesting worker; empty for someone outside the job."""


@dataclass(frozen=True, slots=True)
class BarrierStatus:
    """An open barrier round."""

    barrier_id: str
    round: int
    arrived: int
    expected: int
    open_seconds: float
    missing: Mapping[str, int | None] = field(default_factory=dict)
    """Workers that have not arrived, with the last step each reported."""


@dataclass(frozen=True, slots=True)
class IncompleteEpoch:
    """An epoch that all workers have moved on from while samples are missing."""

    dataset_id: str
    epoch: int
    missing: int
    expected: int
    """How many samples it has."""


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A job as the coordinator sees it."""

    job: str
    generation: int
    world_size: int
    """0 when the job is elastic."""
    live_workers: int
    dead_workers: int
    epoch: int
    completed_epochs: int
    dataset_count: int
    checkpoint_count: int
    workers: tuple[WorkerStatus, ...] = ()
    barriers: tuple[BarrierStatus, ...] = ()
    latest_checkpoint: CheckpointInfo | None = None
    actions: tuple[Action, ...] = ()
    """The pending actions."""
    loss_ages: tuple[float, ...] = ()
    """How many seconds ago each of the last 64 losses was, newest first."""
    checkpoints: tuple[CheckpointInfo, ...] = ()
    """The newest eight, newest first."""
    incomplete_epochs: tuple[IncompleteEpoch, ...] = ()
    """Epochs that ended with missing samples, newest first, at most 16."""

    def recent_losses(self, seconds: float) -> int:
        """How many members were lost in the last ``seconds``, counted up to 64.

        Those that left by themselves do not count, nor does a whole group that was restarted.
        """
        return sum(age <= seconds for age in self.loss_ages)
