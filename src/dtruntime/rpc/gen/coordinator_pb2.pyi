from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_IDLE: _ClassVar[WorkerState]
    WORKER_STATE_LOADING: _ClassVar[WorkerState]
    WORKER_STATE_TRAINING: _ClassVar[WorkerState]
    WORKER_STATE_CHECKPOINTING: _ClassVar[WorkerState]
    WORKER_STATE_WAITING: _ClassVar[WorkerState]
    WORKER_STATE_RECOVERING: _ClassVar[WorkerState]
    WORKER_STATE_FINISHED: _ClassVar[WorkerState]

class ClaimOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CLAIM_OUTCOME_UNSPECIFIED: _ClassVar[ClaimOutcome]
    CLAIM_OUTCOME_GRANTED: _ClassVar[ClaimOutcome]
    CLAIM_OUTCOME_MOVED: _ClassVar[ClaimOutcome]
    CLAIM_OUTCOME_COMPLETE: _ClassVar[ClaimOutcome]
    CLAIM_OUTCOME_WAITING: _ClassVar[ClaimOutcome]

class BarrierOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BARRIER_OUTCOME_UNSPECIFIED: _ClassVar[BarrierOutcome]
    BARRIER_OUTCOME_COMPLETED: _ClassVar[BarrierOutcome]
    BARRIER_OUTCOME_MEMBERSHIP_CHANGED: _ClassVar[BarrierOutcome]
    BARRIER_OUTCOME_TIMED_OUT: _ClassVar[BarrierOutcome]

