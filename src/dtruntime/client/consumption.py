"""What a worker has consumed of an epoch, told to the coordinator."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Literal

from .._loop import awaitable, blocking
from ..data.loading.live import Claim, Offer
from ..data.loading.loader import Consumed
from ..data.order import Segment, TakenBack
from ..rpc.channel import Channel
from ..rpc.gen import coordinator_pb2 as pb
from ..types import WorkerState
from .settings import OUTAGE_SECONDS

if TYPE_CHECKING:
    from .orchestrator import TrainingOrchestrator

Outcome = Literal["granted", "moved", "complete", "waiting"]
_OUTCOMES: dict[int, Outcome] = {
    pb.CLAIM_OUTCOME_GRANTED: "granted",
    pb.CLAIM_OUTCOME_MOVED: "moved",
    pb.CLAIM_OUTCOME_COMPLETE: "complete",
    pb.CLAIM_OUTCOME_WAITING: "waiting",
}


class EpochLedger:
    """The coordinator's ledger of a dataset's epochs, as one worker uses it."""

    def __init__(self, worker: TrainingOrchestrator, channel: Channel, dataset_id: str) -> None:
        self._worker = worker
        self._channel = channel
        self._dataset_id = dataset_id
        self._ended: tuple[int, list[Segment]] = (-1, [])
        """The segments of an epoch that are over, which are not sent again."""

    @awaitable
    async def claim_async(
        self,
        epoch: int,
        plan: str,
        segment: int,
        upto: int,
        length: int,
        wait: float,
        offer: Offer | None = None,
    ) -> Claim:
        """Take a lane up to a place, or learn where to go on."""
        identity = self._worker.identity
        request = pb.ClaimRequest(
            job=identity.job,
            worker_id=identity.worker_id,
            incarnation=identity.incarnation,
            dataset_id=self._dataset_id,
            epoch=epoch,
            plan=plan,
            segment=segment,
            upto=upto,
            length=length,
            known=len(self._ended[1]) if self._ended[0] == epoch else 0,
        )
        if offer is not None:
            request.commit_segment, request.commit_position, request.commit_digest = offer
        # With nothing left to read it waits for what others give back, or finish.
        waits = self._worker.activity.doing(WorkerState.WAITING) if wait else nullcontext()
        with waits:
            reply = await self._channel.call(
                "ClaimSamples",
                request,
                pb.ClaimResponse,
                patience=OUTAGE_SECONDS,
                hold=wait or None,
            )
        return Claim(
            outcome=_OUTCOMES[reply.outcome],
            slot=reply.slot,
            segments=self._all_segments(epoch, request.known, reply),
            claimed=reply.claimed,
            committed_segment=reply.committed_segment,
            committed_position=reply.committed_position,
            committed_digest=reply.committed_digest,
        )

    claim = blocking(claim_async)

    def _all_segments(self, epoch: int, known: int, reply: pb.ClaimResponse) -> tuple[Segment, ...]:
        if reply.outcome != pb.CLAIM_OUTCOME_MOVED:
            return ()
        ended = self._ended[1][:known] if self._ended[0] == epoch else []
        segments = [*ended, *(_segment(segment) for segment in reply.segments)]
        self._ended = epoch, segments[:-1]
        return tuple(segments)

    @awaitable
    async def commit_async(self, epoch: int, segment: int, position: int, digest: bytes) -> None:
        """Say that what was taken up to a place is consumed for good."""
        identity = self._worker.identity
        request = pb.CommitRequest(
            job=identity.job,
            worker_id=identity.worker_id,
            incarnation=identity.incarnation,
            dataset_id=self._dataset_id,
            epoch=epoch,
            segment=segment,
            position=position,
            digest=digest,
        )
        await self._channel.call(
            "CommitSamples", request, pb.CommitResponse, patience=OUTAGE_SECONDS
        )

    commit = blocking(commit_async)


class CoverageReports:
    """Tells the coordinator what a loader has consumed, for the proof of coverage."""

    def __init__(self, worker: TrainingOrchestrator, channel: Channel, dataset_id: str) -> None:
        self._worker = worker
        self._channel = channel
        self._dataset_id = dataset_id
        self._attempt = worker.generation, 0

    def resumed(self) -> None:
        """A state was loaded."""
        self._attempt = self._worker.count_resume(self._dataset_id)

    @awaitable
    async def report_async(self, consumed: Consumed) -> None:
        """Tell what this worker consumed."""
        identity = self._worker.identity
        request = pb.CoverageReport(
            job=identity.job,
            worker_id=identity.worker_id,
            incarnation=identity.incarnation,
            dataset_id=self._dataset_id,
            epoch=consumed.epoch,
            base=consumed.base.to_bytes(),
            assumed=consumed.assumed,
            world_size=consumed.world_size,
            digest=consumed.seen.to_bytes(),
            dropped=consumed.dropped,
            expected=consumed.expected,
            generation=self._attempt[0],
            loads=self._attempt[1],
            ended=consumed.ended,
        )
        await self._channel.call(
            "ReportCoverage", request, pb.CoverageReply, patience=OUTAGE_SECONDS
        )

    report = blocking(report_async)


def _segment(segment: pb.EpochSegment) -> Segment:
    return Segment(
        slot_count=segment.slot_count,
        dead=tuple(segment.dead_slots),
        consumed=tuple(segment.taken),
        weights=tuple(segment.weights),
        taken_back=tuple(
            TakenBack(back.segment, back.slot, back.start, back.stop) for back in segment.taken_back
        ),
    )
