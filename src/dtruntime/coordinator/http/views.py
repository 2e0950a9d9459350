"""The objects of the HTTP API, as ``docs/http-api.md`` describes them.

Times are seconds since 1970, ages and durations seconds, sizes bytes. None is what is not known.
"""

from __future__ import annotations

from typing import Annotated, Generic, Literal, TypeVar

from msgspec import UNSET, Meta, Struct, UnsetType

from ...events import Level

T = TypeVar("T")


class ApiObject(Struct, frozen=True):
    """A part of an answer."""


class Health(ApiObject, frozen=True):
    """Whether the coordinator works."""

    status: Literal["ok", "shutting_down", "cannot_store"]
    version: str
    uptime_seconds: float


class Coordinator(ApiObject, frozen=True):
    """The coordinator's process."""

    version: str
    grpc_address: str
    http_address: str
    transport: str
    started_at: float
    now: float
    uptime_seconds: float
    requests_total: int
    requests_per_second: float | None
    errors_total: int
    event_loop_lag_ms: float | None
    memory_bytes: int
    heartbeat_interval_ms: int
    heartbeat_timeout_ms: int


class Job(ApiObject, frozen=True):
    """A job in a list."""

    job: str
    generation: int
    world_size: int
    live_workers: int
    dead_workers: int
    epoch: int
    created_at: float | None
    last_active_at: float


class Gpu(ApiObject, frozen=True):
    """One GPU as its worker sees it."""

    utilization_percent: float
    memory_used_bytes: int
    memory_total_bytes: int


class Worker(ApiObject, frozen=True):
    """The holder of a rank."""

    worker_id: str
    rank: int
    incarnation: int
    membership: Literal["live", "dead", "left"]
    state: str
    step: int | None
    epoch: int
    heartbeat_age_seconds: float
    hostname: str
    process: str
    gpu_count: int
    registered_at: float
    detail: str
    metrics: dict[str, float]
    step_seconds: float | None
    slowness: float | None
    is_straggler: bool
    cpu_percent: float | None
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    gpus: list[Gpu]


class RankShare(ApiObject, frozen=True):
    """What one rank reads of a dataset."""

    rank: int
    shards: int
    samples: int


class Reassignment(ApiObject, frozen=True):
    """What moved when the membership changed last."""

    at: float
    moved_shards: int
    moved_samples: int
    reason: str


class Coverage(ApiObject, frozen=True):
    """What was consumed of an epoch."""

    epoch: int
    total: int
    covered: int
    missing: int
    repeated: int
    assumed: int
    dropped: int
    complete: bool
    exact: bool
    workers: int
    ended_incomplete: bool
    """Everybody has gone on, and samples are missing."""


class Dataset(ApiObject, frozen=True):
    """A registered dataset."""

    dataset_id: str
    path: str
    format: str
    total_samples: int
    shard_size: int
    shard_count: int
    total_bytes: int | None
    shuffle: bool
    seed: int
    registered_at: float
    shards_per_rank: list[RankShare]
    last_change: Reassignment | None
    coverage: list[Coverage]


class Checkpoint(ApiObject, frozen=True):
    """A committed checkpoint."""

    checkpoint_id: str
    step: int
    epoch: int
    path: str
    size_bytes: int
    is_full: bool
    parts: int
    worker_id: str
    committed_at: float
    duration_seconds: float | None
    written_bytes: int | None
    verified: bool | None
    verified_at: float | None
    verified_by: str
    """The worker that read it; empty: an operator."""
    will_be_dropped: bool | None
    metadata: dict[str, str]


class MissingWorker(ApiObject, frozen=True):
    """A worker that a barrier waits for."""

    worker_id: str
    step: int | None


class OpenBarrier(ApiObject, frozen=True):
    """A round that waits for somebody."""

    barrier_id: str
    round: int
    arrived: int
    expected: int
    open_seconds: float
    missing: list[MissingWorker]


class Bucket(ApiObject, frozen=True):
    """How many rounds took longer than the bucket before, and no longer than this."""

    le_ms: float
    count: int


class Barriers(ApiObject, frozen=True):
    """Barriers that are open, and how long those that completed took."""

    open: list[OpenBarrier]
    completed_total: int
    measured: int
    """Of how many rounds, those of the last ten minutes, the quantiles are."""
    p50_ms: float | None
    p99_ms: float | None
    histogram: list[Bucket]


class Metrics(ApiObject, frozen=True):
    """Current figures of a job."""

    workers_live: int
    workers_dead: int
    heartbeats_per_second: float | None
    requests_per_second: float | None
    steps_per_second: float | None
    samples_per_second: float | None
    goodput: float | None
    checkpoint_bytes_per_second: float | None
    checkpoints_committed: int
    barrier_p50_ms: float | None
    barrier_p99_ms: float | None
    barriers_measured: int
    assignment_ms: float | None
    heartbeat_age_max_seconds: float | None
    stragglers: int
    losses_last_hour: int
    recoveries_last_hour: int
    last_recovery_seconds: float | None
    loss: float | None


TaskState = Literal["waiting", "running", "recovering", "finished", "stopped", "idle"]


