"""Loaders for registered datasets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..config import Config
from ..data.loading.live import LiveLoader
from ..data.loading.loader import Loader
from ..data.loading.source import FileSource, NumberSource, Ranges, Source
from ..errors import ShardError, StrataError
from ..storage import DiskCache
from ..types import DatasetSummary
from . import current
from .consumption import CoverageReports, EpochLedger

if TYPE_CHECKING:
    from ..rpc.channel import Channel
    from .datasets import DatasetRegistry


async def open_loader(
    registry: DatasetRegistry,
    channel: Channel,
    dataset_id: str,
    place: tuple[int, int],
    source: dict[str, Any],
    options: dict[str, Any],
) -> Loader:
    """A loader for the rank and world size in ``place``."""
    summary = await registry.describe_async(dataset_id)
    worker = current.current()
    reports = None
    if worker is not None and worker.job == registry.job:
        reports = CoverageReports(worker, channel, dataset_id)
    opened = await open_source(registry, summary, **source)
    defaults = {"shuffle": summary.shuffle, "seed": summary.seed, "progress": reports}
    rank, world = place
    return Loader(opened, rank=rank, world_size=world, **{**defaults, **options})


async def open_live_loader(
    registry: DatasetRegistry,
    channel: Channel,
    dataset_id: str,
    source: dict[str, Any],
    options: dict[str, Any],
) -> LiveLoader:
    """A loader whose share the coordinator decides."""
    worker = current.current()
    if worker is None or worker.job != registry.job:
        raise StrataError(
            f"a live loader needs a registered worker of job {registry.job!r}: call "
            "TrainingOrchestrator().register() first"
        )
    summary = await registry.describe_async(dataset_id)
    if "epoch" not in options:
        known = await registry.coverage_async(dataset_id)
        done = {coverage.epoch for coverage in known if coverage.complete}
        options = {**options, "epoch": next(e for e in range(len(done) + 1) if e not in done)}
    opened = await open_source(registry, summary, **source)
    defaults = {"shuffle": summary.shuffle, "seed": summary.seed}
    ledger = EpochLedger(worker, channel, dataset_id)
    return LiveLoader(opened, ledger=ledger, **{**defaults, **options})


async def open_source(
    registry: DatasetRegistry,
    summary: DatasetSummary,
    columns: Sequence[str] | None = None,
    skip: Ranges = (),
    cache: DiskCache | None = None,
) -> Source:
    """The samples of a registered dataset."""
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
