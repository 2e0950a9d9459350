"""Read-only methods of the service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.message import Message

from .._version import __version__
from ..config import CoordinatorConfig
from ..errors import StorageError
from ..rpc import decode, encode
from ..rpc.gen import coordinator_pb2 as pb
from ..rpc.messages import to_message
from ..telemetry import MethodStats
from ..types import DEFAULT_JOB
from .limits import RateLimits
from .state import Job, Machine, Refused
from .state.barriers import NAMES_CUT
from .state.checkpoints.history import RetentionForecasts
from .state.datasets import Dataset
from .state.records import DatasetRecord, IndexRecord
from .store import SqliteStore

PAGE = 1000
"""Workers in one page of a status."""
SHARDS_AT_ONCE = 50_000
"""Larger assignments would block the event loop for too long."""
SHARDS_LISTED = 1_000_000
ANSWERS_WAITING = 32

Answer = Message | asyncio.Future[Message]


class AssignmentAnswers:
    """Answers that need the assignment of a dataset; long ones are computed in another thread.

    One at a time, with a short queue; further callers are refused.
    """

    def __init__(self, store: SqliteStore) -> None:
        self._store = store
        self._turn = asyncio.Lock()
        self._waiting = 0

    def answer(self, dataset: Dataset, compute: Callable[[], Message]) -> Answer:
        """Compute an answer, now or later."""
        if max(dataset.record.shard_count, dataset.file_count) <= SHARDS_AT_ONCE:
            return compute()
        if self._waiting >= ANSWERS_WAITING:
            raise Refused(
                "rate_limited",
                f"{self._waiting} answers about datasets of more than {SHARDS_AT_ONCE} shards or "
                "files are being computed: ask again, or use a larger shard_size",
                retry_after=1.0,
            )
        self._waiting += 1
        return asyncio.ensure_future(self._compute(compute))

    async def _compute(self, compute: Callable[[], Message]) -> Message:
        try:
            async with self._turn:
                message = await asyncio.to_thread(compute)
            await self._store.flush()
        except StorageError as exc:
            raise Refused("storage", str(exc)) from exc
        finally:
            self._waiting -= 1
        return message


class Queries:
    """The read-only methods of the service."""

    def __init__(
        self, machine: Machine, store: SqliteStore, limits: RateLimits, config: CoordinatorConfig
    ) -> None:
        self._machine = machine
        self._store = store
        self._term = store.term
        self._limits = limits
        self._config = config
        self._descriptions = Descriptions(store)
        self._assignments = AssignmentAnswers(store)
        self._forecasts = RetentionForecasts()
        self.handlers: dict[str, Callable[[Any, float], Answer]] = {
            "GetDataShard": self._get_data_shard,
            "ListShards": self._list_shards,
            "ListFiles": self._list_files,
            "ListDatasets": self._list_datasets,
            "GetDataset": self._get_dataset,
            "GetCoverage": self._get_coverage,
            "GetLatestCheckpoint": self._get_latest_checkpoint,
            "ListCheckpoints": self._list_checkpoints,
            "ListActions": self._list_actions,
            "GetStatus": self._get_status,
            "ListProcesses": self._list_processes,
            "ListJobs": self._list_jobs,
        }

    def server_info(
        self, started_at: float, now: float, transport: str, stats: Mapping[str, MethodStats]
    ) -> pb.ServerInfo:
        """Version, clock and request metrics of the coordinator."""
        return pb.ServerInfo(
            version=__version__,
            term=self._term,
            started_at=started_at,
            now=now,
            transport=transport,
            heartbeat_interval_ms=self._config.heartbeat_interval_ms,
            heartbeat_timeout_ms=self._config.heartbeat_timeout_ms,
            methods=[
                pb.MethodMetrics(
                    method=name,
                    calls=one.latency.count,
                    errors=one.errors,
                    p50_seconds=one.latency.quantile(0.5),
                    p99_seconds=one.latency.quantile(0.99),
                    bucket_bounds=one.latency.bounds,
                    bucket_counts=one.latency.counts,
                    total_seconds=one.latency.total,
                )
                for name, one in stats.items()
            ],
        )

    # Datasets

    def _get_data_shard(self, request: pb.ShardRequest, now: float) -> Answer:
        job = self._machine.job(request.job or DEFAULT_JOB)
        rank = self._rank_of(job.name, request.worker_id, request.incarnation, now)
        dataset, view = job.datasets.shared(request.dataset_id, rank)
        generation = job.roster.generation

        def answer() -> Message:
            count = dataset.load(rank, view)
            if request.index >= count:
                raise Refused(
                    "unknown_rank",
                    f"worker {request.worker_id!r} has {count} shards of "
                    f"{request.dataset_id!r}; there is no shard number {request.index}",
                )
            shard = dataset.shard_in_order(rank, request.epoch, view, request.index)
            return encode.shard(shard, count, generation)

        return self._assignments.answer(dataset, answer)

    def _list_shards(self, request: pb.ShardListRequest, now: float) -> Answer:
        job = self._machine.job(decode.job_name(request.job))
        rank = self._asked_rank(job, request, now)
        dataset, view = job.datasets.shared(request.dataset_id, rank, request.world_size)
        generation = job.roster.generation

        def answer() -> Message:
            _check_listed(dataset, rank, dataset.load(rank, view))
            order = dataset.order(rank, request.epoch, view)
            return encode.shards(dataset.shards(order), len(order), generation)

        return self._assignments.answer(dataset, answer)

    def _list_files(self, request: pb.FileListRequest, now: float) -> Answer:
        job = self._machine.job(decode.job_name(request.job))
        rank = self._asked_rank(job, request, now)
        dataset, view = job.datasets.shared(request.dataset_id, rank, request.world_size)
        reply = pb.FileList(
            generation=job.roster.generation,
            file_count=dataset.file_count,
            worker_count=view[0] - len(view[1]),
        )

        def answer() -> Message:
            if not dataset.seen:
                _check_listed(dataset, rank, dataset.load(rank, view))
            return encode.add_files(reply, dataset.files(rank, request.epoch, view))

        return self._assignments.answer(dataset, answer)

    def _asked_rank(
        self, job: Job, request: pb.ShardListRequest | pb.FileListRequest, now: float
    ) -> int:
        if request.worker_id:
            return self._rank_of(job.name, request.worker_id, request.incarnation, now)
        if request.HasField("rank"):
            return request.rank
        raise decode.refuse("name the worker by worker_id or by rank")

    def _list_datasets(self, request: pb.JobRequest, now: float) -> Answer:
        job = self._machine.job(decode.job_name(request.job))
        records = job.datasets.records()
        return pb.DatasetList(datasets=[encode.dataset(r, job.name) for r in records])

    def _get_dataset(self, request: pb.DatasetRequest, now: float) -> Answer:
        job = self._machine.jobs.get(decode.job_name(request.job))
        record = job.datasets.find(request.dataset_id) if job else None
        if job is None or record is None:
            return pb.DatasetDescription(found=False, state_id=self._store.state_id)
        dataset = job.datasets.get(request.dataset_id)
        dataset.read_order = decode.order(request.order) or dataset.read_order
        if request.full:
            return asyncio.ensure_future(self._descriptions.full(job, record))
        return self._descriptions.brief(job, record)

    def _get_coverage(self, request: pb.CoverageRequest, now: float) -> Answer:
        job = self._machine.job(decode.job_name(request.job))
        ledgers = job.epochs.ledgers.get(request.dataset_id, {})
        epochs = job.coverages.of(request.dataset_id, ledgers)
        if request.HasField("epoch"):
            epochs = [covered for covered in epochs if covered.epoch == request.epoch]
        return pb.CoverageList(
            epochs=[
                to_message(one, pb.Coverage, digest=one.digest, complete=one.complete)
                for one in epochs
            ]
        )

    def _rank_of(self, job: str, worker_id: str, incarnation: int, now: float) -> int:
        member = self._machine.job(job).roster.by_id.get(worker_id)
        if member is not None:
            self._limits.check_worker(job, worker_id, now)
        if incarnation:
            return self._machine.member(job, worker_id, incarnation)[1].rank
        if member is None or not member.live:
            raise Refused("unknown_rank", f"worker {worker_id!r} is not a member of {job!r}")
        return member.rank

    # Checkpoints, actions, jobs

    def _get_latest_checkpoint(self, request: pb.RecoveryRequest, now: float) -> Answer:
        job = self._machine.jobs.get(decode.job_name(request.job))
        if job is None:
            return pb.RecoveryInfo(found=False)
        latest = job.checkpoints.latest
        if latest is None:
            return pb.RecoveryInfo(found=False, generation=job.roster.generation)
        return pb.RecoveryInfo(
            found=True,
            checkpoint=encode.checkpoint(latest, job.name),
            generation=job.roster.generation,
        )

    def _list_checkpoints(self, request: pb.JobRequest, now: float) -> Answer:
        job = self._machine.job(decode.job_name(request.job))
        records, forecast = job.checkpoints.history.oldest(), self._forecasts.of(job)
        return pb.CheckpointList(
            checkpoints=[
                encode.checkpoint(r, job.name, forecast.will_be_dropped(r)) for r in records
            ]
        )

    def _list_actions(self, request: pb.JobRequest, now: float) -> Answer:
        job = self._machine.job(decode.job_name(request.job))
        return pb.ActionList(actions=map(encode.action, job.roster.actions))

    def _get_status(self, request: pb.StatusRequest, now: float) -> Answer:
        job = self._machine.job(decode.job_name(request.job))
        slots = job.roster.slots
        if request.worker_id:
            member = job.roster.by_id.get(request.worker_id)
            if member is None:
                raise Refused(
                    "unknown_worker",
                    f"worker {request.worker_id!r} is not a member of job {job.name!r}",
                )
            status = encode.job_status(
                job, [(member.rank, member)], 0, now, self._forecasts.of(job)
            )
            if member.live:
                silent = job.roster.silent_for(member)[:NAMES_CUT]
                status.silent_workers.extend(encode.silent(member, now) for member in silent)
            return status
        first = request.from_rank
        last = first + min(request.limit or PAGE, PAGE)
        page = [(rank, slots[rank]) for rank in range(first, min(last, len(slots)))]
        if not job.roster.world_size or job.has_finished:
            # No vacant rank is expected.
            page = [(rank, member) for rank, member in page if member is not None]
        following = last if last < len(slots) else 0
        return encode.job_status(job, page, following, now, self._forecasts.of(job))

    def _list_processes(self, request: pb.ProcessesRequest, now: float) -> Answer:
        job = self._machine.jobs.get(decode.job_name(request.job))
        members = (
            job.roster.on_machine(decode.identifier("machine", request.machine)) if job else []
        )
        own = request.pid, request.process_started
        others = [m for m in members if (m.record.pid, m.record.process_started) != own]
        shown = [to_message(m.record, pb.MemberProcess) for m in others[: decode.PROCESSES_CUT]]
        return pb.ProcessList(processes=shown)

    def _list_jobs(self, request: pb.ListJobsRequest, now: float) -> Answer:
        return pb.JobList(
            jobs=[
                pb.JobSummary(
                    job=job.name,
                    generation=job.roster.generation,
                    world_size=job.roster.world_size,
                    live_workers=job.roster.live_count,
                    dataset_count=len(job.datasets),
                    checkpoint_count=job.checkpoints.history.present,
                    created_at=job.roster.created_at,
                )
                for job in self._machine.jobs.values()
            ]
        )


def _check_listed(dataset: Dataset, rank: int, count: int) -> None:
    if count > SHARDS_LISTED:
        raise decode.refuse(
            f"rank {rank} has {count} shards of {dataset.record.dataset_id!r}, and an answer lists "
            f"at most {SHARDS_LISTED}: use a larger shard_size, or ask for one at a time"
        )


class Descriptions:
    """Descriptions of datasets; the last one is cached, since all workers of a job ask at once."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store
        self._record: DatasetRecord | None = None
        self._reading: asyncio.Future[pb.DatasetInfo] | None = None
        self._described: pb.DatasetDescription | None = None
        """The newest answer, shared by callers that ask at once."""

    def brief(self, job: Job, record: DatasetRecord) -> pb.DatasetDescription:
        """A dataset without the lists of its shards and files."""
        description = _heading(job, record, self._store.state_id)
        description.dataset.CopyFrom(encode.dataset(record, job.name))
        return description

    async def full(self, job: Job, record: DatasetRecord) -> pb.DatasetDescription:
        """A dataset with layout and index; everything in it is stored before this returns."""
        if self._reading is None or self._record is not record:
            self._record, self._described = record, None
            self._reading = asyncio.ensure_future(self._read(job.name, record))
        reading = self._reading
        try:
            dataset = await asyncio.shield(reading)
            await self._store.flush()
        except StorageError as exc:
            self._record = self._reading = self._described = None
            raise Refused("storage", str(exc)) from exc
        heading, cached = _heading(job, record, self._store.state_id), self._described
        if reading is self._reading and cached is not None and _same_heading(heading, cached):
            return cached
        heading.dataset.CopyFrom(dataset)
        if reading is self._reading:
            self._described = heading
        return heading

    async def _read(self, job: str, record: DatasetRecord) -> pb.DatasetInfo:
        index = await self._store.read("index", job, record.dataset_id)
        data = index.data if isinstance(index, IndexRecord) else b""
        return encode.dataset(record, job, full=True, index=data)


def _heading(job: Job, record: DatasetRecord, state_id: str) -> pb.DatasetDescription:
    slot_count, dead = job.roster.view()
    return pb.DatasetDescription(
        found=True,
        generation=job.roster.generation,
        slot_count=slot_count,
        dead_slots=sorted(dead),
        state_id=state_id,
        order=job.coverages.order(record.dataset_id),
    )


def _same_heading(one: pb.DatasetDescription, other: pb.DatasetDescription) -> bool:
    return (
        one.generation == other.generation
        and one.slot_count == other.slot_count
        and one.dead_slots == other.dead_slots
        and one.order == other.order
    )
