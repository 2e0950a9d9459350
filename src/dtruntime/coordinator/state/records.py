"""Records: what the coordinator remembers across restarts."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...types import WorkerState

S = TypeVar("S", bound=msgspec.Struct)
Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]


class Record(msgspec.Struct, frozen=True):
    """A durable fact; stored as JSON under (kind, job, key)."""


class EpochPart(Record, frozen=True):
    """Something recorded of one epoch of a dataset."""

    dataset_id: str
    epoch: Count


class JobRecord(Record, frozen=True):
    """A job's membership counters."""

    world_size: Count
    """0: elastic."""
    generation: Count
    loss_generation: int
    """The generation that began with the newest loss of a member."""
    next_incarnation: int
    attempt: int = 0
    epoch: int = 0
    completed_epochs: int = 0
    attempts_begun: Count = 0
    """The highest number that an attempt at a checkpoint was given."""
    actions_requested: Count = 0
    """The highest number that an action was given."""
    lost_at: tuple[float, ...] = ()
    """When the newest losses were, in order."""
    created_at: float = 0.0
    """0: before this was recorded."""


class ReportRecord(Record, frozen=True):
    """The last heartbeat of a worker that is gone."""

    state: WorkerState
    step: int | None
    epoch: int
    message: bytes
    """The heartbeat as it came."""
    step_seconds: float = 0.0
    samples: int = 0


class WorkerRecord(Record, frozen=True):
    """Who holds, or last held, a rank."""

    worker_id: str
    rank: Count
    incarnation: Positive
    session: str
    membership: str
    registered_at: float
    detail: str = ""
    hostname: str = ""
    port: int = 0
    process: str = ""
    gpu_count: int = 0
    memory_bytes: int = 0
    metadata: dict[str, str] = {}
    last_heard: int = 0
    """The job's next incarnation when it was last heard; set when it is gone."""
    machine: str = ""
    """Where ``pid`` and ``process_started`` apply; empty: unknown."""
    pid: int = 0
    process_started: int = 0
    heard_at: float = 0.0
    """When it was last heard; set when it is gone. 0: before this was recorded."""
    report: ReportRecord | None = None
    """Set when it is gone; absent: it sent no heartbeat, or before this was recorded."""


_WIDTHS = (1, 2, 4, 8)


class LayoutRecord(msgspec.Struct, frozen=True):
    """What a client found in a dataset's files; the long lists are packed."""

    fingerprint: str
    """Identifies the files and their content."""
    shard_count: int
    shard_samples: bytes
    shard_bytes: bytes
    root: str
    """What all files' names begin with."""
    files: tuple[str, ...]
    file_samples: bytes
    total_bytes: int
    columns: tuple[str, ...] = ()
    options: str = ""

    def __post_init__(self) -> None:
        for name, count in (
            ("shard_samples", self.shard_count),
            ("shard_bytes", self.shard_count),
            ("file_samples", len(self.files)),
        ):
            size = len(getattr(self, name))
            if not count or size not in [count * width for width in _WIDTHS]:
                raise ValueError(f"{name} has {size} bytes for {count} numbers")


def pack(numbers: NDArray[np.uint64]) -> bytes:
    """Integers, each in as few bytes as the largest of them needs."""
    most = int(numbers.max(initial=0))
    width = next(width for width in _WIDTHS if most < 1 << 8 * width)
    return numbers.astype(f"<u{width}").tobytes()


def unpack(data: bytes, count: int) -> NDArray[np.int64]:
    """The ``count`` numbers that :func:`pack` took."""
    return np.frombuffer(data, f"<u{len(data) // count}").astype(np.int64)


