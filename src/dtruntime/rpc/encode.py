"""Replies and views of the state, as messages for the wire."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import islice
from typing import Any

from google.protobuf.message import Message

from ..coordinator.state import Event, Job
from ..coordinator.state import commands as c
from ..coordinator.state.barriers import Round
from ..coordinator.state.checkpoints.history import RetentionForecast
from ..coordinator.state.datasets import DatasetShard, File
from ..coordinator.state.epochs.epoch_coverage import Covered
from ..coordinator.state.members import Member
from ..coordinator.state.records import (
    ActionRecord,
    CheckpointRecord,
    DatasetRecord,
    LayoutRecord,
    SegmentRecord,
    unpack,
)
from ..types import Membership, WorkerState
from .gen import coordinator_pb2 as pb
from .messages import MEMBERSHIP_CODES, STATE_CODES

SEGMENTS_CACHED = 512
INCOMPLETE_SHOWN = 16
CHECKPOINTS_SHOWN = 8


def passed(reply: c.Passed) -> pb.BarrierResponse:
    """A completed round."""
    response = pb.BarrierResponse(
        outcome=pb.BARRIER_OUTCOME_COMPLETED,
        round=reply.round,
        generation=reply.generation,
        participants=reply.participants,
        left_out=reply.left_out,
    )
    if reply.values:
        response.values.update(reply.values)
    return response


def membership_changed(reply: c.MembershipChanged) -> pb.BarrierResponse:
    """A wait that a loss has ended."""
    return pb.BarrierResponse(
        outcome=pb.BARRIER_OUTCOME_MEMBERSHIP_CHANGED,
        generation=reply.generation,
        lost=[
            pb.LostWorker(worker_id=x.worker_id, rank=x.rank, reason=x.reason) for x in reply.lost
        ],
        survivors=reply.survivors,
    )


def timed_out(reply: c.TimedOut) -> pb.BarrierResponse:
    """A wait whose time was up."""
    return pb.BarrierResponse(
        outcome=pb.BARRIER_OUTCOME_TIMED_OUT,
        round=reply.round,
        generation=reply.generation,
        participants=reply.arrived,
        missing=[_missing(m) for m in reply.missing],
        missing_count=reply.missing_count,
    )


def pulse(reply: c.Pulse) -> pb.DeregisterResponse:
    """A goodbye."""
    return pb.DeregisterResponse(generation=reply.generation)


def dataset_registered(reply: c.DatasetRegistered) -> pb.DatasetRegistration:
    """A known dataset."""
    return pb.DatasetRegistration(
        dataset_id=reply.dataset_id, shard_count=reply.shard_count, created=reply.created
    )


def abandoned(reply: c.Abandoned) -> pb.Abandoned:
    """Attempts that were given up."""
    return pb.Abandoned(count=reply.count)


def begun(reply: c.Begun) -> pb.BeginCheckpointResponse:
    """The id of an attempt."""
    return pb.BeginCheckpointResponse(
        checkpoint_id=reply.checkpoint_id, generation=reply.generation, ranks=reply.ranks
    )


def committed(reply: c.Committed) -> pb.CheckpointResponse:
    """A committed checkpoint."""
    return pb.CheckpointResponse(
        status=pb.CHECKPOINT_STATUS_COMMITTED,
        checkpoint_id=reply.checkpoint_id,
        generation=reply.generation,
    )


def aborted(reply: c.Aborted) -> pb.CheckpointResponse:
    """A checkpoint that will never commit."""
    return pb.CheckpointResponse(
        status=pb.CHECKPOINT_STATUS_ABORTED,
        checkpoint_id=reply.checkpoint_id,
        generation=reply.generation,
        detail=reply.detail,
    )


def pending(reply: c.Pending) -> pb.CheckpointResponse:
    """A checkpoint that lacks parts."""
    return pb.CheckpointResponse(
        status=pb.CHECKPOINT_STATUS_PENDING,
        checkpoint_id=reply.checkpoint_id,
        generation=reply.generation,
        missing_ranks=reply.missing_ranks,
    )


def checkpoints_reported(reply: c.CheckpointsReported) -> pb.CheckpointsReported:
    """What somebody said of checkpoints is noted."""
    return pb.CheckpointsReported(known=reply.known)


def granted(reply: c.Granted) -> pb.ClaimResponse:
    """A claim that stands."""
    return pb.ClaimResponse(
        outcome=pb.CLAIM_OUTCOME_GRANTED, generation=reply.generation, slot=reply.slot
    )


def moved(reply: c.Moved) -> pb.ClaimResponse:
    """The segments that the caller does not know, and what is recorded of it."""
    response = pb.ClaimResponse(
        outcome=pb.CLAIM_OUTCOME_MOVED,
        generation=reply.generation,
        slot=reply.slot,
        segments=[_segment(segment) for segment in reply.segments],
    )
    if reply.reader is not None:
        reader = reply.reader
        response.claimed = reader.claim if reader.segment == reply.segments[-1].number else 0
        response.committed_segment = reader.committed_segment
        response.committed_position = reader.committed_position
        response.committed_digest = reader.digest
    return response


def complete(reply: c.Complete) -> pb.ClaimResponse:
    """An epoch that is over."""
    return pb.ClaimResponse(
        outcome=pb.CLAIM_OUTCOME_COMPLETE, generation=reply.generation, slot=reply.slot
    )


def waiting(reply: c.Waiting) -> pb.ClaimResponse:
    """An epoch that others still read."""
    return pb.ClaimResponse(
        outcome=pb.CLAIM_OUTCOME_WAITING,
        generation=reply.generation,
        slot=reply.slot,
        unfinished=reply.unfinished,
    )


def consumed(reply: c.Consumed) -> pb.CommitResponse:
    """Samples that are consumed for good."""
    return pb.CommitResponse(generation=reply.generation, segment=reply.segment)


def rebalanced(reply: c.Rebalanced) -> pb.RebalanceResponse:
    """A segment with other shares."""
    return pb.RebalanceResponse(segment=reply.segment, weights=reply.weights)


def job_removed(reply: c.JobRemoved) -> pb.JobRemoved:
    """What a job had."""
    return pb.JobRemoved(
        live_workers=reply.live_workers, datasets=reply.datasets, checkpoints=reply.checkpoints
    )


def dataset_removed(reply: c.DatasetRemoved) -> pb.DatasetRemoved:
    """What was known of a dataset."""
    return pb.DatasetRemoved(epochs=reply.epochs)


def ended(reply: c.Ended) -> pb.EndedProcessesReported:
    """So many members were live."""
    return pb.EndedProcessesReported(count=reply.count)


def requested(reply: c.Requested) -> pb.Action:
    """What is asked of a job."""
    return _action(reply.action)


_ENCODERS: dict[type[c.Reply], Callable[[Any], Message]] = {
    c.Passed: passed,
    c.MembershipChanged: membership_changed,
    c.TimedOut: timed_out,
    c.Pulse: pulse,
    c.DatasetRegistered: dataset_registered,
    c.Abandoned: abandoned,
    c.Begun: begun,
    c.Committed: committed,
    c.Aborted: aborted,
    c.CheckpointsReported: checkpoints_reported,
    c.Pending: pending,
    c.Granted: granted,
    c.Moved: moved,
    c.Complete: complete,
    c.Waiting: waiting,
    c.Consumed: consumed,
    c.Rebalanced: rebalanced,
    c.Requested: requested,
    c.Ended: ended,
    c.JobRemoved: job_removed,
    c.DatasetRemoved: dataset_removed,
}


def reply(answer: c.Reply) -> Message:
    """The message of any reply that needs nothing but itself."""
    return _ENCODERS[type(answer)](answer)


def shard(found: DatasetShard, count: int, generation: int) -> pb.ShardAssignment:
    """One shard of a worker that has ``count``."""
    return shards([found], count, generation).shards[0]


def shards(found: Iterable[DatasetShard], count: int, generation: int) -> pb.ShardList:
    """The ``count`` shards of a worker."""
    reply = pb.ShardList(generation=generation)
    add = reply.shards.add
    for shard_id, start, end, paths, rows, counts in found:
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


def add_files(reply: pb.FileList, found: Iterable[File]) -> pb.FileList:
    """The same reply with the files of a worker."""
    for path, rows in found:
        reply.file_paths.append(path)
        if rows is not None:
            reply.row_counts.append(rows)
    return reply


def dataset(
    record: DatasetRecord, job: str, *, full: bool = False, index: bytes = b""
) -> pb.DatasetInfo:
    """A registered dataset; ``full`` is with the lists of its shards and files."""
    info = pb.DatasetInfo(
        dataset_id=record.dataset_id,
        path=record.path,
        format=record.format,
        total_samples=record.total_samples,
        shard_size=record.shard_size,
        shuffle=record.shuffle,
        seed=record.seed,
        metadata=record.metadata,
        job=job,
        shard_count=record.shard_count,
        exact=record.exact,
        index=index,
    )
    if record.layout is not None:
        info.layout.CopyFrom(layout(record.layout, full))
    return info


def checkpoint(
    record: CheckpointRecord, job: str, will_be_dropped: bool | None = None
) -> pb.CheckpointInfo:
    """A committed checkpoint."""
    info = pb.CheckpointInfo(
        checkpoint_id=record.checkpoint_id,
        worker_id=record.worker_id,
        step=record.step,
        epoch=record.epoch,
        path=record.path,
        size_bytes=record.size_bytes,
        is_full=record.is_full,
        metadata=record.metadata,
        job=job,
        committed_at=record.committed_at,
        parts=record.parts,
        verified_at=record.verified_at,
        verified_by=record.verified_by,
    )
    if record.verified is not None:
        info.verified = record.verified
    if will_be_dropped is not None:
        info.will_be_dropped = will_be_dropped
    return info


def coverage(covered: Covered) -> pb.Coverage:
    """What is consumed of an epoch."""
    return pb.Coverage(
        epoch=covered.epoch,
        digest=covered.digest,
        assumed=covered.assumed,
        dropped=covered.dropped,
        expected=covered.expected,
        complete=covered.complete,
        workers=covered.workers,
        segments=covered.segments,
        ended_incomplete=covered.ended_incomplete,
    )


def event(entry: Event) -> pb.Event:
    """A journal entry."""
    return pb.Event(id=entry.id, at=entry.at, job=entry.job, kind=entry.kind, fields=entry.fields)


def actions(records: Iterable[ActionRecord]) -> list[pb.Action]:
    """What is asked of a job and not done yet."""
    return [_action(record) for record in records]


def worker(job: Job, rank: int, member: Member | None, now: float) -> pb.WorkerStatus:
    """What is known about a rank."""
    if member is None:
        return pb.WorkerStatus(
            worker_id=f"worker-{rank}", rank=rank, membership=MEMBERSHIP_CODES[Membership.EXPECTED]
        )
    record, beat = member.record, member.pulse
    status = pb.WorkerStatus(
        worker_id=record.worker_id,
        rank=rank,
        incarnation=record.incarnation,
        membership=MEMBERSHIP_CODES[record.membership],
        heartbeat_age_seconds=max(0.0, now - member.last_seen),
        hostname=record.hostname,
        port=record.port,
        gpu_count=record.gpu_count,
        memory_bytes=record.memory_bytes,
        metadata=record.metadata,
        registered_at=record.registered_at,
        detail=record.detail,
        process=record.process,
        state=STATE_CODES[beat.state if beat else WorkerState.IDLE],
        step=beat.step if beat else None,
        epoch=beat.epoch if beat else 0,
    )
    if beat is not None:
        report = pb.HeartbeatRequest.FromString(beat.report)
        if beat.step_seconds:
            status.step_seconds = beat.step_seconds
        status.resources.CopyFrom(report.resources)
        status.metrics.update(report.metrics)
    slowness = job.stragglers.slowness(member)
    if slowness is not None:
        status.slowness = slowness
    status.is_straggler = job.stragglers.is_straggler(member)
    return status


def job_status(
    job: Job,
    members: list[tuple[int, Member | None]],
    next_rank: int,
    now: float,
    fates: RetentionForecast,
) -> pb.JobStatus:
    """A job, with one page of its workers."""
    roster, latest = job.roster, job.checkpoints.latest
    status = pb.JobStatus(
        job=job.name,
        generation=roster.generation,
        world_size=roster.world_size,
        live_workers=roster.live_count,
        dead_workers=sum(m.record.membership == Membership.DEAD for m in roster.slots.held()),
        workers=[worker(job, rank, member, now) for rank, member in members],
        next_rank=next_rank,
        barriers=[_barrier(job, round_, now) for round_ in job.barriers.open.values()],
        epoch=roster.epoch,
        completed_epochs=job.completed_epochs,
        dataset_count=len(job.datasets),
        checkpoint_count=job.checkpoints.history.present,
        actions=actions(roster.actions),
        loss_ages_seconds=[max(0.0, now - at) for at in reversed(roster.losses.times)],
        incomplete_epochs=[
            pb.IncompleteEpoch(
                dataset_id=attempt.record.dataset_id,
                epoch=attempt.record.epoch,
                missing=attempt.record.lacking,
                expected=attempt.record.expected,
            )
            for attempt in job.coverages.incomplete()[:INCOMPLETE_SHOWN]
        ],
    )
    for record in islice(job.checkpoints.history.newest(), CHECKPOINTS_SHOWN):
        shown = checkpoint(record, job.name, fates.will_be_dropped(record))
        status.checkpoints.append(shown)
    if latest is not None:
        shown = checkpoint(latest, job.name, fates.will_be_dropped(latest))
        status.latest_checkpoint.CopyFrom(shown)
    return status


def silent(member: Member, now: float) -> pb.SilentWorker:
    """A member that was not heard for a while."""
    return pb.SilentWorker(
        worker_id=member.worker_id,
        rank=member.rank,
        heartbeat_age_seconds=max(0.0, now - member.last_seen),
        process=member.record.process,
    )


@lru_cache(maxsize=SEGMENTS_CACHED)
def _segment(record: SegmentRecord) -> pb.EpochSegment:
    """A segment as a message; kept, since all workers are told of it at once."""
    return pb.EpochSegment(
        slot_count=record.slot_count,
        dead_slots=record.dead,
        weights=record.weights,
        taken=record.taken,
        taken_back=[
            pb.TakenBack(segment=b.segment, slot=b.slot, start=b.start, stop=b.stop)
            for b in record.taken_back
        ],
    )


def _barrier(job: Job, round_: Round, now: float) -> pb.BarrierStatus:
    missing = job.barriers.missing(round_)
    return pb.BarrierStatus(
        barrier_id=round_.barrier_id,
        round=round_.number,
        arrived=len(round_.arrived),
        expected=len(round_.expected),
        open_seconds=max(0.0, now - round_.opened_at),
        missing=[_missing(m) for m in missing],
    )


def _action(record: ActionRecord) -> pb.Action:
    return pb.Action(
        action_id=record.action_id,
        kind=record.kind,
        worker_id=record.worker_id,
        reason=record.reason,
        requested_at=record.requested_at,
        requested_by=record.requested_by,
    )


def _missing(m: c.Missing) -> pb.MissingWorker:
    return pb.MissingWorker(
        worker_id=m.worker_id, rank=m.rank, last_step=m.last_step, registered=m.registered
    )


def layout(record: LayoutRecord, full: bool) -> pb.DatasetLayout:
    """A layout for the wire; the lists of shards and files only when ``full``."""
    layout = pb.DatasetLayout(
        fingerprint=record.fingerprint,
        root=record.root,
        total_bytes=record.total_bytes,
        columns=record.columns,
        options=record.options,
    )
    if full:
        layout.shard_samples.extend(unpack(record.shard_samples, record.shard_count).tolist())
        layout.shard_bytes.extend(unpack(record.shard_bytes, record.shard_count).tolist())
        layout.files.extend(record.files)
        layout.file_samples.extend(unpack(record.file_samples, len(record.files)).tolist())
    return layout
