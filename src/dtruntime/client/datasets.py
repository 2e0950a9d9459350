"""Datasets of a job, and which of their shards a worker reads."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from types import TracebackType
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
from .dataset_descriptions import (
    DatasetLayout,
    add_layout,
    coverage_of,
    index_in,
    layout_of,
    move_plan,
)
from .dataset_registration import (
    DatasetSpec,
    Progress,
    RegisteredDataset,
    changed_files,
    index_files,
    index_registered_files,
)
from .worker_config import OUTAGE_SECONDS, WorkerConfig

if TYPE_CHECKING:
    from ..data.index import DatasetIndex
    from ..data.live_loader import LiveLoader
    from ..data.loader import Loader
    from ..data.readers import Options
    from ..data.source import Source
    from .orchestrator import TrainingOrchestrator

log = EventLog("datasets")

R = TypeVar("R", bound=Message)


class DatasetRegistry:
    """Registers datasets and tells which shards belong to whom.

    ``DatasetRegistry()`` talks to the coordinator that this process is registered with, else
    to the one the environment names. That is looked up at each use, so a registry may be made
    before the process registers. Constructing touches no network.
    """

    def __init__(
        self,
        coordinator_url: str | None = None,
        *,
        job: str | None = None,
        patience: float | None = None,
    ) -> None:
        """``job`` defaults to the registered worker's job, else ``STRATA_JOB``.

        ``patience`` is how long a coordinator that is away is waited for, in seconds: by default
        five minutes, and 10 s (``STRATA_CONNECT_TIMEOUT_MS``) if it has never answered.
        """
        self._given = WorkerConfig(coordinator_url=coordinator_url, job=job)
        self._channels: dict[str, Channel] = {}
        self._hasty = patience is None
        """Whether a coordinator that has never answered is given up early."""
        self._patience = OUTAGE_SECONDS if patience is None else patience
        self._warned: set[tuple[str, int]] = set()
        self._told: dict[tuple[str, str, str], RegisteredDataset] = {}
        """What is known of datasets, by coordinator, job and id."""
        self._telling = asyncio.Lock()

    @property
    def _config(self) -> WorkerConfig:
        """What was given, completed by the process's orchestrator, else by the environment."""
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
        """The line to the coordinator that is the right one at the moment."""
        config = self._config
        url = config.coordinator_url or ""
        if url not in self._channels:
            # One that this process is registered with has answered before.
            new = self._hasty and current_orchestrator.current() is None
            self._channels[url] = Channel(
                url, connect_timeout=config.connect_seconds if new else None
            )
        return self._channels[url]

    @property
    def job(self) -> str:
        """The job whose datasets these are."""
        return self._config.job or ""

    @property
    def worker(self) -> TrainingOrchestrator | None:
        """This process's orchestrator, if it is a member of the same job at the same coordinator.

        Its rank means nothing in a job of that name elsewhere. One host has many names: a
        coordinator counts as another one if its port is.
        """
        worker = current_orchestrator.current()
        if worker is None or worker.job != self.job:
            return None
        urls = (worker.coordinator_url, self._channel.url)
        return worker if len({split_address(url)[1] for url in urls}) == 1 else None

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

        They are indexed here: ``progress`` is told how far that is, from another thread. Shards
        have about ``shard_size`` samples and end where row groups do; with ``exact``, precisely
        so many. ``options`` say how CSV or TFRecord files are to be read.

        Registering the same thing again does nothing; another thing under the same id, or files
        that have changed since, is a `ShardError` that shows the difference. Files that cannot
        be seen here are accepted when ``total_samples`` is given: without anybody who can see
        them, they are taken to be ``path/shard_{i}.{format}``.
        """
        if format not in FORMATS:
            raise ShardValueError(
                f"dataset {dataset_id!r}: format {format!r} is unknown; use {', '.join(FORMATS)}"
            )
        wanted = DatasetSpec.checked(
            dataset_id,
            total_samples,
            shard_size,
            path=path,
            format=format,
            shuffle=shuffle,
            seed=seed,
            exact=exact,
            options=options,
            metadata=metadata,
        )
        if not wanted.path:
            raise ShardValueError(f"dataset {dataset_id!r}: the path is empty")
        await self._register(wanted, progress)

    register = blocking(register_async, brief=True)

    @awaitable
    async def register_dataset_async(
        self, dataset_id: str, total_samples: int, shard_size: int, shuffle: bool = True
    ) -> None:
        """Register a dataset that is known by its sample numbers alone, without files."""
        wanted = DatasetSpec.checked(dataset_id, total_samples, shard_size, shuffle=shuffle)
        await self._register(wanted, None)

    register_dataset = blocking(register_dataset_async, brief=True)

    @awaitable
    async def get_shard_async(self, dataset_id: str, worker_rank: int, epoch: int) -> list[str]:
        """The files that a rank reads whole, in the order of the epoch.

        Over all ranks every file comes exactly once, with about as many rows for each rank. With
        fewer files than ranks some have none, which is logged as a warning: `loader` and
        `get_shards` divide by rows instead. Where nobody has seen the files, these are the names
        of the rank's shards.
        """
        request = pb.FileListRequest(
            dataset_id=check_id("dataset", dataset_id),
            rank=check_whole("worker_rank", worker_rank, most=2**32 - 1),
            epoch=check_whole("epoch", epoch),
            job=self.job,
            world_size=self._config.world_size or 0,
        )
        self._listen_for_others()
        reply = await self._ask("ListFiles", request, pb.FileList)
        if not reply.file_paths:
            self._warn_without_files(request, reply)
        return list(reply.file_paths)

    get_shard = blocking(get_shard_async, brief=True)

    @awaitable
    async def get_shards_async(self, dataset_id: str, epoch: int) -> list[ShardInfo]:
        """The shards of this worker, in the order of the epoch.

        A shard is a range of rows: of each of its ``file_paths`` read the rows that ``row_ranges``
        names, not the whole file, which may hold rows of other shards too.
        """
        self._listen_for_others()
        return await self._shards(dataset_id, self._rank() or 0, epoch)

    get_shards = blocking(get_shards_async, brief=True)

    @awaitable
    async def list_datasets_async(self) -> list[DatasetSummary]:
        """All datasets of the job by id; who shares them is told by `describe`."""
        reply = await self._channel.call(
            "ListDatasets", pb.JobRequest(job=self.job), pb.DatasetList, patience=self._patience
        )
        return [messages.dataset(info) for info in reply.datasets]

    list_datasets = blocking(list_datasets_async, brief=True)

    @awaitable
    async def describe_async(self, dataset_id: str, *, order: str = "") -> DatasetSummary:
        """A dataset and who shares it; `ShardNotFoundError` when it is not registered.

        ``order`` tells the coordinator in which order this worker is about to read it.
        """
        description = await self._found(dataset_id, order=order)
        return messages.dataset(description.dataset, description)

    describe = blocking(describe_async, brief=True)

    @awaitable
    async def layout_async(self, dataset_id: str) -> DatasetLayout:
        """The sizes of a dataset's shards, and its files."""
        description = await self._found(dataset_id, full=True)
        return layout_of(description.dataset)

    layout = blocking(layout_async, brief=True)

    @awaitable
    async def index_of_async(self, dataset_id: str) -> DatasetIndex:
        """The index of a dataset's files, for reading them.

        It is the one that was registered. Where that was too large to be kept, the files are
        indexed here; `ShardError` when they are not the registered ones.
        """
        info = (await self._found(dataset_id, full=True)).dataset
        return await asyncio.to_thread(index_in, info) or await index_registered_files(info)

    index_of = blocking(index_of_async, brief=True)

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

        ``join`` is how many newcomers there are, who take the lowest free ranks, or the ranks
        they take. ``leave`` are ranks. While the job has no members, a world of ``world_size``
        is assumed (by default ``WORLD_SIZE``, else 1).
        """
        description = await self._found(dataset_id, full=True)
        size = self._config.world_size if world_size is None else world_size
        return await asyncio.to_thread(move_plan, description, join, leave, size)

    plan = blocking(plan_async, brief=True)

    @awaitable
    async def coverage_async(
        self,
        dataset_id: str,
        epoch: int | None = None,
        *,
        progress: Counted | None = None,
    ) -> list[EpochCoverage]:
        """What was consumed in an epoch, or in all that are known.

        Takes about a second for a hundred million samples; ``progress`` is told how many of how
        many have been counted, from another thread.
        """
        total = (await self._found(dataset_id)).dataset.total_samples
        epochs = await self._consumption(dataset_id, epoch)
        return await asyncio.to_thread(coverage_of, total, epochs, progress)

    coverage = blocking(coverage_async)

    @awaitable
    async def loader_async(
        self, /, dataset_id: str, batch_size: int | None = None, **options: Any
    ) -> Loader:
        """A loader of this worker's part of a dataset.

        ``options`` are those of `dtruntime.data.Loader`, and of the samples it reads: ``columns``,
        ``skip`` and ``cache`` as for `dtruntime.data.FileSource`. Rank and world size are by
        default the registered worker's place among the present members, order and seed those of
        the registration. What it consumed is reported at the end of each epoch and with each
        `commit`, so that ``strata datasets show`` can prove that every sample was read once.
        """
        from .loaders import GLOBAL, described_for, open_loader

        summary = await described_for(self, dataset_id, options.get("order", GLOBAL))
        return await open_loader(self, summary, {"batch_size": batch_size, **options})

    loader = blocking(loader_async, brief=True)

    @awaitable
    async def live_loader_async(
        self, /, dataset_id: str, batch_size: int, **options: Any
    ) -> LiveLoader:
        """A loader whose share follows the membership while it reads.

        Begins with the first epoch that is not complete; ``options`` are those of
        `dtruntime.data.LiveLoader`, and ``columns``, ``skip`` and ``cache`` as for `loader`.
        """
        from .loaders import AFFINITY, described_for, open_live_loader

        summary = await described_for(self, dataset_id, AFFINITY)
        complete = {item.epoch for item in await self._consumption(dataset_id) if item.complete}
        options = {"batch_size": batch_size, **options}
        return await open_live_loader(self, summary, complete, options)

    live_loader = blocking(live_loader_async, brief=True)

    @awaitable
    async def source_async(self, /, dataset_id: str, **options: Any) -> Source:
        """The samples of a dataset, to be mixed with others in a `dtruntime.data.Mixture`.

        ``options`` are ``columns``, ``skip`` and ``cache``, as for `dtruntime.data.FileSource`.
        """
        from .loaders import GLOBAL, described_for, open_source

        # What is mixed is read in global order only.
        source = await open_source(self, await described_for(self, dataset_id, GLOBAL), options)
        if options:
            raise TypeError(f"a source has no option {next(iter(options))!r}")
        return source

    source = blocking(source_async, brief=True)

    @awaitable
    async def rebalance_async(
        self, dataset_id: str, epoch: int, shares: Mapping[int, int] | None = None
    ) -> dict[int, int]:
        """Deal anew what no live loader has begun to read in an epoch; returns the shares.

        ``shares`` are percentages of a full share by rank, 100 for ranks not named; without
        them each rank gets as much as it has been fast. Nobody waits: workers go on with what
        they have begun.
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

    @awaitable
    async def close_async(self) -> None:
        """Close the connection."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    close = blocking(close_async, brief=True)

    async def _register(self, wanted: DatasetSpec, progress: Progress | None) -> None:
        if wanted.path:
            await self._register_files(wanted, progress)
        else:
            await self._send(wanted.message(self.job, wanted.total_samples or 0))
        if self._key(wanted.dataset_id) not in self._told:
            await self._found(wanted.dataset_id)

    async def _register_files(self, wanted: DatasetSpec, progress: Progress | None) -> None:
        description = await self._description(wanted.dataset_id)
        known = description.dataset if description.found else None
        if known is not None:
            if not wanted.agrees_with(known):
                # The coordinator refuses, and shows each difference.
                total = wanted.total_samples or known.total_samples
                await self._send(wanted.message(self.job, total))
            wanted.check_options(known)
            if is_remote(wanted.path) and self._rank():
                return
        index = await index_files(wanted, progress)
        if index is None:
            await self._send(wanted.message(self.job, wanted.total_samples or 0))
            return
        if known is not None and known.layout.fingerprint == index.fingerprint:
            return
        request = wanted.message(self.job, index.total_samples)
        await asyncio.to_thread(add_layout, request, index)
        try:
            await self._send(request)
        except ShardError:
            await self._check_files(wanted, index)
            raise

    async def _check_files(self, wanted: DatasetSpec, index: DatasetIndex) -> None:
        """Raise when only the files differ from those registered, naming them."""
        description = await self._description(wanted.dataset_id, full=True)
        known = description.dataset
        if not (known.HasField("layout") and wanted.agrees_with(known)):
            return
        if known.layout.fingerprint != index.fingerprint:
            raise await asyncio.to_thread(changed_files, wanted, known, index)

    async def _ask(self, method: str, request: Any, reply: type[R]) -> R:
        """Ask something about a dataset, which is registered again if it was lost."""
        try:
            return await self._channel.call(method, request, reply, patience=self._patience)
        except (ConnectionError, SyncError):
            raise
        except StrataError:
            if not await self.restore_dataset(request.dataset_id):
                raise
        return await self._channel.call(method, request, reply, patience=self._patience)

    async def _consumption(self, dataset_id: str, epoch: int | None = None) -> list[pb.Coverage]:
        request = pb.CoverageRequest(job=self.job, dataset_id=dataset_id)
        if epoch is not None:
            request.epoch = check_whole("epoch", epoch)
        reply = await self._ask("GetCoverage", request, pb.CoverageList)
        return list(reply.epochs)

    async def _send(self, request: pb.DatasetInfo) -> None:
        try:
            reply = await self._channel.call(
                "RegisterDataset", request, pb.DatasetRegistration, patience=self._patience
            )
        except ValueError as exc:
            raise ShardError(str(exc)) from exc
        self._remember(request, reply.state_id)

    async def _description(
        self, dataset_id: str, *, full: bool = False, order: str = ""
    ) -> pb.DatasetDescription:
        request = pb.DatasetRequest(
            dataset_id=check_id("dataset", dataset_id), job=self.job, full=full, order=order
        )
        return await self._channel.call(
            "GetDataset", request, pb.DatasetDescription, patience=self._patience
        )

    async def _found(
        self, dataset_id: str, *, full: bool = False, order: str = ""
    ) -> pb.DatasetDescription:
        description = await self._description(dataset_id, full=full, order=order)
        if not description.found and await self._told_again(dataset_id, description.state_id):
            description = await self._description(dataset_id, full=full, order=order)
        if description.found:
            self._remember(description.dataset, description.state_id)
        else:
            raise ShardNotFoundError(
                f"dataset {dataset_id!r} is not registered in job {self.job!r}: see "
                "'strata datasets ls', or call DatasetRegistry.register() first"
            )
        return description

    # A coordinator that has lost its state

    def _key(self, dataset_id: str) -> tuple[str, str, str]:
        return self._channel.url, self.job, dataset_id

    def _remember(self, info: pb.DatasetInfo, state_id: str) -> None:
        """Note what a dataset is, to tell a coordinator that will have lost it."""
        key = self._key(info.dataset_id)
        known = self._told.get(key)
        if known is None or known.state_id != state_id:
            self._told[key] = RegisteredDataset.of(info, state_id)
            current_orchestrator.tells(self)

    async def tell_again(self, worker: TrainingOrchestrator) -> None:
        """Register again what a coordinator has lost that ``worker`` is registered with."""
        for url, job, dataset_id in list(self._told):
            if (url, job) == (self._channel.url, self.job) == (worker.coordinator_url, worker.job):
                await self.restore_dataset(dataset_id)

    async def restore_dataset(self, dataset_id: str) -> bool:
        """Register a dataset again if the coordinator has lost it; returns whether it is there."""
        description = await self._description(dataset_id)
        return description.found or await self._told_again(dataset_id, description.state_id)

    async def _told_again(self, dataset_id: str, state_id: str) -> bool:
        """Register a dataset again that is not in this state, but was in another one."""
        async with self._telling:
            told = self._told.get(self._key(dataset_id))
            if told is None or told.state_id == state_id:
                return told is not None and (await self._description(dataset_id)).found
            log.warning("dataset.told_again", dataset=dataset_id, job=self.job)
            await self._send(await told.request(self.job))
            return True

    def _listen_for_others(self) -> None:
        worker = self.worker
        if worker is not None:
            worker.listen_for_others()

    def _rank(self) -> int | None:
        """This worker's rank; none for a process that is no worker."""
        worker = self.worker
        return self._config.rank if worker is None else worker.rank

    def _warn_without_files(self, request: pb.FileListRequest, reply: pb.FileList) -> None:
        """Say that a rank has nothing to read; once, not in every epoch."""
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

    async def _shards(self, dataset_id: str, rank: int, epoch: int) -> list[ShardInfo]:
        request = pb.ShardListRequest(
            dataset_id=check_id("dataset", dataset_id),
            rank=check_whole("worker_rank", rank, most=2**32 - 1),
            epoch=check_whole("epoch", epoch),
            job=self.job,
            world_size=self._config.world_size or 0,
        )
        reply = await self._ask("ListShards", request, pb.ShardList)
        return [messages.shard(shard) for shard in reply.shards]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close_async()
