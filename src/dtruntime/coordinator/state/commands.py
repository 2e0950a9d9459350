"""Commands and replies of the state machine."""

from __future__ import annotations

import msgspec

from ...types import CheckpointCondition, WorkerState
from .records import ActionRecord, LayoutRecord, ReaderRecord, SegmentRecord


class Command(msgspec.Struct, frozen=True):
    """Something that happened outside: a request, or the passing of time."""


class MemberCommand(Command, frozen=True):
    """A call by a member, which identifies itself."""

    job: str
    worker_id: str
    incarnation: int


class EpochCommand(MemberCommand, frozen=True):
    """A member's call about one epoch of a dataset."""

    dataset_id: str
    epoch: int


class Register(Command, frozen=True):
    """A worker asks for a rank."""

    job: str
    worker_id: str = ""
    session: str = ""
    rank: int | None = None
    world_size: int = 0
    attempt: int = 0
    """How often the launcher has restarted the group; a higher number replaces the whole world."""
    hostname: str = ""
    port: int = 0
    process: str = ""
    gpu_count: int = 0
    memory_bytes: int = 0
    metadata: dict[str, str] = {}
    machine: str = ""
    """Where ``pid`` and ``process_started`` apply; empty: unknown."""
    pid: int = 0
    process_started: int = 0
    previous_incarnation: int = 0
    """The highest numbers that the worker saw in a state that has since been lost."""
    previous_generation: int = 0
    previous_attempts: int = 0


class ReportEnded(Command, frozen=True):
    """A process reports which members' processes on its machine have ended."""

    job: str
    machine: str
    incarnations: tuple[int, ...]


class Heartbeat(MemberCommand, frozen=True):
    """A worker is alive and reports its progress."""

    state: WorkerState = WorkerState.IDLE
    step: int | None = None
    epoch: int = 0
    report: bytes = b""
    """The whole message; resources and metrics are read from it on demand."""
    step_seconds: float = 0.0
    """How long a step takes; 0: not reported."""
    samples: int = 0
    """How many the process has used in total; 0: not reported."""


class Deregister(MemberCommand, frozen=True):
    """A worker says goodbye."""

    reason: str = ""


class Arrive(MemberCommand, frozen=True):
    """A worker reaches a barrier and waits; the call is held."""

    barrier_id: str
    call: int
    timeout: float
    generation: int = 0
    """The newest generation the worker knows of; 0: not checked."""
    ticket: int = 0
    """Numbers the worker's barrier calls; a retry repeats it. 0: never a retry."""
    payload: bytes | None = None
    """The value that the worker shares with the others; None: it only waits."""
    ranks: tuple[int, ...] = ()
    """Who takes part, including the worker itself; empty: all present ranks."""


class Hangup(Command, frozen=True):
    """The caller of a held call is gone."""

    job: str
    call: int


class ReportLostState(Command, frozen=True):
    """A worker was registered in a state that this coordinator does not have."""

    job: str
    worker_id: str
    state_id: str
    restored: bool = False
    """Whether this state was restored from a copy of that one."""


class RegisterDataset(Command, frozen=True):
    """A dataset becomes known."""

    job: str
    dataset_id: str
    total_samples: int
    shard_size: int
    path: str = ""
    format: str = ""
    shuffle: bool = False
    seed: int = 0
    metadata: dict[str, str] = {}
    exact: bool = False
    layout: LayoutRecord | None = None
    index: bytes = b""


class BeginCheckpoint(MemberCommand, frozen=True):
    """A worker is about to save a step together with others."""

    step: int
    ticket: int
    """Numbers the worker's saves, from 1; a retry repeats it."""
    ranks: tuple[int, ...] = ()
    """Who saves together; empty: all live members."""


class AbandonCheckpoints(MemberCommand, frozen=True):
    """A worker gives up every checkpoint that still waits for its part."""


