"""Messages from the wire as the types that users see, and outcomes as errors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import SyncError
from ..types import (
    ACTION_KINDS,
    Action,
    BarrierStatus,
    CheckpointCondition,
    CheckpointInfo,
    DatasetSummary,
    GpuUsage,
    IncompleteEpoch,
    JobStatus,
    Membership,
    ResourceUsage,
    ShardInfo,
    WorkerState,
    WorkerStatus,
    check_id,
)
from .gen import coordinator_pb2 as pb

DETAIL_LENGTH = 2000
NAMED = 8


def resources(usage: ResourceUsage) -> pb.ResourceUsage:
    """Resource usage for the wire."""
    return pb.ResourceUsage(
        cpu_percent=usage.cpu_percent,
        memory_used_bytes=usage.memory_used_bytes,
        memory_total_bytes=usage.memory_total_bytes,
        gpus=[
            pb.GpuUsage(
                index=gpu.index,
                utilization_percent=gpu.utilization_percent,
                memory_used_bytes=gpu.memory_used_bytes,
                memory_total_bytes=gpu.memory_total_bytes,
                temperature_celsius=gpu.temperature_celsius,
            )
            for gpu in usage.gpus
        ],
    )


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
    return DatasetSummary(
        dataset_id=info.dataset_id,
        path=info.path,
        format=info.format,
        total_samples=info.total_samples,
        shard_size=info.shard_size,
        shard_count=info.shard_count,
        shuffle=info.shuffle,
        seed=info.seed,
        exact=info.exact,
        fingerprint=info.layout.fingerprint,
        total_bytes=info.layout.total_bytes,
        columns=tuple(info.layout.columns),
        metadata=dict(info.metadata),
        slot_count=description.slot_count if description else 0,
        dead_slots=tuple(description.dead_slots) if description else (),
        order=description.order if description else "",
    )


def checkpoint(message: pb.CheckpointInfo) -> CheckpointInfo:
    """A committed checkpoint."""
    return CheckpointInfo(
        checkpoint_id=message.checkpoint_id,
        step=message.step,
        epoch=message.epoch,
        path=message.path,
        size_bytes=message.size_bytes,
        is_full=message.is_full,
        worker_id=message.worker_id,
        parts=message.parts,
        committed_at=message.committed_at,
        metadata=dict(message.metadata),
        verified=message.verified if message.HasField("verified") else None,
        verified_at=message.verified_at if message.HasField("verified") else None,
        verified_by=message.verified_by,
        will_be_dropped=message.will_be_dropped if message.HasField("will_be_dropped") else None,
    )


def checkpoint_report(
    job: str, checkpoint_ids: Iterable[str], condition: CheckpointCondition, path: str, detail: str
) -> pb.CheckpointReport:
    """What became of checkpoints, checked and cut to what is taken."""
    text = "".join(character if character.isprintable() else " " for character in detail)
    return pb.CheckpointReport(
        job=job,
        checkpoint_ids=[check_id("checkpoint", key) for key in checkpoint_ids],
        path=path,
        condition=CONDITION_CODES[CheckpointCondition(condition)],
        detail=text[:DETAIL_LENGTH],
    )


def action_request(job: str, kind: str, worker_id: str, reason: str) -> pb.ActionRequest:
    """Something to ask of a job, checked."""
    if kind not in ACTION_KINDS:
        raise ValueError(f"action {kind!r} is unknown: use {', '.join(ACTION_KINDS)}")
    if worker_id:
        check_id("worker id", worker_id)
    return pb.ActionRequest(job=job, kind=kind, worker_id=worker_id, reason=reason)


def action(message: pb.Action) -> Action:
    """Something that is asked of a job."""
    return Action(
        action_id=message.action_id,
        kind=message.kind,
        worker_id=message.worker_id,
        reason=message.reason,
        requested_at=message.requested_at,
        requested_by=message.requested_by,
    )


def worker_status(message: pb.WorkerStatus) -> WorkerStatus:
    """A worker."""
    return WorkerStatus(
        worker_id=message.worker_id,
        rank=message.rank,
        incarnation=message.incarnation,
        membership=MEMBERSHIPS[message.membership],
        state=STATES.get(message.state, WorkerState.IDLE),
        step=message.step if message.HasField("step") else None,
        epoch=message.epoch,
        heartbeat_age=message.heartbeat_age_seconds,
        hostname=message.hostname,
        port=message.port,
        process=message.process,
        gpu_count=message.gpu_count,
        memory_bytes=message.memory_bytes,
        registered_at=message.registered_at,
        resources=_resources(message.resources),
        metrics=dict(message.metrics),
        metadata=dict(message.metadata),
        detail=message.detail,
        step_seconds=message.step_seconds if message.HasField("step_seconds") else None,
        slowness=message.slowness if message.HasField("slowness") else None,
        is_straggler=message.is_straggler,
    )


def job_status(message: pb.JobStatus, workers: list[WorkerStatus]) -> JobStatus:
    """A job with all its workers."""
    latest = message.latest_checkpoint if message.HasField("latest_checkpoint") else None
    return JobStatus(
        job=message.job,
        generation=message.generation,
        world_size=message.world_size,
        live_workers=message.live_workers,
        dead_workers=message.dead_workers,
        epoch=message.epoch,
        completed_epochs=message.completed_epochs,
        dataset_count=message.dataset_count,
        checkpoint_count=message.checkpoint_count,
        workers=tuple(workers),
        barriers=tuple(_barrier(b) for b in message.barriers),
        latest_checkpoint=checkpoint(latest) if latest is not None else None,
        actions=tuple(action(a) for a in message.actions),
        loss_ages=tuple(message.loss_ages_seconds),
        checkpoints=tuple(checkpoint(one) for one in message.checkpoints),
        incomplete_epochs=tuple(
            IncompleteEpoch(one.dataset_id, one.epoch, one.missing, one.expected)
            for one in message.incomplete_epochs
        ),
    )


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


def _barrier(message: pb.BarrierStatus) -> BarrierStatus:
    return BarrierStatus(
        barrier_id=message.barrier_id,
        round=message.round,
        arrived=message.arrived,
        expected=message.expected,
        open_seconds=message.open_seconds,
        missing=_missing(message.missing),
    )


def _resources(message: pb.ResourceUsage) -> ResourceUsage:
    return ResourceUsage(
        message.cpu_percent,
        message.memory_used_bytes,
        message.memory_total_bytes,
        tuple(
            GpuUsage(
                gpu.index,
                gpu.utilization_percent,
                gpu.memory_used_bytes,
                gpu.memory_total_bytes,
                gpu.temperature_celsius,
            )
            for gpu in message.gpus
        ),
    )


STATE_CODES: dict[str, Any] = {
    state: pb.WorkerState.Value(f"WORKER_STATE_{state.name}") for state in WorkerState
}
STATES: dict[int, WorkerState] = {
    pb.WORKER_STATE_UNSPECIFIED: WorkerState.IDLE,
    **{STATE_CODES[state]: state for state in WorkerState},
}

MEMBERSHIP_CODES: dict[str, Any] = {
    membership: pb.Membership.Value(f"MEMBERSHIP_{membership.name}") for membership in Membership
}
MEMBERSHIPS: dict[int, Membership] = {MEMBERSHIP_CODES[one]: one for one in Membership}

CONDITION_CODES: dict[str, Any] = {
    condition: pb.CheckpointCondition.Value(f"CHECKPOINT_CONDITION_{condition.name}")
    for condition in CheckpointCondition
}
CONDITIONS: dict[int, CheckpointCondition] = {
    CONDITION_CODES[condition]: condition for condition in CheckpointCondition
}
