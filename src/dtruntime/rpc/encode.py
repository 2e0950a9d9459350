"""Replies of the machine and views of its state, as messages.

`messages.to_message` copies what both sides name alike; only what differs is written out here.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import islice
from typing import Any

from google.protobuf.message import Message

from ..coordinator.state import Job
from ..coordinator.state import commands as c
from ..coordinator.state.barriers import Round
from ..coordinator.state.checkpoints.history import RetentionForecast
from ..coordinator.state.datasets import DatasetShard, File
from ..coordinator.state.members import Member
from ..coordinator.state.records import (
    ActionRecord,
    CheckpointRecord,
    DatasetRecord,
    LayoutRecord,
    SegmentRecord,
    unpack,
)
from ..types import WorkerState
from .gen import coordinator_pb2 as pb
from .messages import STATE_CODES, to_message

SEGMENTS_CACHED = 512
INCOMPLETE_SHOWN = 16
CHECKPOINTS_SHOWN = 8

_REPLIES: dict[type[c.Reply], tuple[type[Message], dict[str, Any]]] = {
    c.Passed: (pb.BarrierResponse, {"outcome": pb.BARRIER_OUTCOME_COMPLETED}),
    c.MembershipChanged: (pb.BarrierResponse, {"outcome": pb.BARRIER_OUTCOME_MEMBERSHIP_CHANGED}),
    c.TimedOut: (pb.BarrierResponse, {"outcome": pb.BARRIER_OUTCOME_TIMED_OUT}),
    c.Committed: (pb.CheckpointResponse, {"status": pb.CHECKPOINT_STATUS_COMMITTED}),
    c.Aborted: (pb.CheckpointResponse, {"status": pb.CHECKPOINT_STATUS_ABORTED}),
    c.Pending: (pb.CheckpointResponse, {"status": pb.CHECKPOINT_STATUS_PENDING}),
    c.Granted: (pb.ClaimResponse, {"outcome": pb.CLAIM_OUTCOME_GRANTED}),
    c.Complete: (pb.ClaimResponse, {"outcome": pb.CLAIM_OUTCOME_COMPLETE}),
    c.Waiting: (pb.ClaimResponse, {"outcome": pb.CLAIM_OUTCOME_WAITING}),
    c.Registered: (pb.WorkerRegistration, {}),
    c.Pulse: (pb.DeregisterResponse, {}),
    c.DatasetRegistered: (pb.DatasetRegistration, {}),
    c.Abandoned: (pb.Abandoned, {}),
    c.Begun: (pb.BeginCheckpointResponse, {}),
    c.CheckpointsReported: (pb.CheckpointsReported, {}),
    c.Consumed: (pb.CommitResponse, {}),
    c.Rebalanced: (pb.RebalanceResponse, {}),
    c.Ended: (pb.EndedProcessesReported, {}),
    c.JobRemoved: (pb.JobRemoved, {}),
    c.DatasetRemoved: (pb.DatasetRemoved, {}),
}
"""The message of each reply, and its constant fields."""


def reply(answer: c.Reply, **more: Any) -> Message:
    """The message of a reply; ``more`` are fields that the machine does not know."""
    if isinstance(answer, c.Moved):
        return _moved(answer)
    if isinstance(answer, c.Requested):
        return action(answer.action)
    kind, fixed = _REPLIES[type(answer)]
    return to_message(answer, kind, **fixed, **more)


def _moved(answer: c.Moved) -> pb.ClaimResponse:
    """The segments that the caller lacks, and its own progress."""
    response = pb.ClaimResponse(
        outcome=pb.CLAIM_OUTCOME_MOVED,
        generation=answer.generation,
        slot=answer.slot,
        segments=[_segment(segment) for segment in answer.segments],
    )
    if answer.reader is not None:
        reader = answer.reader
        response.claimed = reader.claim if reader.segment == answer.segments[-1].number else 0
        response.committed_segment = reader.committed_segment
        response.committed_position = reader.committed_position
        response.committed_digest = reader.digest
    return response


def shard(item: DatasetShard, count: int, generation: int) -> pb.ShardAssignment:
    """One shard of a worker that has ``count``."""
    return shards([item], count, generation).shards[0]


def shards(items: Iterable[DatasetShard], count: int, generation: int) -> pb.ShardList:
    """The ``count`` shards of a worker."""
    reply = pb.ShardList(generation=generation)
    add = reply.shards.add
    for shard_id, start, end, paths, rows, counts in items:
        add(
            shard_id=shard_id,
            file_paths=paths,
            start_sample=start,
            end_sample=end,
            shard_count=count,
            generation=generation,
            row_starts=rows,
            row_counts=counts,
        )
    return reply


def add_files(reply: pb.FileList, files: Iterable[File]) -> pb.FileList:
    """Add the files of a worker to a reply."""
    for path, rows in files:
        reply.file_paths.append(path)
        if rows is not None:
            reply.row_counts.append(rows)
    return reply


def dataset(
    record: DatasetRecord, job: str, *, full: bool = False, index: bytes = b""
) -> pb.DatasetInfo:
    """A registered dataset; ``full`` includes the lists of shards and files."""
    files = layout(record.layout, full) if record.layout is not None else None
    return to_message(
        record,
        pb.DatasetInfo,
        job=job,
        shard_count=record.shard_count,
        index=index,
        layout=files,
    )


def checkpoint(
    record: CheckpointRecord, job: str, will_be_dropped: bool | None = None
) -> pb.CheckpointInfo:
    """A committed checkpoint."""
    return to_message(record, pb.CheckpointInfo, job=job, will_be_dropped=will_be_dropped)


def action(record: ActionRecord) -> pb.Action:
    """A pending action."""
    return to_message(record, pb.Action)


def worker(job: Job, rank: int, member: Member | None, now: float) -> pb.WorkerStatus:
    """What is known about a rank."""
    if member is None:
        return pb.WorkerStatus(
            worker_id=f"worker-{rank}", rank=rank, membership=pb.MEMBERSHIP_EXPECTED
        )
    beat = member.pulse
    status = to_message(
        member.record,
        pb.WorkerStatus,
        heartbeat_age_seconds=max(0.0, now - member.last_seen),
        state=STATE_CODES[beat.state if beat else WorkerState.IDLE],
        slowness=job.stragglers.slowness(member),
        is_straggler=job.stragglers.is_straggler(member),
    )
    if beat is not None:
        report = pb.HeartbeatRequest.FromString(beat.report)
        status.epoch = beat.epoch
        if beat.step is not None:
            status.step = beat.step
        if beat.step_seconds:
            status.step_seconds = beat.step_seconds
        status.resources.CopyFrom(report.resources)
        status.metrics.update(report.metrics)
    return status


def job_status(
    job: Job,
    members: list[tuple[int, Member | None]],
    next_rank: int,
    now: float,
    forecast: RetentionForecast,
) -> pb.JobStatus:
    """A job, with one page of its workers."""
    roster, latest = job.roster, job.checkpoints.latest

    def shown(record: CheckpointRecord) -> pb.CheckpointInfo:
        return checkpoint(record, job.name, forecast.will_be_dropped(record))

    return pb.JobStatus(
        job=job.name,
        generation=roster.generation,
        world_size=roster.world_size,
        live_workers=roster.live_count,
        dead_workers=roster.dead_count,
        workers=[worker(job, rank, member, now) for rank, member in members],
        next_rank=next_rank,
        barriers=[_barrier(job, round_, now) for round_ in job.barriers.open.values()],
        epoch=roster.epoch,
        completed_epochs=job.completed_epochs,
        dataset_count=len(job.datasets),
        checkpoint_count=job.checkpoints.history.present,
        actions=[action(record) for record in roster.actions],
        loss_ages_seconds=[max(0.0, now - at) for at in reversed(roster.losses.times)],
        incomplete_epochs=[
            to_message(attempt.record, pb.IncompleteEpoch, missing=attempt.record.lacking)
            for attempt in job.coverages.incomplete()[:INCOMPLETE_SHOWN]
        ],
        checkpoints=map(shown, islice(job.checkpoints.history.newest(), CHECKPOINTS_SHOWN)),
        latest_checkpoint=None if latest is None else shown(latest),
    )


def silent(member: Member, now: float) -> pb.SilentWorker:
    """A member that has been silent for a while."""
    age = max(0.0, now - member.last_seen)
    return to_message(member.record, pb.SilentWorker, heartbeat_age_seconds=age)


@lru_cache(maxsize=SEGMENTS_CACHED)
def _segment(record: SegmentRecord) -> pb.EpochSegment:
    """A segment; cached, since all workers are sent it at once."""
    return to_message(record, pb.EpochSegment, dead_slots=record.dead)


def _barrier(job: Job, round_: Round, now: float) -> pb.BarrierStatus:
    return pb.BarrierStatus(
        barrier_id=round_.barrier_id,
        round=round_.number,
        arrived=len(round_.arrived),
        expected=len(round_.expected),
        open_seconds=max(0.0, now - round_.opened_at),
        missing=[to_message(m, pb.MissingWorker) for m in job.barriers.missing(round_)],
    )


def layout(record: LayoutRecord, full: bool) -> pb.DatasetLayout:
    """A layout for the wire; the lists of shards and files only when ``full``."""
    shards, files = (record.shard_count, len(record.files)) if full else (0, 0)
    return to_message(
        record,
        pb.DatasetLayout,
        shard_samples=_numbers(record.shard_samples, shards),
        shard_bytes=_numbers(record.shard_bytes, shards),
        files=record.files[:files],
        file_samples=_numbers(record.file_samples, files),
    )


def _numbers(data: bytes, count: int) -> list[int]:
    return unpack(data, count).tolist() if count else []
