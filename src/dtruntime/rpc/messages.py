"""Protobuf messages and the types of clients, one as the other; outcomes as errors.

`to_message` and `from_message` copy the fields that both sides name alike; how each is converted is
worked out once for each pair of types. Only what differs is written out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from functools import cache, partial
from operator import attrgetter
from typing import Any, TypeVar, get_args, get_type_hints

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from ..errors import SyncError
from ..types import (
    ACTION_KINDS,
    Action,
    BarrierStatus,
    CheckpointCondition,
    CheckpointInfo,
    DatasetSummary,
    JobStatus,
    ResourceUsage,
    ShardInfo,
    WorkerState,
    WorkerStatus,
    check_id,
)
from .gen import coordinator_pb2 as pb

T = TypeVar("T")
M = TypeVar("M", bound=Message)
Convert = Callable[[Any], Any]

DETAIL_LENGTH = 2000
NAMED = 8
"""How many workers an error names."""


def enum_codes(enum: EnumDescriptor) -> dict[str, Any]:
    """The numbers of an enumeration by what follows its prefix, in lower case."""
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return {v.name.removeprefix(prefix).lower(): v.number for v in enum.values if v.number}


STATE_CODES = enum_codes(pb.WorkerState.DESCRIPTOR)
CONDITION_CODES = enum_codes(pb.CheckpointCondition.DESCRIPTOR)
STATES: dict[int, WorkerState] = {
    pb.WORKER_STATE_UNSPECIFIED: WorkerState.IDLE,
    **{code: WorkerState(word) for word, code in STATE_CODES.items()},
}
CONDITIONS: dict[int, CheckpointCondition] = {
    code: CheckpointCondition(word) for word, code in CONDITION_CODES.items()
}


def to_message(value: Any, kind: type[M], **more: Any) -> M:
    """A message with the fields that ``value`` has too; ``more`` gives others, or takes precedence.

    A field that is None stays absent.
    """
    types: Any = type(value), kind
    for name, convert in _writers(*types):
        if name not in more:
            more[name] = convert(value)
    return kind(**more)


def from_message(message: Message, kind: type[T], **more: Any) -> T:
    """A dataclass with the fields that ``message`` has too; ``more`` as in `to_message`.

    An optional field that is absent is None.
    """
    types: Any = type(message), kind
    for name, convert in _readers(*types):
        if name not in more:
            more[name] = convert(message)
    return kind(**more)


@cache
def _writers(source: type, target: type[Message]) -> tuple[tuple[str, Convert], ...]:
    names = getattr(source, "__struct_fields__", None) or [f.name for f in fields(source)]
    known = target.DESCRIPTOR.fields_by_name
    return tuple((name, _writer(known[name])) for name in names if name in known)


def _writer(field: FieldDescriptor) -> Convert:
    get = attrgetter(field.name)
    if field.enum_type is not None:
        codes = enum_codes(field.enum_type)
        return lambda value: codes[get(value)]
    if field.message_type is None or _is_map(field):
        return get
    kind = GetMessageClass(field.message_type)
    if field.is_repeated:
        return lambda value: [to_message(one, kind) for one in get(value)]
    return lambda value: None if get(value) is None else to_message(get(value), kind)


@cache
def _readers(source: type[Message], target: type) -> tuple[tuple[str, Convert], ...]:
    known, hints = source.DESCRIPTOR.fields_by_name, get_type_hints(target)
    names = [field.name for field in fields(target)]
    return tuple((name, _reader(known[name], hints[name])) for name in names if name in known)


def _reader(field: FieldDescriptor, hint: Any) -> Convert:
    name, get = field.name, attrgetter(field.name)
    if _is_map(field):
        return lambda message: dict(get(message))
    if field.is_repeated:
        if field.message_type is None:
            return lambda message: tuple(get(message))
        item = _converter(get_args(hint)[0])
        return lambda message: tuple(item(one) for one in get(message))
    if field.enum_type is not None:
        members = {code: hint(word) for word, code in enum_codes(field.enum_type).items()}
        return lambda message: members[get(message)]
    if field.message_type is None:
        return (lambda m: get(m) if m.HasField(name) else None) if field.has_presence else get
    kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    convert = _converter(kinds[0] if kinds else hint)
    if not kinds:
        return lambda message: convert(get(message))
    return lambda message: convert(get(message)) if message.HasField(name) else None


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _converter(kind: type) -> Convert:
    return _DIFFERENT.get(kind) or partial(from_message, kind=kind)


def resources(usage: ResourceUsage) -> pb.ResourceUsage:
    """Resource usage for the wire."""
    return to_message(usage, pb.ResourceUsage)


def shard(message: pb.ShardAssignment) -> ShardInfo:
    """A shard."""
    rows = zip(message.row_starts, message.row_counts, strict=True)
    return ShardInfo(
        message.shard_id,
        message.start_sample,
        message.end_sample,
        list(message.file_paths),
        [(start, start + count) for start, count in rows],
    )


def dataset(
    info: pb.DatasetInfo, description: pb.DatasetDescription | None = None
) -> DatasetSummary:
    """A dataset; ``description`` says who shares it."""
    shared: dict[str, Any] = {}
    if description is not None:
        shared = {
            "slot_count": description.slot_count,
            "dead_slots": tuple(description.dead_slots),
            "order": description.order,
        }
    return from_message(
        info,
        DatasetSummary,
        fingerprint=info.layout.fingerprint,
        total_bytes=info.layout.total_bytes,
        columns=tuple(info.layout.columns),
        **shared,
    )


def checkpoint(message: pb.CheckpointInfo) -> CheckpointInfo:
    """A committed checkpoint."""
    at = message.verified_at if message.HasField("verified") else None
    return from_message(message, CheckpointInfo, verified_at=at)


def checkpoint_report(
    job: str, checkpoint_ids: Iterable[str], condition: CheckpointCondition, path: str, detail: str
) -> pb.CheckpointReport:
    """A report on the condition of checkpoints; the detail is cut to the longest allowed."""
    text = "".join(character if character.isprintable() else " " for character in detail)
    return pb.CheckpointReport(
        job=job,
        checkpoint_ids=[check_id("checkpoint", key) for key in checkpoint_ids],
        path=path,
        condition=CONDITION_CODES[CheckpointCondition(condition)],
        detail=text[:DETAIL_LENGTH],
    )


def action_request(job: str, kind: str, worker_id: str, reason: str) -> pb.ActionRequest:
    """A request for an action; the arguments are checked."""
    if kind not in ACTION_KINDS:
        raise ValueError(f"action {kind!r} is unknown: use {', '.join(ACTION_KINDS)}")
    if worker_id:
        check_id("worker id", worker_id)
    return pb.ActionRequest(job=job, kind=kind, worker_id=worker_id, reason=reason)


def action(message: pb.Action) -> Action:
    """A pending action."""
    return from_message(message, Action)


def worker_status(message: pb.WorkerStatus) -> WorkerStatus:
    """A worker."""
    return from_message(
        message,
        WorkerStatus,
        state=STATES.get(message.state, WorkerState.IDLE),
        heartbeat_age=message.heartbeat_age_seconds,
    )


def job_status(message: pb.JobStatus, workers: list[WorkerStatus]) -> JobStatus:
    """A job with all its workers."""
    ages = tuple(message.loss_ages_seconds)
    return from_message(message, JobStatus, workers=tuple(workers), loss_ages=ages)


def _barrier(message: pb.BarrierStatus) -> BarrierStatus:
    return from_message(message, BarrierStatus, missing=_missing(message.missing))


_DIFFERENT: dict[type, Convert] = {BarrierStatus: _barrier, CheckpointInfo: checkpoint}
"""Types with fields that the messages have in another form, as parts of other messages."""


def _members(number: int) -> str:
    return "1 member remains" if number == 1 else f"{number} members remain"


def raise_barrier_outcome(barrier_id: str, timeout_ms: float, reply: pb.BarrierResponse) -> None:
    """Raise unless the round completed."""
    if reply.outcome == pb.BARRIER_OUTCOME_COMPLETED:
        return
    if reply.outcome == pb.BARRIER_OUTCOME_MEMBERSHIP_CHANGED:
        lost = {x.worker_id or "?": f"rank {x.rank}: {x.reason}" for x in reply.lost}
        named = ", ".join(f"{who} ({why})" for who, why in list(lost.items())[:4])
        raise SyncError(
            f"barrier {barrier_id!r} ended because the membership changed: lost "
            f"{named or 'a member'}; {_members(len(reply.survivors))}. Resume from the last "
            "checkpoint, or enter the barrier again to go on with the survivors",
            reason="membership_changed",
            lost=lost,
            survivors=tuple(reply.survivors),
            generation=reply.generation,
        )
    missing = _missing(reply.missing)
    named = named_missing(reply.missing, reply.missing_count)
    raise SyncError(
        f"barrier {barrier_id!r} timed out after {timeout_ms:g} ms: {reply.missing_count} of "
        f"{reply.missing_count + reply.participants} workers have not arrived: {named}. "
        "Check these workers ('strata status'), or give a larger timeout_ms",
        reason="timeout",
        missing=missing,
        missing_count=reply.missing_count,
        generation=reply.generation,
    )


def named_missing(workers: Sequence[pb.MissingWorker], count: int) -> str:
    """The first of ``count`` workers that have not arrived, for people."""
    named = ", ".join(_describe(m) for m in workers[:NAMED])
    return named + (f" and {count - NAMED} more" if count > NAMED else "")


def named_silent(workers: Sequence[pb.SilentWorker]) -> str:
    """The first of some workers that are silent, for people."""
    named = ", ".join(
        f"{w.worker_id} (rank {w.rank}, process {w.process}, silent for "
        f"{w.heartbeat_age_seconds:.0f} s)"
        for w in workers[:NAMED]
    )
    return named + (f" and {len(workers) - NAMED} more" if len(workers) > NAMED else "")


def _missing(workers: Iterable[pb.MissingWorker]) -> dict[str, int | None]:
    return {m.worker_id: m.last_step if m.HasField("last_step") else None for m in workers}


def _describe(m: pb.MissingWorker) -> str:
    if not m.registered:
        return f"{m.worker_id} (not registered yet)"
    step = f"last reported step {m.last_step}" if m.HasField("last_step") else "no step reported"
    return f"{m.worker_id} ({step})"
