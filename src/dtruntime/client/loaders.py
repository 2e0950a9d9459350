"""Loaders of registered datasets, and how they account for samples with the coordinator."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from google.protobuf.message import Message

from .._sync_bridge import awaitable, blocking
from ..config import Config
from ..data.live_loader import ClaimOutcome, LiveLoader, Offer
from ..data.loader import Consumption, Delivery, Loader
from ..data.order import Segment, TakenBack
from ..data.source import FileSource, NumberSource, Ranges, Source
from ..errors import ShardError, ShardNotFoundError, StrataError
from ..rpc.gen import coordinator_pb2 as pb
from ..sharding.coverage_digest import Counted, Digest, judge, whole
from ..storage import DiskCache
from ..types import DatasetSummary, EpochCoverage, WorkerState
from . import current_orchestrator
from .membership import StateLostError
from .worker_config import OUTAGE_SECONDS

if TYPE_CHECKING:
    from .datasets import DatasetRegistry
    from .membership import JobMember
    from .orchestrator import TrainingOrchestrator

GLOBAL, AFFINITY = "global", "affinity"


async def summary_for(registry: DatasetRegistry, dataset_id: str, order: str) -> DatasetSummary:
    """A dataset that is about to be read; a worker announces the order."""
    announced = "" if registry.worker is None else order
    return await registry.describe_async(dataset_id, order=announced)


async def open_loader(
    registry: DatasetRegistry, dataset_id: str, options: dict[str, Any]
) -> Loader:
    """A loader for this worker's rank that reports what it consumed."""
    order = str(options.get("order", GLOBAL))
    summary = await summary_for(registry, dataset_id, order)
    worker = registry.worker
    defaults: dict[str, Any] = {"shuffle": summary.shuffle, "seed": summary.seed}
    if worker is not None:
        defaults["progress"] = CoverageReports(worker, registry, dataset_id, order)
        defaults["rank"], defaults["world_size"] = _place(worker, summary)
        worker.listen_for_others()
    source = await open_source(registry, summary, options)
    if worker is None and not {"rank", "world_size"} & options.keys():
        return UnregisteredLoader(registry, source, **{**defaults, **options})
    loader = Loader(source, **{**defaults, **options})
    return loader if worker is None else loader.watched_by(worker.activity)


class UnregisteredLoader(Loader):
    """A loader in a process that is not registered: it reads all samples.

    Refuses to go on once the process has registered, since the worker's part is smaller.
    """

    def __init__(self, registry: DatasetRegistry, source: Source, **options: Any) -> None:
        super().__init__(source, **options)
        self._registry: DatasetRegistry | None = registry

    def accept(self, step: Delivery) -> None:
        """Count a step as handed out; raises when the process has registered since."""
        worker = self._registry.worker if self._registry is not None else None
        if worker is not None:
            raise StrataError(
                f"this loader was made before {worker.worker_id} of job {worker.job!r} called "
                "register(), and reads all samples instead of its part: make the loader after "
                "register(), or give it rank= and world_size="
            )
        super().accept(step)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_registry": None}


async def open_live_loader(
    registry: DatasetRegistry,
    summary: DatasetSummary,
    complete: set[int],
    options: dict[str, Any],
) -> LiveLoader:
    """A loader whose share the coordinator assigns, starting at the first incomplete epoch."""
    worker = registry.worker
    if worker is None:
        raise StrataError(
            f"a live loader needs a registered worker of job {registry.job!r}: call "
            "TrainingOrchestrator().register() first"
        )
    defaults = {
        "shuffle": summary.shuffle,
        "seed": summary.seed,
        "epoch": next(epoch for epoch in range(len(complete) + 1) if epoch not in complete),
        "ledger": EpochLedger(worker, registry, summary.dataset_id),
    }
    source = await open_source(registry, summary, options)
    return LiveLoader(source, **{**defaults, **options}).watched_by(worker.activity)


async def open_source(
    registry: DatasetRegistry, summary: DatasetSummary, options: dict[str, Any]
) -> Source:
    """The samples of a registered dataset; removes the options that concern them."""
    columns: Sequence[str] | None = options.pop("columns", None)
    skip: Ranges = options.pop("skip", ())
    cache: DiskCache | None = options.pop("cache", None)
    if not summary.path:
        if columns is not None:
            raise ShardError(f"dataset {summary.dataset_id!r} has no files, and so no columns")
        return NumberSource(summary.total_samples, summary.shard_size, skip=skip)
    index = await registry.index_of_async(summary.dataset_id)
    return FileSource(
        index,
        summary.shard_size,
        exact=summary.exact,
        columns=columns,
        skip=skip,
        cache=cache or DiskCache.configured(Config.load().dataset),
    )


def _place(worker: TrainingOrchestrator, summary: DatasetSummary) -> tuple[int, int]:
    """This worker's position among the present ranks, and how many there are."""
    dead = set(summary.dead_slots)
    present = [rank for rank in range(summary.slot_count) if rank not in dead]
    if worker.rank not in present:
        raise ShardError(
            f"rank {worker.rank} is not among the {len(present)} present ranks of job "
            f"{worker.job!r}: the membership has just changed; make the loader again"
        )
    return present.index(worker.rank), len(present)


R = TypeVar("R", bound=Message)

EPOCHS_KEPT = 64
"""How many epochs' reports are replayed to a coordinator that lost its state."""

Outcome = Literal["granted", "moved", "complete", "waiting"]
_OUTCOMES: dict[int, Outcome] = {
    pb.CLAIM_OUTCOME_GRANTED: "granted",
    pb.CLAIM_OUTCOME_MOVED: "moved",
    pb.CLAIM_OUTCOME_COMPLETE: "complete",
    pb.CLAIM_OUTCOME_WAITING: "waiting",
}