class CheckpointCondition(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CHECKPOINT_CONDITION_UNSPECIFIED: _ClassVar[CheckpointCondition]
    CHECKPOINT_CONDITION_GOOD: _ClassVar[CheckpointCondition]
    CHECKPOINT_CONDITION_DAMAGED: _ClassVar[CheckpointCondition]
    CHECKPOINT_CONDITION_REMOVED: _ClassVar[CheckpointCondition]

class CheckpointStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CHECKPOINT_STATUS_UNSPECIFIED: _ClassVar[CheckpointStatus]
    CHECKPOINT_STATUS_COMMITTED: _ClassVar[CheckpointStatus]
    CHECKPOINT_STATUS_PENDING: _ClassVar[CheckpointStatus]
    CHECKPOINT_STATUS_ABORTED: _ClassVar[CheckpointStatus]

class Membership(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEMBERSHIP_UNSPECIFIED: _ClassVar[Membership]
    MEMBERSHIP_EXPECTED: _ClassVar[Membership]
    MEMBERSHIP_LIVE: _ClassVar[Membership]
    MEMBERSHIP_DEAD: _ClassVar[Membership]
    MEMBERSHIP_LEFT: _ClassVar[Membership]
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_IDLE: WorkerState
WORKER_STATE_LOADING: WorkerState
WORKER_STATE_TRAINING: WorkerState
WORKER_STATE_CHECKPOINTING: WorkerState
WORKER_STATE_WAITING: WorkerState
WORKER_STATE_RECOVERING: WorkerState
WORKER_STATE_FINISHED: WorkerState
CLAIM_OUTCOME_UNSPECIFIED: ClaimOutcome
CLAIM_OUTCOME_GRANTED: ClaimOutcome
CLAIM_OUTCOME_MOVED: ClaimOutcome
CLAIM_OUTCOME_COMPLETE: ClaimOutcome
CLAIM_OUTCOME_WAITING: ClaimOutcome
BARRIER_OUTCOME_UNSPECIFIED: BarrierOutcome
BARRIER_OUTCOME_COMPLETED: BarrierOutcome
BARRIER_OUTCOME_MEMBERSHIP_CHANGED: BarrierOutcome
BARRIER_OUTCOME_TIMED_OUT: BarrierOutcome
CHECKPOINT_CONDITION_UNSPECIFIED: CheckpointCondition
CHECKPOINT_CONDITION_GOOD: CheckpointCondition
CHECKPOINT_CONDITION_DAMAGED: CheckpointCondition
CHECKPOINT_CONDITION_REMOVED: CheckpointCondition
CHECKPOINT_STATUS_UNSPECIFIED: CheckpointStatus
CHECKPOINT_STATUS_COMMITTED: CheckpointStatus
CHECKPOINT_STATUS_PENDING: CheckpointStatus
CHECKPOINT_STATUS_ABORTED: CheckpointStatus
MEMBERSHIP_UNSPECIFIED: Membership
MEMBERSHIP_EXPECTED: Membership
MEMBERSHIP_LIVE: Membership
MEMBERSHIP_DEAD: Membership
MEMBERSHIP_LEFT: Membership

class WorkerInfo(_message.Message):
    __slots__ = ("worker_id", "hostname", "port", "gpu_count", "memory_bytes", "metadata", "job", "rank", "world_size", "session", "process", "attempt", "state_id", "machine", "pid", "process_started", "previous_incarnation", "previous_generation", "previous_attempts")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    HOSTNAME_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    GPU_COUNT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STATE_ID_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    PROCESS_STARTED_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_GENERATION_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    hostname: str
    port: int
    gpu_count: int
    memory_bytes: int
    metadata: _containers.ScalarMap[str, str]
    job: str
    rank: int
    world_size: int
    session: str
    process: str
    attempt: int
    state_id: str
    machine: str
    pid: int
    process_started: int
    previous_incarnation: int
    previous_generation: int
    previous_attempts: int
    def __init__(self, worker_id: _Optional[str] = ..., hostname: _Optional[str] = ..., port: _Optional[int] = ..., gpu_count: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., metadata: _Optional[_Mapping[str, str]] = ..., job: _Optional[str] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., session: _Optional[str] = ..., process: _Optional[str] = ..., attempt: _Optional[int] = ..., state_id: _Optional[str] = ..., machine: _Optional[str] = ..., pid: _Optional[int] = ..., process_started: _Optional[int] = ..., previous_incarnation: _Optional[int] = ..., previous_generation: _Optional[int] = ..., previous_attempts: _Optional[int] = ...) -> None: ...

class ProcessesRequest(_message.Message):
    __slots__ = ("job", "machine", "pid", "process_started")
    JOB_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    PROCESS_STARTED_FIELD_NUMBER: _ClassVar[int]
    job: str
    machine: str
    pid: int
    process_started: int
    def __init__(self, job: _Optional[str] = ..., machine: _Optional[str] = ..., pid: _Optional[int] = ..., process_started: _Optional[int] = ...) -> None: ...

class MemberProcess(_message.Message):
    __slots__ = ("worker_id", "rank", "incarnation", "pid", "process_started")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    PROCESS_STARTED_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    rank: int
    incarnation: int
    pid: int
    process_started: int
    def __init__(self, worker_id: _Optional[str] = ..., rank: _Optional[int] = ..., incarnation: _Optional[int] = ..., pid: _Optional[int] = ..., process_started: _Optional[int] = ...) -> None: ...

class ProcessList(_message.Message):
    __slots__ = ("processes",)
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    processes: _containers.RepeatedCompositeFieldContainer[MemberProcess]
    def __init__(self, processes: _Optional[_Iterable[_Union[MemberProcess, _Mapping]]] = ...) -> None: ...

class EndedProcesses(_message.Message):
    __slots__ = ("job", "machine", "incarnations")
    JOB_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    INCARNATIONS_FIELD_NUMBER: _ClassVar[int]
    job: str
    machine: str
    incarnations: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, job: _Optional[str] = ..., machine: _Optional[str] = ..., incarnations: _Optional[_Iterable[int]] = ...) -> None: ...

class EndedProcessesReported(_message.Message):
    __slots__ = ("count",)
    COUNT_FIELD_NUMBER: _ClassVar[int]
    count: int
    def __init__(self, count: _Optional[int] = ...) -> None: ...

class WorkerRegistration(_message.Message):
    __slots__ = ("worker_id", "rank", "incarnation", "generation", "world_size", "live_workers", "heartbeat_interval_ms", "heartbeat_timeout_ms", "job", "state_id")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    LIVE_WORKERS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    STATE_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    rank: int
    incarnation: int
    generation: int
    world_size: int
    live_workers: int
    heartbeat_interval_ms: int
    heartbeat_timeout_ms: int
    job: str
    state_id: str
    def __init__(self, worker_id: _Optional[str] = ..., rank: _Optional[int] = ..., incarnation: _Optional[int] = ..., generation: _Optional[int] = ..., world_size: _Optional[int] = ..., live_workers: _Optional[int] = ..., heartbeat_interval_ms: _Optional[int] = ..., heartbeat_timeout_ms: _Optional[int] = ..., job: _Optional[str] = ..., state_id: _Optional[str] = ...) -> None: ...

class GpuUsage(_message.Message):
    __slots__ = ("index", "utilization_percent", "memory_used_bytes", "memory_total_bytes", "temperature_celsius")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    UTILIZATION_PERCENT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_CELSIUS_FIELD_NUMBER: _ClassVar[int]
    index: int
    utilization_percent: float
    memory_used_bytes: int
    memory_total_bytes: int
    temperature_celsius: float
    def __init__(self, index: _Optional[int] = ..., utilization_percent: _Optional[float] = ..., memory_used_bytes: _Optional[int] = ..., memory_total_bytes: _Optional[int] = ..., temperature_celsius: _Optional[float] = ...) -> None: ...

class ResourceUsage(_message.Message):
    __slots__ = ("cpu_percent", "memory_used_bytes", "memory_total_bytes", "gpus")
    CPU_PERCENT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    cpu_percent: float
    memory_used_bytes: int
    memory_total_bytes: int
    gpus: _containers.RepeatedCompositeFieldContainer[GpuUsage]
    def __init__(self, cpu_percent: _Optional[float] = ..., memory_used_bytes: _Optional[int] = ..., memory_total_bytes: _Optional[int] = ..., gpus: _Optional[_Iterable[_Union[GpuUsage, _Mapping]]] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("worker_id", "job", "incarnation", "state", "step", "epoch", "resources", "metrics", "step_seconds", "samples", "state_id", "known_losses")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RESOURCES_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    STATE_ID_FIELD_NUMBER: _ClassVar[int]
    KNOWN_LOSSES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    job: str
    incarnation: int
    state: WorkerState
    step: int
    epoch: int
    resources: ResourceUsage
    metrics: _containers.ScalarMap[str, float]
    step_seconds: float
    samples: int
    state_id: str
    known_losses: int
    def __init__(self, worker_id: _Optional[str] = ..., job: _Optional[str] = ..., incarnation: _Optional[int] = ..., state: _Optional[_Union[WorkerState, str]] = ..., step: _Optional[int] = ..., epoch: _Optional[int] = ..., resources: _Optional[_Union[ResourceUsage, _Mapping]] = ..., metrics: _Optional[_Mapping[str, float]] = ..., step_seconds: _Optional[float] = ..., samples: _Optional[int] = ..., state_id: _Optional[str] = ..., known_losses: _Optional[int] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("generation", "heartbeat_interval_ms", "live_workers", "actions", "lost_generation", "lost")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    LIVE_WORKERS_FIELD_NUMBER: _ClassVar[int]
    ACTIONS_FIELD_NUMBER: _ClassVar[int]
    LOST_GENERATION_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    generation: int
    heartbeat_interval_ms: int
    live_workers: int
    actions: _containers.RepeatedCompositeFieldContainer[Action]
    lost_generation: int
    lost: _containers.RepeatedCompositeFieldContainer[LostWorker]
    def __init__(self, generation: _Optional[int] = ..., heartbeat_interval_ms: _Optional[int] = ..., live_workers: _Optional[int] = ..., actions: _Optional[_Iterable[_Union[Action, _Mapping]]] = ..., lost_generation: _Optional[int] = ..., lost: _Optional[_Iterable[_Union[LostWorker, _Mapping]]] = ...) -> None: ...

class DeregisterRequest(_message.Message):
    __slots__ = ("worker_id", "job", "incarnation", "reason", "state_id")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STATE_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    job: str
    incarnation: int
    reason: str
    state_id: str
    def __init__(self, worker_id: _Optional[str] = ..., job: _Optional[str] = ..., incarnation: _Optional[int] = ..., reason: _Optional[str] = ..., state_id: _Optional[str] = ...) -> None: ...

class DeregisterResponse(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    def __init__(self, generation: _Optional[int] = ...) -> None: ...

class DatasetInfo(_message.Message):
    __slots__ = ("dataset_id", "path", "format", "total_samples", "shard_size", "shuffle", "seed", "metadata", "job", "layout", "index", "shard_count", "exact")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SHARD_SIZE_FIELD_NUMBER: _ClassVar[int]
    SHUFFLE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SHARD_COUNT_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    dataset_id: str
    path: str
    format: str
    total_samples: int
    shard_size: int
    shuffle: bool
    seed: int
    metadata: _containers.ScalarMap[str, str]
    job: str
    layout: DatasetLayout
    index: bytes
    shard_count: int
    exact: bool
    def __init__(self, dataset_id: _Optional[str] = ..., path: _Optional[str] = ..., format: _Optional[str] = ..., total_samples: _Optional[int] = ..., shard_size: _Optional[int] = ..., shuffle: bool = ..., seed: _Optional[int] = ..., metadata: _Optional[_Mapping[str, str]] = ..., job: _Optional[str] = ..., layout: _Optional[_Union[DatasetLayout, _Mapping]] = ..., index: _Optional[bytes] = ..., shard_count: _Optional[int] = ..., exact: bool = ...) -> None: ...

class DatasetLayout(_message.Message):
    __slots__ = ("fingerprint", "shard_samples", "shard_bytes", "root", "files", "file_samples", "total_bytes", "columns", "options")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SHARD_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SHARD_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    FILE_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    shard_samples: _containers.RepeatedScalarFieldContainer[int]
    shard_bytes: _containers.RepeatedScalarFieldContainer[int]
    root: str
    files: _containers.RepeatedScalarFieldContainer[str]
    file_samples: _containers.RepeatedScalarFieldContainer[int]
    total_bytes: int
    columns: _containers.RepeatedScalarFieldContainer[str]
    options: str
    def __init__(self, fingerprint: _Optional[str] = ..., shard_samples: _Optional[_Iterable[int]] = ..., shard_bytes: _Optional[_Iterable[int]] = ..., root: _Optional[str] = ..., files: _Optional[_Iterable[str]] = ..., file_samples: _Optional[_Iterable[int]] = ..., total_bytes: _Optional[int] = ..., columns: _Optional[_Iterable[str]] = ..., options: _Optional[str] = ...) -> None: ...

class DatasetRequest(_message.Message):
    __slots__ = ("dataset_id", "job", "full", "order")
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    dataset_id: str
    job: str
    full: bool
    order: str
    def __init__(self, dataset_id: _Optional[str] = ..., job: _Optional[str] = ..., full: bool = ..., order: _Optional[str] = ...) -> None: ...

class DatasetDescription(_message.Message):
    __slots__ = ("found", "dataset", "generation", "slot_count", "dead_slots", "state_id", "order")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    DATASET_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SLOT_COUNT_FIELD_NUMBER: _ClassVar[int]
    DEAD_SLOTS_FIELD_NUMBER: _ClassVar[int]
    STATE_ID_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    found: bool
    dataset: DatasetInfo
    generation: int
    slot_count: int
    dead_slots: _containers.RepeatedScalarFieldContainer[int]
    state_id: str
    order: str
    def __init__(self, found: bool = ..., dataset: _Optional[_Union[DatasetInfo, _Mapping]] = ..., generation: _Optional[int] = ..., slot_count: _Optional[int] = ..., dead_slots: _Optional[_Iterable[int]] = ..., state_id: _Optional[str] = ..., order: _Optional[str] = ...) -> None: ...

class DatasetRegistration(_message.Message):
    __slots__ = ("dataset_id", "shard_count", "created", "state_id")
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    SHARD_COUNT_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    STATE_ID_FIELD_NUMBER: _ClassVar[int]
    dataset_id: str
    shard_count: int
    created: bool
    state_id: str
    def __init__(self, dataset_id: _Optional[str] = ..., shard_count: _Optional[int] = ..., created: bool = ..., state_id: _Optional[str] = ...) -> None: ...

class ShardRequest(_message.Message):
    __slots__ = ("dataset_id", "worker_id", "epoch", "job", "index", "incarnation")
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    dataset_id: str
    worker_id: str
    epoch: int
    job: str
    index: int
    incarnation: int
    def __init__(self, dataset_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., job: _Optional[str] = ..., index: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class ShardAssignment(_message.Message):
    __slots__ = ("shard_id", "file_paths", "start_sample", "end_sample", "shard_count", "generation", "row_starts", "row_counts")
    SHARD_ID_FIELD_NUMBER: _ClassVar[int]
    FILE_PATHS_FIELD_NUMBER: _ClassVar[int]
    START_SAMPLE_FIELD_NUMBER: _ClassVar[int]
    END_SAMPLE_FIELD_NUMBER: _ClassVar[int]
    SHARD_COUNT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ROW_STARTS_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNTS_FIELD_NUMBER: _ClassVar[int]
    shard_id: int
    file_paths: _containers.RepeatedScalarFieldContainer[str]
    start_sample: int
    end_sample: int
    shard_count: int
    generation: int
    row_starts: _containers.RepeatedScalarFieldContainer[int]
    row_counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, shard_id: _Optional[int] = ..., file_paths: _Optional[_Iterable[str]] = ..., start_sample: _Optional[int] = ..., end_sample: _Optional[int] = ..., shard_count: _Optional[int] = ..., generation: _Optional[int] = ..., row_starts: _Optional[_Iterable[int]] = ..., row_counts: _Optional[_Iterable[int]] = ...) -> None: ...

class ShardListRequest(_message.Message):
    __slots__ = ("dataset_id", "worker_id", "rank", "epoch", "job", "world_size", "incarnation")
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    dataset_id: str
    worker_id: str
    rank: int
    epoch: int
    job: str
    world_size: int
    incarnation: int
    def __init__(self, dataset_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., rank: _Optional[int] = ..., epoch: _Optional[int] = ..., job: _Optional[str] = ..., world_size: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class ShardList(_message.Message):
    __slots__ = ("shards", "generation")
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    shards: _containers.RepeatedCompositeFieldContainer[ShardAssignment]
    generation: int
    def __init__(self, shards: _Optional[_Iterable[_Union[ShardAssignment, _Mapping]]] = ..., generation: _Optional[int] = ...) -> None: ...

class FileListRequest(_message.Message):
    __slots__ = ("dataset_id", "worker_id", "rank", "epoch", "job", "world_size", "incarnation")
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    dataset_id: str
    worker_id: str
    rank: int
    epoch: int
    job: str
    world_size: int
    incarnation: int
    def __init__(self, dataset_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., rank: _Optional[int] = ..., epoch: _Optional[int] = ..., job: _Optional[str] = ..., world_size: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class FileList(_message.Message):
    __slots__ = ("file_paths", "row_counts", "generation", "file_count", "worker_count")
    FILE_PATHS_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNTS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    FILE_COUNT_FIELD_NUMBER: _ClassVar[int]
    WORKER_COUNT_FIELD_NUMBER: _ClassVar[int]
    file_paths: _containers.RepeatedScalarFieldContainer[str]
    row_counts: _containers.RepeatedScalarFieldContainer[int]
    generation: int
    file_count: int
    worker_count: int
    def __init__(self, file_paths: _Optional[_Iterable[str]] = ..., row_counts: _Optional[_Iterable[int]] = ..., generation: _Optional[int] = ..., file_count: _Optional[int] = ..., worker_count: _Optional[int] = ...) -> None: ...

class DatasetList(_message.Message):
    __slots__ = ("datasets",)
    DATASETS_FIELD_NUMBER: _ClassVar[int]
    datasets: _containers.RepeatedCompositeFieldContainer[DatasetInfo]
    def __init__(self, datasets: _Optional[_Iterable[_Union[DatasetInfo, _Mapping]]] = ...) -> None: ...

class EpochSegment(_message.Message):
    __slots__ = ("slot_count", "dead_slots", "weights", "taken", "taken_back")
    SLOT_COUNT_FIELD_NUMBER: _ClassVar[int]
    DEAD_SLOTS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    TAKEN_BACK_FIELD_NUMBER: _ClassVar[int]
    slot_count: int
    dead_slots: _containers.RepeatedScalarFieldContainer[int]
    weights: _containers.RepeatedScalarFieldContainer[int]
    taken: _containers.RepeatedScalarFieldContainer[int]
    taken_back: _containers.RepeatedCompositeFieldContainer[TakenBack]
    def __init__(self, slot_count: _Optional[int] = ..., dead_slots: _Optional[_Iterable[int]] = ..., weights: _Optional[_Iterable[int]] = ..., taken: _Optional[_Iterable[int]] = ..., taken_back: _Optional[_Iterable[_Union[TakenBack, _Mapping]]] = ...) -> None: ...

class TakenBack(_message.Message):
    __slots__ = ("segment", "slot", "start", "stop")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    segment: int
    slot: int
    start: int
    stop: int
    def __init__(self, segment: _Optional[int] = ..., slot: _Optional[int] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class ClaimRequest(_message.Message):
    __slots__ = ("job", "worker_id", "incarnation", "dataset_id", "epoch", "plan", "segment", "upto", "length", "timeout_ms", "known", "commit_segment", "commit_position", "commit_digest", "state_id")
    JOB_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    UPTO_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    COMMIT_SEGMENT_FIELD_NUMBER: _ClassVar[int]
    COMMIT_POSITION_FIELD_NUMBER: _ClassVar[int]
    COMMIT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    STATE_ID_FIELD_NUMBER: _ClassVar[int]
    job: str
    worker_id: str
    incarnation: int
    dataset_id: str
    epoch: int
    plan: str
    segment: int
    upto: int
    length: int
    timeout_ms: int
    known: int
    commit_segment: int
    commit_position: int
    commit_digest: bytes
    state_id: str
    def __init__(self, job: _Optional[str] = ..., worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., dataset_id: _Optional[str] = ..., epoch: _Optional[int] = ..., plan: _Optional[str] = ..., segment: _Optional[int] = ..., upto: _Optional[int] = ..., length: _Optional[int] = ..., timeout_ms: _Optional[int] = ..., known: _Optional[int] = ..., commit_segment: _Optional[int] = ..., commit_position: _Optional[int] = ..., commit_digest: _Optional[bytes] = ..., state_id: _Optional[str] = ...) -> None: ...

class ClaimResponse(_message.Message):
    __slots__ = ("outcome", "segments", "generation", "unfinished", "slot", "claimed", "committed_segment", "committed_position", "committed_digest")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    UNFINISHED_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    CLAIMED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_SEGMENT_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_POSITION_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_DIGEST_FIELD_NUMBER: _ClassVar[int]
    outcome: ClaimOutcome
    segments: _containers.RepeatedCompositeFieldContainer[EpochSegment]
    generation: int
    unfinished: _containers.RepeatedScalarFieldContainer[int]
    slot: int
    claimed: int
    committed_segment: int
    committed_position: int
    committed_digest: bytes
    def __init__(self, outcome: _Optional[_Union[ClaimOutcome, str]] = ..., segments: _Optional[_Iterable[_Union[EpochSegment, _Mapping]]] = ..., generation: _Optional[int] = ..., unfinished: _Optional[_Iterable[int]] = ..., slot: _Optional[int] = ..., claimed: _Optional[int] = ..., committed_segment: _Optional[int] = ..., committed_position: _Optional[int] = ..., committed_digest: _Optional[bytes] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("job", "worker_id", "incarnation", "dataset_id", "epoch", "segment", "position", "digest", "state_id")
    JOB_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    STATE_ID_FIELD_NUMBER: _ClassVar[int]
    job: str
    worker_id: str
    incarnation: int
    dataset_id: str
    epoch: int
    segment: int
    position: int
    digest: bytes
    state_id: str
    def __init__(self, job: _Optional[str] = ..., worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., dataset_id: _Optional[str] = ..., epoch: _Optional[int] = ..., segment: _Optional[int] = ..., position: _Optional[int] = ..., digest: _Optional[bytes] = ..., state_id: _Optional[str] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("generation", "segment")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    generation: int
    segment: int
    def __init__(self, generation: _Optional[int] = ..., segment: _Optional[int] = ...) -> None: ...

class RebalanceRequest(_message.Message):
    __slots__ = ("job", "dataset_id", "epoch", "weights")
    class WeightsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    JOB_FIELD_NUMBER: _ClassVar[int]
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    job: str
    dataset_id: str
    epoch: int
    weights: _containers.ScalarMap[int, int]
    def __init__(self, job: _Optional[str] = ..., dataset_id: _Optional[str] = ..., epoch: _Optional[int] = ..., weights: _Optional[_Mapping[int, int]] = ...) -> None: ...

class RebalanceResponse(_message.Message):
    __slots__ = ("segment", "weights")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    segment: int
    weights: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, segment: _Optional[int] = ..., weights: _Optional[_Iterable[int]] = ...) -> None: ...

class CoverageReport(_message.Message):
    __slots__ = ("job", "worker_id", "incarnation", "dataset_id", "epoch", "base", "assumed", "world_size", "digest", "dropped", "expected", "generation", "loads", "ended", "state_id", "order")
    JOB_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    ASSUMED_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    STATE_ID_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    job: str
    worker_id: str
    incarnation: int
    dataset_id: str
    epoch: int
    base: bytes
    assumed: int
    world_size: int
    digest: bytes
    dropped: int
    expected: int
    generation: int
    loads: int
    ended: bool
    state_id: str
    order: str
    def __init__(self, job: _Optional[str] = ..., worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., dataset_id: _Optional[str] = ..., epoch: _Optional[int] = ..., base: _Optional[bytes] = ..., assumed: _Optional[int] = ..., world_size: _Optional[int] = ..., digest: _Optional[bytes] = ..., dropped: _Optional[int] = ..., expected: _Optional[int] = ..., generation: _Optional[int] = ..., loads: _Optional[int] = ..., ended: bool = ..., state_id: _Optional[str] = ..., order: _Optional[str] = ...) -> None: ...

class CoverageReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CoverageRequest(_message.Message):
    __slots__ = ("job", "dataset_id", "epoch")
    JOB_FIELD_NUMBER: _ClassVar[int]
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    job: str
    dataset_id: str
    epoch: int
    def __init__(self, job: _Optional[str] = ..., dataset_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class Coverage(_message.Message):
    __slots__ = ("epoch", "digest", "assumed", "dropped", "expected", "complete", "workers", "segments", "ended_incomplete")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ASSUMED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    ENDED_INCOMPLETE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    digest: bytes
    assumed: int
    dropped: int
    expected: int
    complete: bool
    workers: int
    segments: int
    ended_incomplete: bool
    def __init__(self, epoch: _Optional[int] = ..., digest: _Optional[bytes] = ..., assumed: _Optional[int] = ..., dropped: _Optional[int] = ..., expected: _Optional[int] = ..., complete: bool = ..., workers: _Optional[int] = ..., segments: _Optional[int] = ..., ended_incomplete: bool = ...) -> None: ...

class CoverageList(_message.Message):
    __slots__ = ("epochs",)
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    epochs: _containers.RepeatedCompositeFieldContainer[Coverage]
    def __init__(self, epochs: _Optional[_Iterable[_Union[Coverage, _Mapping]]] = ...) -> None: ...

class BarrierRequest(_message.Message):
    __slots__ = ("barrier_id", "worker_id", "job", "incarnation", "generation", "ticket", "timeout_ms", "payload", "ranks", "state_id")
    BARRIER_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    STATE_ID_FIELD_NUMBER: _ClassVar[int]
    barrier_id: str
    worker_id: str
    job: str
    incarnation: int
    generation: int
    ticket: int
    timeout_ms: int
    payload: bytes
    ranks: _containers.RepeatedScalarFieldContainer[int]
    state_id: str
    def __init__(self, barrier_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., job: _Optional[str] = ..., incarnation: _Optional[int] = ..., generation: _Optional[int] = ..., ticket: _Optional[int] = ..., timeout_ms: _Optional[int] = ..., payload: _Optional[bytes] = ..., ranks: _Optional[_Iterable[int]] = ..., state_id: _Optional[str] = ...) -> None: ...

class MissingWorker(_message.Message):
    __slots__ = ("worker_id", "rank", "last_step", "registered")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    rank: int
    last_step: int
    registered: bool
    def __init__(self, worker_id: _Optional[str] = ..., rank: _Optional[int] = ..., last_step: _Optional[int] = ..., registered: bool = ...) -> None: ...

class LostWorker(_message.Message):
    __slots__ = ("worker_id", "rank", "reason", "generation")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    rank: int
    reason: str
    generation: int
    def __init__(self, worker_id: _Optional[str] = ..., rank: _Optional[int] = ..., reason: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class BarrierResponse(_message.Message):
    __slots__ = ("outcome", "round", "generation", "participants", "missing", "missing_count", "lost", "survivors", "values", "left_out")
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: bytes
        def __init__(self, key: _Optional[int] = ..., value: _Optional[bytes] = ...) -> None: ...
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PARTICIPANTS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    MISSING_COUNT_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    SURVIVORS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    outcome: BarrierOutcome
    round: int
    generation: int
    participants: int
    missing: _containers.RepeatedCompositeFieldContainer[MissingWorker]
    missing_count: int
    lost: _containers.RepeatedCompositeFieldContainer[LostWorker]
    survivors: _containers.RepeatedScalarFieldContainer[int]
    values: _containers.ScalarMap[int, bytes]
    left_out: int
    def __init__(self, outcome: _Optional[_Union[BarrierOutcome, str]] = ..., round: _Optional[int] = ..., generation: _Optional[int] = ..., participants: _Optional[int] = ..., missing: _Optional[_Iterable[_Union[MissingWorker, _Mapping]]] = ..., missing_count: _Optional[int] = ..., lost: _Optional[_Iterable[_Union[LostWorker, _Mapping]]] = ..., survivors: _Optional[_Iterable[int]] = ..., values: _Optional[_Mapping[int, bytes]] = ..., left_out: _Optional[int] = ...) -> None: ...

class BeginCheckpointRequest(_message.Message):
    __slots__ = ("job", "worker_id", "incarnation", "step", "ticket", "ranks", "state_id")
    JOB_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    STATE_ID_FIELD_NUMBER: _ClassVar[int]
    job: str
    worker_id: str
    incarnation: int
    step: int
    ticket: int
    ranks: _containers.RepeatedScalarFieldContainer[int]
    state_id: str
    def __init__(self, job: _Optional[str] = ..., worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., step: _Optional[int] = ..., ticket: _Optional[int] = ..., ranks: _Optional[_Iterable[int]] = ..., state_id: _Optional[str] = ...) -> None: ...

class AbandonRequest(_message.Message):
    __slots__ = ("job", "worker_id", "incarnation", "state_id")
    JOB_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STATE_ID_FIELD_NUMBER: _ClassVar[int]
    job: str
    worker_id: str
    incarnation: int
    state_id: str
    def __init__(self, job: _Optional[str] = ..., worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., state_id: _Optional[str] = ...) -> None: ...

class Abandoned(_message.Message):
    __slots__ = ("count",)
    COUNT_FIELD_NUMBER: _ClassVar[int]
    count: int
    def __init__(self, count: _Optional[int] = ...) -> None: ...

class BeginCheckpointResponse(_message.Message):
    __slots__ = ("checkpoint_id", "generation", "ranks")
    CHECKPOINT_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    checkpoint_id: str
    generation: int
    ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, checkpoint_id: _Optional[str] = ..., generation: _Optional[int] = ..., ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class CheckpointInfo(_message.Message):
    __slots__ = ("checkpoint_id", "worker_id", "step", "epoch", "path", "size_bytes", "is_full", "metadata", "job", "incarnation", "generation", "partial", "timeout_ms", "committed_at", "parts", "verified", "verified_at", "verified_by", "will_be_dropped", "state_id")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CHECKPOINT_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    IS_FULL_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_AT_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_AT_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_BY_FIELD_NUMBER: _ClassVar[int]
    WILL_BE_DROPPED_FIELD_NUMBER: _ClassVar[int]
    STATE_ID_FIELD_NUMBER: _ClassVar[int]
    checkpoint_id: str
    worker_id: str
    step: int
    epoch: int
    path: str
    size_bytes: int
    is_full: bool
    metadata: _containers.ScalarMap[str, str]
    job: str
    incarnation: int
    generation: int
    partial: bool
    timeout_ms: int
    committed_at: float
    parts: int
    verified: bool
    verified_at: float
    verified_by: str
    will_be_dropped: bool
    state_id: str
    def __init__(self, checkpoint_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., step: _Optional[int] = ..., epoch: _Optional[int] = ..., path: _Optional[str] = ..., size_bytes: _Optional[int] = ..., is_full: bool = ..., metadata: _Optional[_Mapping[str, str]] = ..., job: _Optional[str] = ..., incarnation: _Optional[int] = ..., generation: _Optional[int] = ..., partial: bool = ..., timeout_ms: _Optional[int] = ..., committed_at: _Optional[float] = ..., parts: _Optional[int] = ..., verified: bool = ..., verified_at: _Optional[float] = ..., verified_by: _Optional[str] = ..., will_be_dropped: bool = ..., state_id: _Optional[str] = ...) -> None: ...

class CheckpointReport(_message.Message):
    __slots__ = ("job", "checkpoint_ids", "path", "condition", "detail", "reported_by", "incarnation", "state_id")
    JOB_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_IDS_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    CONDITION_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    REPORTED_BY_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STATE_ID_FIELD_NUMBER: _ClassVar[int]
    job: str
    checkpoint_ids: _containers.RepeatedScalarFieldContainer[str]
    path: str
    condition: CheckpointCondition
    detail: str
    reported_by: str
    incarnation: int
    state_id: str
    def __init__(self, job: _Optional[str] = ..., checkpoint_ids: _Optional[_Iterable[str]] = ..., path: _Optional[str] = ..., condition: _Optional[_Union[CheckpointCondition, str]] = ..., detail: _Optional[str] = ..., reported_by: _Optional[str] = ..., incarnation: _Optional[int] = ..., state_id: _Optional[str] = ...) -> None: ...

class CheckpointsReported(_message.Message):
    __slots__ = ("known",)
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    known: int
    def __init__(self, known: _Optional[int] = ...) -> None: ...

class CheckpointResponse(_message.Message):
    __slots__ = ("status", "checkpoint_id", "generation", "missing_ranks", "detail")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MISSING_RANKS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    status: CheckpointStatus
    checkpoint_id: str
    generation: int
    missing_ranks: _containers.RepeatedScalarFieldContainer[int]
    detail: str
    def __init__(self, status: _Optional[_Union[CheckpointStatus, str]] = ..., checkpoint_id: _Optional[str] = ..., generation: _Optional[int] = ..., missing_ranks: _Optional[_Iterable[int]] = ..., detail: _Optional[str] = ...) -> None: ...

class RecoveryRequest(_message.Message):
    __slots__ = ("job", "worker_id")
    JOB_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    job: str
    worker_id: str
    def __init__(self, job: _Optional[str] = ..., worker_id: _Optional[str] = ...) -> None: ...

class RecoveryInfo(_message.Message):
    __slots__ = ("found", "checkpoint", "generation")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    found: bool
    checkpoint: CheckpointInfo
    generation: int
    def __init__(self, found: bool = ..., checkpoint: _Optional[_Union[CheckpointInfo, _Mapping]] = ..., generation: _Optional[int] = ...) -> None: ...

class CheckpointList(_message.Message):
    __slots__ = ("checkpoints",)
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    checkpoints: _containers.RepeatedCompositeFieldContainer[CheckpointInfo]
    def __init__(self, checkpoints: _Optional[_Iterable[_Union[CheckpointInfo, _Mapping]]] = ...) -> None: ...

class ActionRequest(_message.Message):
    __slots__ = ("job", "kind", "worker_id", "reason", "requested_by", "incarnation", "state_id")
    JOB_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_BY_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STATE_ID_FIELD_NUMBER: _ClassVar[int]
    job: str
    kind: str
    worker_id: str
    reason: str
    requested_by: str
    incarnation: int
    state_id: str
    def __init__(self, job: _Optional[str] = ..., kind: _Optional[str] = ..., worker_id: _Optional[str] = ..., reason: _Optional[str] = ..., requested_by: _Optional[str] = ..., incarnation: _Optional[int] = ..., state_id: _Optional[str] = ...) -> None: ...

class Action(_message.Message):
    __slots__ = ("action_id", "kind", "worker_id", "reason", "requested_at", "requested_by")
    ACTION_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_AT_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_BY_FIELD_NUMBER: _ClassVar[int]
    action_id: str
    kind: str
    worker_id: str
    reason: str
    requested_at: float
    requested_by: str
    def __init__(self, action_id: _Optional[str] = ..., kind: _Optional[str] = ..., worker_id: _Optional[str] = ..., reason: _Optional[str] = ..., requested_at: _Optional[float] = ..., requested_by: _Optional[str] = ...) -> None: ...

class ActionCompletion(_message.Message):
    __slots__ = ("job", "action_id", "outcome", "completed_by", "incarnation", "state_id")
    JOB_FIELD_NUMBER: _ClassVar[int]
    ACTION_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_BY_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STATE_ID_FIELD_NUMBER: _ClassVar[int]
    job: str
    action_id: str
    outcome: str
    completed_by: str
    incarnation: int
    state_id: str
    def __init__(self, job: _Optional[str] = ..., action_id: _Optional[str] = ..., outcome: _Optional[str] = ..., completed_by: _Optional[str] = ..., incarnation: _Optional[int] = ..., state_id: _Optional[str] = ...) -> None: ...

class ActionCompleted(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ActionList(_message.Message):
    __slots__ = ("actions",)
    ACTIONS_FIELD_NUMBER: _ClassVar[int]
    actions: _containers.RepeatedCompositeFieldContainer[Action]
    def __init__(self, actions: _Optional[_Iterable[_Union[Action, _Mapping]]] = ...) -> None: ...

class JobRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("job", "worker_id", "from_rank", "limit")
    JOB_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    FROM_RANK_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    job: str
    worker_id: str
    from_rank: int
    limit: int
    def __init__(self, job: _Optional[str] = ..., worker_id: _Optional[str] = ..., from_rank: _Optional[int] = ..., limit: _Optional[int] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("worker_id", "rank", "incarnation", "membership", "state", "step", "epoch", "heartbeat_age_seconds", "resources", "metrics", "hostname", "port", "gpu_count", "memory_bytes", "metadata", "registered_at", "detail", "process", "step_seconds", "slowness", "is_straggler")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RESOURCES_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    HOSTNAME_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    GPU_COUNT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    REGISTERED_AT_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SLOWNESS_FIELD_NUMBER: _ClassVar[int]
    IS_STRAGGLER_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    rank: int
    incarnation: int
    membership: Membership
    state: WorkerState
    step: int
    epoch: int
    heartbeat_age_seconds: float
    resources: ResourceUsage
    metrics: _containers.ScalarMap[str, float]
    hostname: str
    port: int
    gpu_count: int
    memory_bytes: int
    metadata: _containers.ScalarMap[str, str]
    registered_at: float
    detail: str
    process: str
    step_seconds: float
    slowness: float
    is_straggler: bool
    def __init__(self, worker_id: _Optional[str] = ..., rank: _Optional[int] = ..., incarnation: _Optional[int] = ..., membership: _Optional[_Union[Membership, str]] = ..., state: _Optional[_Union[WorkerState, str]] = ..., step: _Optional[int] = ..., epoch: _Optional[int] = ..., heartbeat_age_seconds: _Optional[float] = ..., resources: _Optional[_Union[ResourceUsage, _Mapping]] = ..., metrics: _Optional[_Mapping[str, float]] = ..., hostname: _Optional[str] = ..., port: _Optional[int] = ..., gpu_count: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., metadata: _Optional[_Mapping[str, str]] = ..., registered_at: _Optional[float] = ..., detail: _Optional[str] = ..., process: _Optional[str] = ..., step_seconds: _Optional[float] = ..., slowness: _Optional[float] = ..., is_straggler: bool = ...) -> None: ...

class BarrierStatus(_message.Message):
    __slots__ = ("barrier_id", "round", "arrived", "expected", "open_seconds", "missing")
    BARRIER_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    OPEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    barrier_id: str
    round: int
    arrived: int
    expected: int
    open_seconds: float
    missing: _containers.RepeatedCompositeFieldContainer[MissingWorker]
    def __init__(self, barrier_id: _Optional[str] = ..., round: _Optional[int] = ..., arrived: _Optional[int] = ..., expected: _Optional[int] = ..., open_seconds: _Optional[float] = ..., missing: _Optional[_Iterable[_Union[MissingWorker, _Mapping]]] = ...) -> None: ...

class JobStatus(_message.Message):
    __slots__ = ("job", "generation", "world_size", "live_workers", "workers", "next_rank", "barriers", "latest_checkpoint", "epoch", "completed_epochs", "dataset_count", "checkpoint_count", "dead_workers", "actions", "loss_ages_seconds", "checkpoints", "silent_workers", "incomplete_epochs")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    LIVE_WORKERS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    NEXT_RANK_FIELD_NUMBER: _ClassVar[int]
    BARRIERS_FIELD_NUMBER: _ClassVar[int]
    LATEST_CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    DATASET_COUNT_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_COUNT_FIELD_NUMBER: _ClassVar[int]
    DEAD_WORKERS_FIELD_NUMBER: _ClassVar[int]
    ACTIONS_FIELD_NUMBER: _ClassVar[int]
    LOSS_AGES_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    SILENT_WORKERS_FIELD_NUMBER: _ClassVar[int]
    INCOMPLETE_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    job: str
    generation: int
    world_size: int
    live_workers: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    next_rank: int
    barriers: _containers.RepeatedCompositeFieldContainer[BarrierStatus]
    latest_checkpoint: CheckpointInfo
    epoch: int
    completed_epochs: int
    dataset_count: int
    checkpoint_count: int
    dead_workers: int
    actions: _containers.RepeatedCompositeFieldContainer[Action]
    loss_ages_seconds: _containers.RepeatedScalarFieldContainer[float]
    checkpoints: _containers.RepeatedCompositeFieldContainer[CheckpointInfo]
    silent_workers: _containers.RepeatedCompositeFieldContainer[SilentWorker]
    incomplete_epochs: _containers.RepeatedCompositeFieldContainer[IncompleteEpoch]
    def __init__(self, job: _Optional[str] = ..., generation: _Optional[int] = ..., world_size: _Optional[int] = ..., live_workers: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., next_rank: _Optional[int] = ..., barriers: _Optional[_Iterable[_Union[BarrierStatus, _Mapping]]] = ..., latest_checkpoint: _Optional[_Union[CheckpointInfo, _Mapping]] = ..., epoch: _Optional[int] = ..., completed_epochs: _Optional[int] = ..., dataset_count: _Optional[int] = ..., checkpoint_count: _Optional[int] = ..., dead_workers: _Optional[int] = ..., actions: _Optional[_Iterable[_Union[Action, _Mapping]]] = ..., loss_ages_seconds: _Optional[_Iterable[float]] = ..., checkpoints: _Optional[_Iterable[_Union[CheckpointInfo, _Mapping]]] = ..., silent_workers: _Optional[_Iterable[_Union[SilentWorker, _Mapping]]] = ..., incomplete_epochs: _Optional[_Iterable[_Union[IncompleteEpoch, _Mapping]]] = ...) -> None: ...

class SilentWorker(_message.Message):
    __slots__ = ("worker_id", "rank", "heartbeat_age_seconds", "process")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    rank: int
    heartbeat_age_seconds: float
    process: str
    def __init__(self, worker_id: _Optional[str] = ..., rank: _Optional[int] = ..., heartbeat_age_seconds: _Optional[float] = ..., process: _Optional[str] = ...) -> None: ...

class IncompleteEpoch(_message.Message):
    __slots__ = ("dataset_id", "epoch", "missing", "expected")
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    dataset_id: str
    epoch: int
    missing: int
    expected: int
    def __init__(self, dataset_id: _Optional[str] = ..., epoch: _Optional[int] = ..., missing: _Optional[int] = ..., expected: _Optional[int] = ...) -> None: ...

class ListJobsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class JobSummary(_message.Message):
    __slots__ = ("job", "generation", "world_size", "live_workers", "dataset_count", "checkpoint_count", "created_at")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    LIVE_WORKERS_FIELD_NUMBER: _ClassVar[int]
    DATASET_COUNT_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_COUNT_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    job: str
    generation: int
    world_size: int
    live_workers: int
    dataset_count: int
    checkpoint_count: int
    created_at: float
    def __init__(self, job: _Optional[str] = ..., generation: _Optional[int] = ..., world_size: _Optional[int] = ..., live_workers: _Optional[int] = ..., dataset_count: _Optional[int] = ..., checkpoint_count: _Optional[int] = ..., created_at: _Optional[float] = ...) -> None: ...

class RemoveJobRequest(_message.Message):
    __slots__ = ("job", "force")
    JOB_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    job: str
    force: bool
    def __init__(self, job: _Optional[str] = ..., force: bool = ...) -> None: ...

class JobRemoved(_message.Message):
    __slots__ = ("live_workers", "datasets", "checkpoints")
    LIVE_WORKERS_FIELD_NUMBER: _ClassVar[int]
    DATASETS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    live_workers: int
    datasets: int
    checkpoints: int
    def __init__(self, live_workers: _Optional[int] = ..., datasets: _Optional[int] = ..., checkpoints: _Optional[int] = ...) -> None: ...

class RemoveDatasetRequest(_message.Message):
    __slots__ = ("job", "dataset_id", "force")
    JOB_FIELD_NUMBER: _ClassVar[int]
    DATASET_ID_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    job: str
    dataset_id: str
    force: bool
    def __init__(self, job: _Optional[str] = ..., dataset_id: _Optional[str] = ..., force: bool = ...) -> None: ...

class DatasetRemoved(_message.Message):
    __slots__ = ("epochs",)
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    epochs: int
    def __init__(self, epochs: _Optional[int] = ...) -> None: ...

class JobList(_message.Message):
    __slots__ = ("jobs",)
    JOBS_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[JobSummary]
    def __init__(self, jobs: _Optional[_Iterable[_Union[JobSummary, _Mapping]]] = ...) -> None: ...

class ServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MethodMetrics(_message.Message):
    __slots__ = ("method", "calls", "errors", "p50_seconds", "p99_seconds", "bucket_bounds", "bucket_counts", "total_seconds")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    P50_SECONDS_FIELD_NUMBER: _ClassVar[int]
    P99_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BUCKET_BOUNDS_FIELD_NUMBER: _ClassVar[int]
    BUCKET_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    method: str
    calls: int
    errors: int
    p50_seconds: float
    p99_seconds: float
    bucket_bounds: _containers.RepeatedScalarFieldContainer[float]
    bucket_counts: _containers.RepeatedScalarFieldContainer[int]
    total_seconds: float
    def __init__(self, method: _Optional[str] = ..., calls: _Optional[int] = ..., errors: _Optional[int] = ..., p50_seconds: _Optional[float] = ..., p99_seconds: _Optional[float] = ..., bucket_bounds: _Optional[_Iterable[float]] = ..., bucket_counts: _Optional[_Iterable[int]] = ..., total_seconds: _Optional[float] = ...) -> None: ...

class ServerInfo(_message.Message):
    __slots__ = ("version", "term", "started_at", "now", "transport", "methods", "heartbeat_interval_ms", "heartbeat_timeout_ms")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    METHODS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    version: str
    term: int
    started_at: float
    now: float
    transport: str
    methods: _containers.RepeatedCompositeFieldContainer[MethodMetrics]
    heartbeat_interval_ms: int
    heartbeat_timeout_ms: int
    def __init__(self, version: _Optional[str] = ..., term: _Optional[int] = ..., started_at: _Optional[float] = ..., now: _Optional[float] = ..., transport: _Optional[str] = ..., methods: _Optional[_Iterable[_Union[MethodMetrics, _Mapping]]] = ..., heartbeat_interval_ms: _Optional[int] = ..., heartbeat_timeout_ms: _Optional[int] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("job", "after_id", "follow")
    JOB_FIELD_NUMBER: _ClassVar[int]
    AFTER_ID_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    job: str
    after_id: int
    follow: bool
    def __init__(self, job: _Optional[str] = ..., after_id: _Optional[int] = ..., follow: bool = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("id", "at", "job", "kind", "fields")
    class FieldsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    id: int
    at: float
    job: str
    kind: str
    fields: _containers.ScalarMap[str, str]
    def __init__(self, id: _Optional[int] = ..., at: _Optional[float] = ..., job: _Optional[str] = ..., kind: _Optional[str] = ..., fields: _Optional[_Mapping[str, str]] = ...) -> None: ...
