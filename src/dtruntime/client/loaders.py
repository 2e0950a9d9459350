"""Loaders for registered datasets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..config import Config
from ..data.loading import FileSource, LiveLoader, Loader, NumberSource, Source
from ..data.loading.loader import Delivery
from ..data.loading.source import Ranges
from ..errors import ShardError, StrataError
from ..storage import DiskCache
from ..types import DatasetSummary
from .consumption import CoverageReports, EpochLedger

if TYPE_CHECKING:
    from .datasets import DatasetRegistry
    from .orchestrator import TrainingOrchestrator


GLOBAL, AFFINITY = "global", "affinity"


async def described_for(
    registry: DatasetRegistry, dataset_id: str, order: object
) -> DatasetSummary:
    """A dataset that is about to be read; a worker tells in which order."""
    told = "" if registry.worker is None else str(order)
    return await registry.describe_async(dataset_id, order=told)


async def open_loader(
    registry: DatasetRegistry, summary: DatasetSummary, options: dict[str, Any]
) -> Loader:
    """A loader for this worker's rank, that reports what it consumed."""
    worker = registry.worker
    defaults: dict[str, Any] = {"shuffle": summary.shuffle, "seed": summary.seed}
    if worker is not None:
        order = str(options.get("order", GLOBAL))
        defaults["progress"] = CoverageReports(worker, registry, summary.dataset_id, order)
        defaults["rank"], defaults["world_size"] = _place(worker, summary)
        worker.listen_for_others()
    source = await open_source(registry, summary, options)
    if worker is None and not {"rank", "world_size"} & options.keys():
        return LoaderOfNoWorker(registry, source, **{**defaults, **options})
    loader = Loader(source, **{**defaults, **options})
    return loader if worker is None else loader.watched_by(worker.activity)


class LoaderOfNoWorker(Loader):
    """A loader of a process that is no worker, and so of all samples.

    Refuses to go on when the process has become a worker since: its part is smaller.
    """

    def __init__(self, registry: DatasetRegistry, source: Source, **options: Any) -> None:
        super().__init__(source, **options)
        self._registry: DatasetRegistry | None = registry

    def accept(self, step: Delivery) -> None:
        """Take note that a step was handed out; raises in a process that is a worker."""
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
    """A loader whose share the coordinator decides, from the first epoch not in ``complete``."""
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
    """The samples of a registered dataset; takes what concerns them out of the ``options``."""
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
    """This worker's place among the ranks that read, and how many those are."""
    gone = set(summary.dead_slots)
    present = [rank for rank in range(summary.slot_count) if rank not in gone]
    if worker.rank not in present:
        raise ShardError(
            f"rank {worker.rank} is not among the {len(present)} present ranks of job "
            f"{worker.job!r}: the membership has just changed; make the loader again"
        )
    return present.index(worker.rank), len(present)