class EpochLedger:
    """The coordinator's ledger of a dataset's epochs, as one worker uses it."""

    def __init__(
        self, worker: TrainingOrchestrator, registry: DatasetRegistry, dataset_id: str
    ) -> None:
        self._worker = worker
        self._registry = registry
        self._dataset_id = dataset_id
        self._state: tuple[int, str] = (-1, "")
        """The epoch of the last claim, and the coordinator's state that has its ledger."""
        self._ended: tuple[int, list[Segment]] = (-1, [])
        """An epoch and its segments that have ended, which are not sent again."""

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
    ) -> ClaimOutcome:
        """Claim a lane up to a position, or learn where to go on."""
        request = pb.ClaimRequest(
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
        # With nothing left to read it waits for what others give back or finish.
        waits = self._worker.activity.doing(WorkerState.WAITING) if wait else nullcontext()
        with waits:
            reply = await self._call("ClaimSamples", request, pb.ClaimResponse, wait or None)
        self._state = epoch, self._worker.state_id
        return ClaimOutcome(
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
        """Record that everything claimed up to a position is consumed for good."""
        request = pb.CommitRequest(
            dataset_id=self._dataset_id,
            epoch=epoch,
            segment=segment,
            position=position,
            digest=digest,
        )
        await self._call("CommitSamples", request, pb.CommitResponse)

    commit = blocking(commit_async)

    async def _call(
        self, method: str, request: Any, reply: type[R], hold: float | None = None
    ) -> R:
        """A call about an epoch; raises `ShardError` when its ledger was lost with the state."""
        begun = request.segment > 0
        if begun and self._state != (request.epoch, self._worker.state_id):
            raise self._lost(request.epoch)
        try:
            return await _call_about(
                self._worker, self._registry, method, request, reply, hold=hold, repeat=not begun
            )
        except StateLostError as exc:
            raise self._lost(request.epoch) from exc

    def _lost(self, epoch: int) -> ShardError:
        return ShardError(
            f"epoch {epoch} of dataset {self._dataset_id!r}: the coordinator has lost its state, "
            "and with it the record of who has read which samples. Restore it ('strata state "
            "restore COPY') and start the workers again, or give up what was read of this epoch: "
            "start them again without, and it is read from its beginning"
        )


class CoverageReports:
    """Reports to the coordinator what a loader has consumed, for the proof of coverage."""

    def __init__(
        self,
        worker: TrainingOrchestrator,
        registry: DatasetRegistry,
        dataset_id: str,
        order: str,
    ) -> None:
        self._worker = worker
        self._registry = registry
        self._dataset_id = dataset_id
        self._order = order
        self._attempt = worker.generation, 0
        self._reports: dict[int, pb.CoverageReport] = {}
        """The last report on each epoch."""
        current_orchestrator.add_reporter(self)

    def resumed(self) -> None:
        """A state was loaded."""
        self._attempt = self._worker.count_resume(self._dataset_id)

    @awaitable
    async def report_async(self, consumed: Consumption) -> None:
        """Report what this worker consumed."""
        request = pb.CoverageReport(
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
            order=self._order,
        )
        self._reports.pop(consumed.epoch, None)
        self._reports[consumed.epoch] = request
        while len(self._reports) > EPOCHS_KEPT:
            del self._reports[next(iter(self._reports))]
        await self._send(request)

    report = blocking(report_async)

    async def replay(self, member: JobMember) -> None:
        """Report again to a coordinator that lost its state."""
        if member is self._worker:
            for request in list(self._reports.values()):
                await self._send(request)

    async def _send(self, request: pb.CoverageReport) -> None:
        await _call_about(self._worker, self._registry, "ReportCoverage", request, pb.CoverageReply)


def coverage_of(
    total: int, epochs: Sequence[pb.Coverage], progress: Counted | None = None
) -> list[EpochCoverage]:
    """Compare each epoch with all samples; takes about a second for a hundred million."""
    if not epochs:
        return []
    expected = whole(total, progress)
    return [_coverage(total, epoch, expected) for epoch in epochs]


def _coverage(total: int, epoch: pb.Coverage, expected: Digest) -> EpochCoverage:
    verdict = judge(
        Digest(total, epoch.digest),
        expected,
        expected=epoch.expected,
        assumed=epoch.assumed,
        dropped=epoch.dropped,
    )
    return EpochCoverage(
        epoch=epoch.epoch,
        total=total,
        covered=verdict.covered,
        missing=verdict.missing,
        repeated=verdict.repeated,
        assumed=epoch.assumed,
        dropped=epoch.dropped,
        complete=epoch.complete,
        workers=epoch.workers,
        segments=epoch.segments,
        suspect=verdict.suspect,
        ended_incomplete=epoch.ended_incomplete,
    )


async def _call_about(
    worker: TrainingOrchestrator,
    registry: DatasetRegistry,
    method: str,
    request: Any,
    reply: type[R],
    *,
    hold: float | None = None,
    repeat: bool = True,
) -> R:
    """A member's call about a dataset, which is registered again if the coordinator lost it."""
    options: dict[str, Any] = {"patience": OUTAGE_SECONDS, "hold": hold, "repeat": repeat}
    try:
        return await worker.call(method, request, reply, **options)
    except ShardNotFoundError:
        if not await registry.restore_dataset(request.dataset_id):
            raise
    return await worker.call(method, request, reply, **options)


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