class NotifyCheckpoint(MemberCommand, frozen=True):
    """A worker has written a checkpoint, or its part of one."""

    checkpoint_id: str
    step: int
    epoch: int = 0
    path: str = ""
    size_bytes: int = 0
    is_full: bool = True
    generation: int = 0
    partial: bool = False
    call: int = 0
    timeout: float = 0.0
    metadata: dict[str, str] = {}


class ReportCheckpoints(Command, frozen=True):
    """A report on the condition of committed checkpoints in their storage."""

    job: str
    condition: CheckpointCondition
    checkpoint_ids: tuple[str, ...] = ()
    path: str = ""
    """Instead of an id that is no longer readable: the path given with the commit."""
    detail: str = ""
    reported_by: str = ""
    """The reporting member; empty: an outsider."""
    incarnation: int = 0


class Claim(EpochCommand, frozen=True):
    """A worker claims samples of its lane; at the end of the lane the call may be held."""

    plan: str = ""
    segment: int = 0
    """0: the worker knows of none yet."""
    upto: int = 0
    length: int = 0
    call: int = 0
    timeout: float = 0.0
    known: int = 0
    """How many ended segments the worker already has."""
    commit_segment: int = 0
    commit_position: int = 0
    commit_digest: bytes = b""
    """What it would commit if the epoch became complete while the call is held."""


class Commit(EpochCommand, frozen=True):
    """A worker has consumed everything it took up to a position."""

    segment: int
    position: int
    digest: bytes = b""


class Rebalance(Command, frozen=True):
    """Samples of an epoch that nobody has started are to be reassigned."""

    job: str
    dataset_id: str
    epoch: int
    weights: dict[int, int] = {}
    """Percentages by rank; empty: by measured speed."""


class ReportCoverage(EpochCommand, frozen=True):
    """What a worker consumed of an epoch whose position is kept in checkpoints."""

    base: bytes = b""
    digest: bytes = b""
    world_size: int = 0
    assumed: int = 0
    dropped: int = 0
    expected: int = 0
    generation: int = 0
    loads: int = 0
    ended: bool = False
    """Whether the worker has finished its part."""
    order: str = ""
    """One of `datasets.ORDERS`; empty: not reported."""


class RequestAction(Command, frozen=True):
    """A request to a running job: save, stop, or drain a worker."""

    job: str
    kind: str
    worker_id: str = ""
    reason: str = ""
    requested_by: str = ""
    """The requesting member; empty: an outsider."""
    incarnation: int = 0


class CompleteAction(Command, frozen=True):
    """A requested action is done, or no longer needed."""

    job: str
    action_id: str
    outcome: str = ""
    completed_by: str = ""
    """The member that carried it out; empty: an outsider."""
    incarnation: int = 0


class RemoveJob(Command, frozen=True):
    """Forget everything about a job."""

    job: str
    force: bool = False
    """Even while workers are live."""


class RemoveDataset(Command, frozen=True):
    """Forget a dataset and what was consumed of it."""

    job: str
    dataset_id: str
    force: bool = False
    """Even while workers are live."""


class Tick(Command, frozen=True):
    """Time has passed: detect failures, end waits."""


class Reply(msgspec.Struct, frozen=True):
    """An answer to a command."""


class Held(Reply, frozen=True):
    """No answer yet: a `Release` effect will carry it."""


HELD = Held()


class Done(Reply, frozen=True):
    """Done; there is nothing to return."""


DONE = Done()


class Registered(Reply, frozen=True):
    """A worker's identity: what every further call must carry."""

    job: str
    worker_id: str
    rank: int
    incarnation: int
    generation: int
    world_size: int
    live_workers: int


class JobRemoved(Reply, frozen=True):
    """What a job had when it was removed."""

    live_workers: int
    datasets: int
    checkpoints: int


class DatasetRemoved(Reply, frozen=True):
    """How many epochs of a dataset were known when it was removed."""

    epochs: int


class Ended(Reply, frozen=True):
    """How many members were live until their processes were reported as ended."""

    count: int