class DatasetRecord(Record, frozen=True):
    """A registered dataset."""

    dataset_id: str
    path: str
    format: str
    total_samples: Positive
    shard_size: Positive
    shuffle: bool
    seed: int
    metadata: dict[str, str] = {}
    exact: bool = False
    """Whether shards have exactly ``shard_size`` samples, also where that cuts row groups."""
    layout: LayoutRecord | None = None
    """None: nobody has read the files, and shards follow from the sample count alone."""
    registered_at: float = 0.0

    @property
    def shard_count(self) -> int:
        """How many shards the samples make."""
        if self.layout is not None:
            return self.layout.shard_count
        return -(-self.total_samples // self.shard_size)


class IndexRecord(Record, frozen=True):
    """The loader's index of a dataset's files, opaque to the coordinator."""

    data: bytes


class CheckpointRecord(Record, frozen=True):
    """A committed checkpoint."""

    checkpoint_id: str
    step: int
    epoch: int
    path: str
    size_bytes: int
    is_full: bool
    worker_id: str
    committed_at: float
    parts: int = 1
    metadata: dict[str, str] = {}
    sequence: int = 0
    """Order of commits within the job."""
    newest_part: int = 0
    """The highest incarnation that sent a part; 0: committed by one writer."""
    verified: bool | None = None
    """Whether the last full read found it intact; None: no report yet."""
    verified_at: float = 0.0
    verified_by: str = ""
    """The member that read it; empty: an outsider."""
    removed_at: float = 0.0
    """When it was deleted from storage; 0: it was not. The record stays, so that a repeated commit
    does not bring it back."""


class PartRecord(Record, frozen=True):
    """One rank's part of a checkpoint that is not committed yet."""

    checkpoint_id: str
    incarnation: int
    rank: int
    step: int
    epoch: int
    path: str
    size_bytes: int
    is_full: bool
    metadata: dict[str, str] = {}


class PendingRecord(Record, frozen=True):
    """Which members must send their part before a checkpoint commits."""

    checkpoint_id: str
    step: int
    expected: dict[int, int]
    """Incarnation to rank."""
    generation: int = 0
    """The generation in which it was begun."""


class AttemptRecord(Record, frozen=True):
    """An attempt to save a step together, and the id it was given."""

    checkpoint_id: str
    step: Count
    number: Positive
    """Order in which attempts were begun within the job."""
    generation: int
    """The generation in which it was begun."""
    ranks: tuple[int, ...]
    """Those that have to send a part."""
    ended: str = ""
    """Why it will never be committed, if so."""
    is_late: bool = False
    """Whether it ended as it began, because the others were already ahead."""


class AskRecord(Record, frozen=True):
    """A member asked for an attempt and got its id."""

    checkpoint_id: str
    incarnation: Positive
    ticket: Positive


class RoundRecord(Record, frozen=True, omit_defaults=True):
    """A completed barrier round, kept so that a repeated arrival gets the same answer."""

    barrier_id: str
    round: int
    generation: int
    participants: int
    tickets: dict[int, int]
    """Incarnation to the ticket of its arrival."""
    sequence: int = 0
    values: dict[int, bytes] | None = None
    """The value each participant shared, by rank; None: nobody shared any."""
    left_out: int = 0
    """How many live members did not take part."""


class ActionRecord(Record, frozen=True):
    """A requested action that is not done yet."""

    action_id: str
    number: Positive
    """Order in which actions were requested within the job."""
    kind: str
    requested_at: float
    worker_id: str = ""
    incarnation: int = 0
    """Of the worker that the action is for; 0: it is for the whole job."""
    reason: str = ""
    requested_by: str = ""


class EpochRecord(EpochPart, frozen=True):
    """The ledger of an epoch, without its segments and readers."""

    plan: str
    samples: Positive
    sequence: int
    """Order in which ledgers were begun within the job."""
    segment_count: Positive = 1
    complete: bool = False
    gone: int = 0
    """How many readers are counted in ``count`` and ``digest``: lost ones, in the end all."""
    count: Count = 0
    digest: bytes = b""
    step: int = 0
    """The largest single claim of the readers that are gone."""
    rebalanced_at: int = 0
    """How much was unclaimed at the last rebalancing for idle readers; 0: there was none."""


class TakenBack(msgspec.Struct, frozen=True, array_like=True):
    """A stretch of a slot's lane in an earlier segment that is read again."""

    segment: Positive
    slot: Count
    start: Count
    stop: Count


class SegmentRecord(EpochPart, frozen=True):
    """A stretch of an epoch in which the same slots read."""

    ledger: int
    """The sequence of the ledger."""
    number: Positive
    slot_count: Positive
    dead: tuple[int, ...] = ()
    weights: tuple[int, ...] = ()
    """One for each slot; empty: the slot table decides."""
    taken: tuple[int, ...] = ()
    """How much of its lane each slot took; empty while the segment is current."""
    taken_back: tuple[TakenBack, ...] = ()


class ReaderRecord(EpochPart, frozen=True):
    """How far one incarnation has come in an epoch."""

    ledger: int
    """The sequence of the ledger."""
    incarnation: Positive
    slot: Count
    segment: Positive
    """Of its newest claim; ``claim`` and ``length`` are of its lane there."""
    claim: Count
    length: Count
    committed_segment: Positive
    committed_position: Count = 0
    count: Count = 0
    """How many samples it has committed."""
    digest: bytes = b""
    step: int = 0
    """Its largest single claim."""
    busy: float = 0.0
    """Seconds spent on what it has committed."""
    active_at: float = 0.0
    """When it started on what it has not committed."""


class CoverageRecord(EpochPart, frozen=True):
    """What an epoch whose position is kept in checkpoints was resumed from."""

    sequence: int
    base: bytes
    world_size: int
    assumed: int = 0
    dropped: int = 0
    expected: int = 0
    generation: int = 0
    """With ``loads``: how new that state is."""
    loads: int = 0
    lacking: Count = 0
    """How many samples were missing when everybody had moved on; 0: none, or not yet."""
    order: str = ""
    """The order in which it is read; empty: not reported."""


class ShareRecord(EpochPart, frozen=True):
    """What one slot consumed since the state that an epoch was resumed from."""

    slot: Count
    incarnation: int
    digest: bytes
    generation: int = 0
    loads: int = 0
    ended: bool = False
    """Whether the slot has finished its part."""


class RemovedRecord(Record, frozen=True):
    """The highest numbers that jobs had given when they were removed.

    A new job of the same name counts on from here, so that workers and checkpoints of the two are
    never confused.
    """

    next_incarnation: Positive = 1
    attempts_begun: Count = 0
    actions_requested: Count = 0


class Event(Record, frozen=True):
    """An entry of the journal."""

    id: int
    at: float
    job: str
    kind: str
    fields: dict[str, str] = {}


_PLACES: dict[type[Record], tuple[str, str]] = {
    JobRecord: ("job", ""),
    WorkerRecord: ("worker", "{0.rank}"),
    DatasetRecord: ("dataset", "{0.dataset_id}"),
    IndexRecord: ("index", ""),
    CheckpointRecord: ("checkpoint", "{0.checkpoint_id}"),
    PartRecord: ("part", "{0.checkpoint_id}#{0.incarnation}"),
    PendingRecord: ("pending", "{0.checkpoint_id}"),
    AttemptRecord: ("attempt", "{0.checkpoint_id}"),
    AskRecord: ("ask", "{0.checkpoint_id}#{0.incarnation}"),
    RoundRecord: ("round", "{0.barrier_id}"),
    ActionRecord: ("action", "{0.action_id}"),
    EpochRecord: ("epoch", "{0.epoch}:{0.dataset_id}"),
    SegmentRecord: ("segment", "{0.epoch}:{0.number}:{0.dataset_id}"),
    ReaderRecord: ("reader", "{0.epoch}:{0.incarnation}:{0.dataset_id}"),
    CoverageRecord: ("coverage", "{0.epoch}:{0.dataset_id}"),
    ShareRecord: ("share", "{0.epoch}:{0.slot}:{0.dataset_id}"),
    RemovedRecord: ("removed", ""),
}
"""The kind that each record is stored under, and the form of its key (an index: its dataset)."""
RECORD_TYPES: dict[str, type[Record]] = {kind: record for record, (kind, _) in _PLACES.items()}
"""Record types by the kind they are stored under."""


def place_of(record: Record) -> tuple[str, str]:
    """The kind and the key that a record is stored under."""
    kind, key = _PLACES[type(record)]
    return kind, key.format(record)


def copied(source: msgspec.Struct, kind: type[S], **more: Any) -> S:
    """A struct with the fields that ``source`` has too; ``more`` gives others or overrides them."""
    for name in _shared_fields(type(source), kind):
        if name not in more:
            more[name] = getattr(source, name)
    return kind(**more)


@cache
def _shared_fields(source: Any, target: Any) -> tuple[str, ...]:
    return tuple(x for x in target.__struct_fields__ if x in source.__struct_fields__)


READ_ON_DEMAND = "index"
"""The kind that is large and rarely read: the machine writes it but never keeps it."""

CRASH_SAFE_KINDS = frozenset({"round", "pending", "part", "ask", "coverage", "share"})
"""Kinds that must outlive the coordinator's process but not its machine's power supply.

Parts are sent again by those who wait for the commit, and the commit itself waits for the disk.
So do the beginning and the end of an attempt; who has asked for it only serves retries.
Reports of coverage are sums, so the next one makes up for one that was lost.
A barrier that waited for the disk would be slow every time; what a lost round can do is written
down in ``docs/state-machine.md``.
"""
