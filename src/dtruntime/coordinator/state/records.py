"""What the coordinator remembers across restarts, and the effects that change it."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]


class Record(msgspec.Struct, frozen=True):
    """A durable fact; stored as JSON under (kind, job, key)."""


class JobRecord(Record, frozen=True):
    """A job's membership counters."""

    world_size: Count
    """0: elastic."""
    generation: Count
    loss_generation: int
    """The generation that the newest loss of a member began."""
    next_incarnation: int
    attempt: int = 0
    epoch: int = 0
    completed_epochs: int = 0


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

    @property
    def shard_count(self) -> int:
        """How many shards the samples make."""
        return -(-self.total_samples // self.shard_size)


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


class RoundRecord(Record, frozen=True):
    """A completed barrier round, kept so that a repeated arrival gets the same answer."""

    barrier_id: str
    round: int
    generation: int
    participants: int
    tickets: dict[int, int]
    """Incarnation to the ticket of its arrival."""
    sequence: int = 0


class Event(Record, frozen=True):
    """An entry of the journal."""

    id: int
    at: float
    job: str
    kind: str
    fields: dict[str, str] = {}


RECORD_TYPES: dict[str, type[Record]] = {
    "job": JobRecord,
    "worker": WorkerRecord,
    "dataset": DatasetRecord,
    "checkpoint": CheckpointRecord,
    "part": PartRecord,
    "pending": PendingRecord,
    "round": RoundRecord,
}
"""Record types by the kind they are stored under."""

CRASH_SAFE_KINDS = frozenset({"round", "pending", "part"})
"""Kinds that must outlive the coordinator's process but not its machine's power supply.

Parts are sent again by those who wait for the commit, and the commit itself waits for the disk.
A barrier that waited for the disk would be slow every time; what a lost round can do is written
down in ``docs/state-machine.md``.
"""


class Effect(msgspec.Struct, frozen=True):
    """Something the caller of the machine has to carry out."""


class Put(Effect, frozen=True):
    """Store a record before any reply leaves."""

    kind: str
    job: str
    key: str
    record: Record


class Delete(Effect, frozen=True):
    """Remove a record before any reply leaves."""

    kind: str
    job: str
    key: str


class Emit(Effect, frozen=True):
    """Append an event to the journal."""

    event: Event


class Release(Effect, frozen=True):
    """Answer a held call."""

    call: int
    reply: Any