class Pulse(Reply, frozen=True):
    """The answer to a heartbeat; the same object until something in it changes."""

    generation: int
    live_workers: int
    actions: tuple[ActionRecord, ...] = ()
    lost_generation: int = 0
    """The newest generation that began because a member was lost or left."""


class Missing(msgspec.Struct, frozen=True):
    """A worker that a barrier waits for."""

    worker_id: str
    rank: int
    last_step: int | None
    registered: bool


class Lost(msgspec.Struct, frozen=True):
    """A member that died, left or was replaced."""

    generation: int
    worker_id: str
    rank: int
    reason: str
    incarnation: int = 0
    last_heard: int = 0
    """The job's next incarnation when it was last heard from: members with a lower one knew it."""


class Passed(Reply, frozen=True):
    """The round completed: every expected member had arrived."""

    round: int
    generation: int
    participants: int
    values: dict[int, bytes] | None = None
    """The value each participant shared, by rank; None: nobody shared any."""
    left_out: int = 0
    """How many live members did not take part."""


class MembershipChanged(Reply, frozen=True):
    """A member was lost since the generation that the caller knows."""

    generation: int
    lost: tuple[Lost, ...]
    survivors: tuple[int, ...]


class TimedOut(Reply, frozen=True):
    """The caller's time is up; its arrival is withdrawn."""

    round: int
    generation: int
    participants: int
    missing: tuple[Missing, ...]
    missing_count: int


class DatasetRegistered(Reply, frozen=True):
    """A dataset is registered; ``created`` is false if it already was."""

    dataset_id: str
    shard_count: int
    created: bool


class Requested(Reply, frozen=True):
    """The pending action: of this request, or of an earlier one for the same."""

    action: ActionRecord


class Begun(Reply, frozen=True):
    """The id under which the caller saves; the same for all who save together."""

    checkpoint_id: str
    generation: int
    """In which the attempt was begun."""
    ranks: tuple[int, ...]
    """Those that have to send a part."""


class Abandoned(Reply, frozen=True):
    """How many attempts the caller has ended."""

    count: int


class CheckpointReply(Reply, frozen=True):
    """An answer to a part of a checkpoint, or to a whole one."""

    checkpoint_id: str
    generation: int


class Committed(CheckpointReply, frozen=True):
    """The checkpoint is committed, durably."""


class CheckpointsReported(Reply, frozen=True):
    """How many of the reported checkpoints are known."""

    known: int


class Aborted(CheckpointReply, frozen=True):
    """The part that the caller sent will never be committed."""

    detail: str


class Pending(CheckpointReply, frozen=True):
    """The checkpoint still lacks parts when the caller's time is up."""

    missing_ranks: tuple[int, ...]


class ClaimReply(Reply, frozen=True):
    """An answer to a claim."""

    generation: int
    slot: int


class Granted(ClaimReply, frozen=True):
    """The claim stands."""


class Moved(ClaimReply, frozen=True):
    """Another segment has begun."""

    segments: tuple[SegmentRecord, ...]
    """All segments that the caller lacks; the last one is current."""
    reader: ReaderRecord | None = None
    """What is recorded of the caller."""


class Complete(ClaimReply, frozen=True):
    """All samples of the epoch are taken and committed."""


class Waiting(ClaimReply, frozen=True):
    """The caller has finished, and others have not."""

    unfinished: tuple[int, ...]


class Consumed(Reply, frozen=True):
    """What the caller committed is consumed for good."""

    generation: int
    segment: int


class Rebalanced(Reply, frozen=True):
    """A segment has begun in which the rest is assigned by ``weights``."""

    segment: int
    weights: tuple[int, ...]


class Refused(Exception):
    """The machine refuses a command, and nothing has changed.

    ``reason`` is a stable word for programs; the message is for people.
    ``retry_after`` is set, in seconds, when the same command may succeed later.
    """

    def __init__(self, reason: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after = retry_after
