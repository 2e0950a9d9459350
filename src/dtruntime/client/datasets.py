"""`DatasetRegistry`: the datasets of a job, and which of their shards a worker reads."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, TypeVar

from google.protobuf.message import Message

from .._sync_bridge import awaitable, blocking
from ..config import split_address
from ..errors import (
    ConnectionError,
    ShardError,
    ShardNotFoundError,
    ShardValueError,
    StrataError,
    SyncError,
)
from ..rpc import messages
from ..rpc.channel import Channel
from ..rpc.gen import coordinator_pb2 as pb
from ..sharding import MovePlan
from ..sharding.coverage_digest import Counted
from ..storage.urls import is_remote
from ..telemetry import EventLog
from ..types import FORMATS, DatasetSummary, EpochCoverage, ShardInfo, check_id, check_whole
from . import current_orchestrator
from .dataset_registration import (
    DatasetLayout,
    Progress,
    RegisteredDataset,
    add_layout,
    agrees,
    changed_files,
    check_options,
    index_files,
    index_in,
    index_registered_files,
    layout_of,
    move_plan,
    new_dataset,
    with_total,
)
from .worker_config import OUTAGE_SECONDS, WorkerConfig

if TYPE_CHECKING:
    from ..data.index import DatasetIndex
    from ..data.live_loader import LiveLoader
    from ..data.loader import Loader
    from ..data.readers import Options
    from ..data.source import Source
    from .membership import JobMember
    from .orchestrator import TrainingOrchestrator

log = EventLog("datasets")

R = TypeVar("R", bound=Message)


class DatasetRegistry:
    """Registers datasets, and says which of their shards each worker reads.

    ``DatasetRegistry()`` uses the coordinator that this process is registered with, else the one
    in the environment. It is looked up at each use, so a registry may be made before the process
    registers. Constructing one does not touch the network.
    """

    def __init__(
        self,
        coordinator_url: str | None = None,
        *,
        job: str | None = None,
        patience: float | None = None,
    ) -> None:
        """``job`` defaults to the registered worker's job, else ``STRATA_JOB``.

        ``patience`` is how many seconds an absent coordinator is waited for: five minutes by
        default, and 10 s (``STRATA_CONNECT_TIMEOUT_MS``) if it has never answered.
        """
        self._given = WorkerConfig(coordinator_url=coordinator_url, job=job)
        self._channels: dict[str, Channel] = {}
        self._limits_first_contact = patience is None
        self._patience = OUTAGE_SECONDS if patience is None else patience
        self._warned: set[tuple[str, int]] = set()
        self._registered: dict[tuple[str, str, str], RegisteredDataset] = {}
        """By coordinator, job and id; for a coordinator that loses its state."""
        self._restoring = asyncio.Lock()

    @property
    def _config(self) -> WorkerConfig:
        """The given settings, completed from the process's orchestrator or the environment."""
        worker, given = current_orchestrator.current(), self._given
        if worker is not None:
            given = replace(
                given,
                coordinator_url=given.coordinator_url or worker.config.coordinator_url,
                job=given.job or worker.job,
            )
        return given.resolved()

    @property
    def _channel(self) -> Channel:
        """The channel to the coordinator that currently applies."""
        config = self._config
        url = config.coordinator_url or ""
        if url not in self._channels:
            # One that this process is registered with has answered before.
            new = self._limits_first_contact and current_orchestrator.current() is None
            self._channels[url] = Channel(
                url, connect_timeout=config.connect_seconds if new else None
            )
        return self._channels[url]

    @property
    def job(self) -> str:
        """The job that the datasets belong to."""
        return self._config.job or ""

    @property
    def worker(self) -> TrainingOrchestrator | None:
        """This process's orchestrator, if it is a member of the same job at the same coordinator.

        A rank means nothing in a job of the same name elsewhere. Since a host has many names,
        coordinators are told apart by their ports.
        """
        worker = current_orchestrator.current()
        if worker is None or worker.job != self.job:
            return None
        urls = (worker.coordinator_url, self._channel.url)
        return worker if len({split_address(url)[1] for url in urls}) == 1 else None

    # Registration

    @awaitable
    async def register_async(  # noqa: PLR0913
        self,
        /,
        dataset_id: str,
        path: str | os.PathLike[str],
        format: str,
        total_samples: int | None = None,
        shard_size: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        *,
        exact: bool = False,
        options: Options | None = None,
        progress: Progress | None = None,
        **metadata: object,
    ) -> None:
        """Register the files at ``path``: a folder, a file, a glob or a URL.

        They are indexed here; ``progress`` is called from another thread with how far that is.
        Shards have about ``shard_size`` samples and end where row groups do; with ``exact`` they
        have exactly ``shard_size``. ``options`` say how to read CSV or TFRecord files.

        Registering the same dataset again does nothing; a different one under the same id, or
        files that have changed since, is a `ShardError` that shows the difference. Files that
        cannot be seen here are accepted when ``total_samples`` is given; if nobody else can see
        them either, they are taken to be ``path/shard_{i}.{format}``.
        """
        if format not in FORMATS:
            raise ShardValueError(
                f"dataset {dataset_id!r}: format {format!r} is unknown; use {', '.join(FORMATS)}"
            )
        dataset = new_dataset(
            self.job,
            dataset_id,
            total_samples,
            shard_size,
            path=path,
            format=format,
            shuffle=shuffle,
            seed=seed,
            exact=exact,
            metadata=metadata,
        )
        if not dataset.path:
            raise ShardValueError(f"dataset {dataset_id!r}: the path is empty")
        await self._register_files(dataset, options, progress)
        await self._ensure_remembered(dataset_id)

    register = blocking(register_async, brief=True)

    @awaitable
    async def register_dataset_async(
        self, dataset_id: str, total_samples: int, shard_size: int, shuffle: bool = True
    ) -> None:
        """Register a dataset of sample numbers, without files."""
        await self._send(
            new_dataset(self.job, dataset_id, total_samples, shard_size, shuffle=shuffle)
        )
        await self._ensure_remembered(dataset_id)

    register_dataset = blocking(register_dataset_async, brief=True)

    async def _register_files(
        self, dataset: pb.DatasetInfo, options: Options | None, progress: Progress | None
    ) -> None:
        description = await self._description(dataset.dataset_id)
        registered = description.dataset if description.found else None
        if registered is not None:
            if not agrees(dataset, registered):
                # The coordinator refuses, and shows each difference.
                total = dataset.total_samples or registered.total_samples
                await self._send(with_total(dataset, total))
            check_options(options, registered)
            if is_remote(dataset.path) and self._rank():
                return
        index = await index_files(dataset, options, progress)
        if index is None:
            await self._send(dataset)
            return
        if registered is not None and registered.layout.fingerprint == index.fingerprint:
            return
        request = with_total(dataset, index.total_samples)
        await asyncio.to_thread(add_layout, request, index)
        try:
            await self._send(request)
        except ShardError:
            await self._check_files(dataset, index)
            raise

    async def _check_files(self, dataset: pb.DatasetInfo, index: DatasetIndex) -> None:
        """Raise an error that names the files, when only these differ from what is registered."""
        registered = (await self._description(dataset.dataset_id, full=True)).dataset
        if not (registered.HasField("layout") and agrees(dataset, registered)):
            return
        if registered.layout.fingerprint != index.fingerprint:
            raise await asyncio.to_thread(changed_files, registered, index)

    async def _send(self, request: pb.DatasetInfo) -> None:
        try:
            reply = await self._call("RegisterDataset", request, pb.DatasetRegistration)
        except ValueError as exc:
            raise ShardError(str(exc)) from exc
        self._remember(request, reply.state_id)

    # Shards

    @awaitable
    async def get_shard_async(self, dataset_id: str, worker_rank: int, epoch: int) -> list[str]:
        """The files that a rank reads whole, in the order of the epoch.

        Every file belongs to exactly one rank, and all ranks get about as many rows. With fewer
        files than ranks some get none, which is logged as a warning: `loader` and `get_shards`
        divide by rows instead. Where nobody has seen the files, these are the names of the rank's
        shards.
        """
        request = pb.FileListRequest(**self._share(dataset_id, worker_rank, epoch))
        self._listen_for_others()
        reply = await self._ask("ListFiles", request, pb.FileList)
        if not reply.file_paths:
            self._warn_without_files(request, reply)
        return list(reply.file_paths)

    get_shard = blocking(get_shard_async, brief=True)

    @awaitable
    async def get_shards_async(self, dataset_id: str, epoch: int) -> list[ShardInfo]:
        """The shards of this worker, in the order of the epoch.

        A shard is a range of rows: of each of its ``file_paths`` read the rows in ``row_ranges``,
        not the whole file, which may hold rows of other shards too.
        """
        self._listen_for_others()
        request = pb.ShardListRequest(**self._share(dataset_id, self._rank() or 0, epoch))
        reply = await self._ask("ListShards", request, pb.ShardList)
        return [messages.shard(shard) for shard in reply.shards]

    get_shards = blocking(get_shards_async, brief=True)

    def _share(self, dataset_id: str, rank: int, epoch: int) -> dict[str, Any]:
        """Fields that name a rank's share of an epoch."""
        return {
            "dataset_id": check_id("dataset", dataset_id),
            "rank": check_whole("worker_rank", rank, most=2**32 - 1),
            "epoch": check_whole("epoch", epoch),
            "job": self.job,
            "world_size": self._config.world_size or 0,
        }

    def _warn_without_files(self, request: pb.FileListRequest, reply: pb.FileList) -> None:
        """Warn, once per dataset and rank, that there is nothing to read."""
        if (request.dataset_id, request.rank) in self._warned:
            return
        self._warned.add((request.dataset_id, request.rank))
        log.warning(
            "dataset.rank_without_files",
            dataset=request.dataset_id,
            rank=request.rank,
            files=reply.file_count,
            ranks=reply.worker_count,
            remedy="get_shard() divides by whole files: use loader() or get_shards(), which divide "
            "by rows"
            if reply.file_count
            else "the dataset has sample numbers only: use loader() or get_shards()",
        )

    @awaitable
    async def plan_async(
        self,
        dataset_id: str,
        join: int | Collection[int] = 0,
        leave: Collection[int] = (),
        *,
        world_size: int | None = None,
    ) -> MovePlan:
        """What would move if workers joined or left; nothing is changed.

        ``join`` is a number of newcomers, which take the lowest free ranks, or their ranks;
        ``leave`` are ranks. While the job has no members, a world of ``world_size`` is assumed
        (by default ``WORLD_SIZE``, else 1).
        """
        description = await self._described(dataset_id, full=True)
        size = self._config.world_size if world_size is None else world_size
        return await asyncio.to_thread(move_plan, description, join, leave, size)

    plan = blocking(plan_async, brief=True)

    @awaitable
    async def rebalance_async(
        self, dataset_id: str, epoch: int, shares: Mapping[int, int] | None = None
    ) -> dict[int, int]:
        """Redistribute what no live loader has begun to read in an epoch; returns the shares.

        ``shares`` are percentages of a full share by rank, 100 for ranks not named; without them
        each rank's share follows its speed. Nobody waits: workers go on with what they have begun.
        """
        request = pb.RebalanceRequest(
            job=self.job,
            dataset_id=check_id("dataset", dataset_id),
            epoch=check_whole("epoch", epoch),
            weights={
                check_whole("rank", rank, most=2**32 - 1): check_whole("share", share, most=100)
                for rank, share in (shares or {}).items()
            },
        )
        reply = await self._ask("RebalanceEpoch", request, pb.RebalanceResponse)
        return dict(enumerate(reply.weights))

    rebalance = blocking(rebalance_async, brief=True)

    # Descriptions

    @awaitable
    async def list_datasets_async(self) -> list[DatasetSummary]:
        """All datasets of the job, by id; `describe` says who shares one."""
        reply = await self._call("ListDatasets", pb.JobRequest(job=self.job), pb.DatasetList)
        return [messages.dataset(info) for info in reply.datasets]

    list_datasets = blocking(list_datasets_async, brief=True)

    @awaitable
    async def describe_async(self, dataset_id: str, *, order: str = "") -> DatasetSummary:
        """A dataset and who shares it; `ShardNotFoundError` when it is not registered.

        ``order`` announces in which order this worker is about to read it.
        """
        description = await self._described(dataset_id, order=order)
        return messages.dataset(description.dataset, description)

    describe = blocking(describe_async, brief=True)

    @awaitable
    async def layout_async(self, dataset_id: str) -> DatasetLayout:
        """The sizes of a dataset's shards, and its files."""
        return layout_of((await self._described(dataset_id, full=True)).dataset)

    layout = blocking(layout_async, brief=True)

    @awaitable
    async def index_of_async(self, dataset_id: str) -> DatasetIndex:
        """The registered index of a dataset's files, for reading them.

        Where it was too large to be kept, the files are indexed here; `ShardError` when they are
        not the registered ones.
        """
        info = (await self._described(dataset_id, full=True)).dataset
        return await asyncio.to_thread(index_in, info) or await index_registered_files(info)

    index_of = blocking(index_of_async, brief=True)

    @awaitable
    async def coverage_async(
        self,
        dataset_id: str,
        epoch: int | None = None,
        *,
        progress: Counted | None = None,
    ) -> list[EpochCoverage]:
        """What was consumed in one epoch, or in every epoch that is kept.

        Takes about a second for a hundred million samples; ``progress`` is called from another
        thread with how many of how many have been counted.
        """
        from .loaders import coverage_of

        total = (await self._described(dataset_id)).dataset.total_samples
        epochs = await self._consumption(dataset_id, epoch)
        return await asyncio.to_thread(coverage_of, total, epochs, progress)

    coverage = blocking(coverage_async)

    async def _consumption(self, dataset_id: str, epoch: int | None = None) -> list[pb.Coverage]:
        request = pb.CoverageRequest(job=self.job, dataset_id=dataset_id)
        if epoch is not None:
            request.epoch = check_whole("epoch", epoch)
        return list((await self._ask("GetCoverage", request, pb.CoverageList)).epochs)

    # Loaders

    @awaitable
    async def loader_async(
        self, /, dataset_id: str, batch_size: int | None = None, **options: Any
    ) -> Loader:
        """A loader of this worker's part of a dataset.

        ``options`` are those of `dtruntime.data.Loader`, and ``columns``, ``skip`` and ``cache``
        as for `dtruntime.data.FileSource`. Rank and world size default to the registered worker's
        place among the present members, order and seed to those of the registration. What was
        consumed is reported at the end of each epoch and with each `commit`, so that ``strata
        datasets show`` can prove that every sample was read once.
        """
        from .loaders import open_loader

        return await open_loader(self, dataset_id, {"batch_size": batch_size, **options})

    loader = blocking(loader_async, brief=True)

    @awaitable
    async def live_loader_async(
        self, /, dataset_id: str, batch_size: int, **options: Any
    ) -> LiveLoader:
        """A loader whose share follows the membership while it reads.

        Starts with the first incomplete epoch. ``options`` are those of
        `dtruntime.data.LiveLoader`, and ``columns``, ``skip`` and ``cache`` as for `loader`.
        """
        from .loaders import AFFINITY, open_live_loader, summary_for

        summary = await summary_for(self, dataset_id, AFFINITY)
        complete = {item.epoch for item in await self._consumption(dataset_id) if item.complete}
        options = {"batch_size": batch_size, **options}
        return await open_live_loader(self, summary, complete, options)

    live_loader = blocking(live_loader_async, brief=True)

    @awaitable
    async def source_async(self, /, dataset_id: str, **options: Any) -> Source:
        """The samples of a dataset, to be combined with others in a `dtruntime.data.Mixture`.

        ``options`` are ``columns``, ``skip`` and ``cache``, as for `dtruntime.data.FileSource`.
        """
        from .loaders import GLOBAL, open_source, summary_for

        # A mixture is read in global order only.
        source = await open_source(self, await summary_for(self, dataset_id, GLOBAL), options)
        if options:
            raise TypeError(f"a source has no option {next(iter(options))!r}")
        return source

    source = blocking(source_async, brief=True)

    def _listen_for_others(self) -> None:
        worker = self.worker
        if worker is not None:
            worker.listen_for_others()

    def _rank(self) -> int | None:
        """This worker's rank; in a process that is no worker, the configured one, if any."""
        worker = self.worker
        return self._config.rank if worker is None else worker.rank

    # Calls

    async def _call(self, method: str, request: Any, reply: type[R]) -> R:
        return await self._channel.call(method, request, reply, patience=self._patience)

    async def _ask(self, method: str, request: Any, reply: type[R]) -> R:
        """A call about a dataset, which is registered again if the coordinator lost it."""
        try:
            return await self._call(method, request, reply)
        except (ConnectionError, SyncError):
            raise
        except StrataError:
            if not await self.restore_dataset(request.dataset_id):
                raise
        return await self._call(method, request, reply)

    async def _description(
        self, dataset_id: str, *, full: bool = False, order: str = ""
    ) -> pb.DatasetDescription:
        request = pb.DatasetRequest(
            dataset_id=check_id("dataset", dataset_id), job=self.job, full=full, order=order
        )
        return await self._call("GetDataset", request, pb.DatasetDescription)

    async def _described(
        self, dataset_id: str, *, full: bool = False, order: str = ""
    ) -> pb.DatasetDescription:
        """The description; `ShardNotFoundError` when the dataset is not registered."""
        description = await self._description(dataset_id, full=full, order=order)
        if not description.found and await self._restore(dataset_id, description.state_id):
            description = await self._description(dataset_id, full=full, order=order)
        if not description.found:
            raise ShardNotFoundError(
                f"dataset {dataset_id!r} is not registered in job {self.job!r}: see "
                "'strata datasets ls', or call DatasetRegistry.register() first"
            )
        self._remember(description.dataset, description.state_id)
        return description

    @awaitable
    async def close_async(self) -> None:
        """Close the connection."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    close = blocking(close_async, brief=True)

    # A coordinator that has lost its state

    def _key(self, dataset_id: str) -> tuple[str, str, str]:
        return self._channel.url, self.job, dataset_id

    def _remember(self, info: pb.DatasetInfo, state_id: str) -> None:
        key = self._key(info.dataset_id)
        before = self._registered.get(key)
        if before is None or before.state_id != state_id:
            self._registered[key] = RegisteredDataset.of(info, state_id)
            current_orchestrator.add_reporter(self)

    async def _ensure_remembered(self, dataset_id: str) -> None:
        if self._key(dataset_id) not in self._registered:
            await self._described(dataset_id)

    async def replay(self, member: JobMember) -> None:
        """Register again what the member's coordinator has lost."""
        for url, job, dataset_id in list(self._registered):
            if (url, job) == (self._channel.url, self.job) == (member.coordinator_url, member.job):
                await self.restore_dataset(dataset_id)

    async def restore_dataset(self, dataset_id: str) -> bool:
        """Register a dataset again if the coordinator lost it; returns whether it is there."""
        description = await self._description(dataset_id)
        return description.found or await self._restore(dataset_id, description.state_id)

    async def _restore(self, dataset_id: str, state_id: str) -> bool:
        """Register a dataset that this state lacks, if it was registered in an earlier one."""
        async with self._restoring:
            before = self._registered.get(self._key(dataset_id))
            if before is None or before.state_id == state_id:
                return before is not None and (await self._description(dataset_id)).found
            log.warning("dataset.told_again", dataset=dataset_id, job=self.job)
            await self._send(await before.request())
            return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close_async()
