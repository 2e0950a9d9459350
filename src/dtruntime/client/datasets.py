"""Datasets of a job, and which of their shards a worker reads."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any, Self

from .._loop import awaitable, blocking
from ..config import Config
from ..errors import ShardError
from ..rpc.channel import Channel
from ..rpc.gen import coordinator_pb2 as pb
from ..types import ShardInfo, check_id, check_whole
from . import current, wire
from .settings import WorkerConfig

FORMATS = ("parquet", "csv", "tfrecord")
OUTAGE_SECONDS = 300.0


class DatasetRegistry:
    """Registers datasets and tells which shards belong to whom.

    ``DatasetRegistry()`` talks to the coordinator that this process is registered with, else
    to the one the environment names. Constructing touches no network.
    """

    def __init__(self, coordinator_url: str | None = None, *, job: str | None = None) -> None:
        """``job`` defaults to the registered worker's job, else ``STRATA_JOB``."""
        worker = current.current()
        if worker is not None:
            coordinator_url = coordinator_url or worker.config.coordinator_url
            job = job or worker.job
        self._config = WorkerConfig(coordinator_url=coordinator_url, job=job).resolved()
        self._channel = Channel(self._config.coordinator_url or "")

    @property
    def job(self) -> str:
        """The job whose datasets these are."""
        return self._config.job or ""

    @awaitable
    async def register_async(
        self,
        /,
        dataset_id: str,
        path: str | os.PathLike[str],
        format: str,
        total_samples: int | None = None,
        shard_size: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        **metadata: object,
    ) -> None:
        """Register a dataset of files.

        Registering the same thing again does nothing; another thing under the same id is a
        `ShardError` that shows the difference. The files of a dataset that is described by
        its sample count are ``path/shard_{i}.{format}``.
        """
        if format not in FORMATS:
            raise ShardError(
                f"dataset {dataset_id!r}: format {format!r} is unknown; use {', '.join(FORMATS)}"
            )
        if total_samples is None:
            raise ShardError(
                f"dataset {dataset_id!r}: total_samples is needed, since the files are not indexed"
            )
        await self._register(
            dataset_id,
            _count("total_samples", dataset_id, total_samples),
            shard_size,
            path=os.fspath(path),
            format=format,
            shuffle=shuffle,
            seed=seed,
            metadata={key: str(value) for key, value in metadata.items()},
        )

    register = blocking(register_async, brief=True)

    @awaitable
    async def register_dataset_async(
        self, dataset_id: str, total_samples: int, shard_size: int, shuffle: bool = True
    ) -> None:
        """Register a dataset that is known by its sample numbers alone, without files."""
        await self._register(
            dataset_id,
            _count("total_samples", dataset_id, total_samples),
            shard_size,
            shuffle=shuffle,
        )

    register_dataset = blocking(register_dataset_async, brief=True)

    @awaitable
    async def get_shard_async(self, dataset_id: str, worker_rank: int, epoch: int) -> list[str]:
        """The files of a rank's shards, in the order of the epoch."""
        shards = await self._shards(dataset_id, worker_rank, epoch)
        return [path for shard in shards for path in shard.file_paths]

    get_shard = blocking(get_shard_async, brief=True)

    @awaitable
    async def get_shards_async(self, dataset_id: str, epoch: int) -> list[ShardInfo]:
        """The shards of this worker, in the order of the epoch."""
        worker = current.current()
        if worker is not None and worker.job == self.job:
            return await self._shards(dataset_id, worker.rank, epoch)
        return await self._shards(dataset_id, self._config.rank or 0, epoch)

    get_shards = blocking(get_shards_async, brief=True)

    @awaitable
    async def close_async(self) -> None:
        """Close the connection."""
        await self._channel.close()

    close = blocking(close_async, brief=True)

    async def _register(
        self,
        dataset_id: str,
        total_samples: int,
        shard_size: int | None,
        *,
        path: str = "",
        format: str = "",
        shuffle: bool,
        seed: int = 0,
        metadata: dict[str, str] | None = None,
    ) -> None:
        size = Config.load().dataset.default_shard_size if shard_size is None else shard_size
        request = pb.DatasetInfo(
            dataset_id=check_id("dataset", dataset_id),
            path=path,
            format=format,
            total_samples=total_samples,
            shard_size=_count("shard_size", dataset_id, size, 2**32 - 1),
            shuffle=bool(shuffle),
            seed=check_whole("seed", seed, most=2**64 - 1),
            metadata=metadata or {},
            job=self.job,
        )
        await self._channel.call(
            "RegisterDataset", request, pb.DatasetRegistration, patience=OUTAGE_SECONDS
        )

    async def _shards(self, dataset_id: str, rank: int, epoch: int) -> list[ShardInfo]:
        request = pb.ShardListRequest(
            dataset_id=check_id("dataset", dataset_id),
            rank=check_whole("worker_rank", rank, most=2**32 - 1),
            epoch=check_whole("epoch", epoch),
            job=self.job,
            world_size=self._config.world_size or 0,
        )
        reply = await self._channel.call(
            "ListShards", request, pb.ShardList, patience=OUTAGE_SECONDS
        )
        return [wire.shard(shard) for shard in reply.shards]

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


def _count(name: str, dataset_id: str, value: Any, most: int = 2**63 - 1) -> int:
    try:
        return check_whole(name, value, 1, most)
    except ValueError as exc:
        raise ShardError(f"dataset {dataset_id!r}: {exc}") from None