class Task(ApiObject, frozen=True):
    """A run and how far it is."""

    task_id: str
    job: str
    state: TaskState
    epoch: int
    epochs: int | None
    completed_epochs: int
    step: int | None
    total_steps: int | None
    samples: int | None
    total_samples: int | None
    progress: float | None
    eta_seconds: float | None
    started_at: float
    steps_per_second: float | None
    metrics: dict[str, float]


class Action(ApiObject, frozen=True):
    """Something that is asked of a run and not done yet."""

    action_id: str
    kind: Literal["checkpoint", "stop", "drain"]
    worker_id: str
    reason: str
    requested_at: float


class LogEntry(ApiObject, frozen=True):
    """An entry of the journal."""

    id: int
    at: float
    level: Level
    event: str
    job: str
    message: str
    fields: dict[str, str]


class Dashboard(ApiObject, frozen=True):
    """Everything about one job at one moment."""

    event_id: int
    job: str
    coordinator: Coordinator
    jobs: list[Job]
    workers: list[Worker]
    datasets: list[Dataset]
    checkpoints: list[Checkpoint]
    barriers: Barriers
    metrics: Metrics
    tasks: list[Task]
    actions: list[Action]
    logs: list[LogEntry]


class Change(ApiObject, frozen=True):
    """A dashboard of which only what has changed is there."""

    event_id: int
    job: str
    coordinator: Coordinator | UnsetType = UNSET
    jobs: list[Job] | UnsetType = UNSET
    workers: list[Worker] | UnsetType = UNSET
    removed_workers: list[str] | UnsetType = UNSET
    datasets: list[Dataset] | UnsetType = UNSET
    checkpoints: list[Checkpoint] | UnsetType = UNSET
    removed_checkpoints: list[str] | UnsetType = UNSET
    barriers: Barriers | UnsetType = UNSET
    metrics: Metrics | UnsetType = UNSET
    tasks: list[Task] | UnsetType = UNSET
    actions: list[Action] | UnsetType = UNSET
    logs: list[LogEntry] | UnsetType = UNSET


class Point(ApiObject, frozen=True):
    """The figures of one moment."""

    at: float
    workers_live: int
    steps_per_second: float | None
    samples_per_second: float | None
    requests_per_second: float | None
    checkpoint_bytes_per_second: float | None
    goodput: float | None
    barrier_p50_ms: float | None
    barrier_p99_ms: float | None
    stragglers: int
    loss: float | None


class Recovery(ApiObject, frozen=True):
    """A lost worker, and when the job trained again."""

    lost_at: float
    detected_at: float
    training_at: float | None
    worker_id: str


class History(ApiObject, frozen=True):
    """Figures over time."""

    resolution_seconds: float
    points: list[Point]
    recoveries: list[Recovery]


class ErrorDetail(ApiObject, frozen=True):
    """What went wrong, for programs and for people."""

    code: str
    message: str


class Error(ApiObject, frozen=True):
    """The answer to a request that failed."""

    error: ErrorDetail


class Page(ApiObject, Generic[T], frozen=True):
    """A page of a list."""

    items: list[T]
    total: int
    next_cursor: str | None


Name = Annotated[str, Meta(max_length=200)]
Text = Annotated[str, Meta(max_length=512)]
Number = Annotated[int, Meta(ge=0, le=2**53)]


Sort = Literal[
    "rank",
    "-rank",
    "worker_id",
    "-worker_id",
    "state",
    "-state",
    "step",
    "-step",
    "heartbeat_age_seconds",
    "-heartbeat_age_seconds",
    "slowness",
    "-slowness",
]


class NoQuery(Struct, frozen=True):
    """Nothing."""


class JobQuery(Struct, frozen=True):
    """A job; empty: the one that was active last."""

    job: Name = ""


class PageQuery(JobQuery, frozen=True):
    """A page of a list; ``cursor`` is the ``next_cursor`` of the page before."""

    limit: Annotated[int, Meta(ge=1, le=1000)] = 1000
    cursor: Annotated[str, Meta(pattern="^[0-9]{0,9}$")] = ""

    @property
    def start(self) -> int:
        """How many come before the page."""
        return int(self.cursor or 0)


class WorkerQuery(PageQuery, frozen=True):
    """Which workers."""

    limit: Annotated[int, Meta(ge=1, le=1000)] = 100
    state: Name = ""
    search: Name = ""
    sort: Sort = "rank"


class HistoryQuery(JobQuery, frozen=True):
    """How far back."""

    seconds: Annotated[int, Meta(ge=1, le=21600)] = 600


class LogQuery(JobQuery, frozen=True):
    """Which entries of the journal."""

    search: Name = ""
    level: Literal["", "info", "warning", "error"] = ""
    event: Name = ""
    after: Number = 0
    before: Number = 0
    limit: Annotated[int, Meta(ge=1, le=10000)] = 200
    format: Literal["json", "jsonl", "csv"] = "json"


class ActionRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Something that is asked of a run."""

    job: Annotated[str, Meta(min_length=1, max_length=200)]
    kind: Literal["checkpoint", "stop", "drain"]
    worker_id: Name = ""
    reason: Text = ""
