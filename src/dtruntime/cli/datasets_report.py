"""What ``strata datasets`` knows, in the shape that ``--json`` prints."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

import msgspec
import numpy as np

from ..client import DatasetRegistry, Observer
from ..client.dataset_registration import DatasetLayout
from ..errors import ConnectionError, ShardError, StrataError
from ..sharding import Membership, SlotTable
from ..sharding.coverage_digest import Counted
from ..types import DatasetSummary, EpochCoverage

SCHEMA = 1
"""Increased when a JSON field changes its meaning or is removed; new fields may appear."""
PATIENCE = 2.0
BATCHES_SHARED = "global"
"""The order in which all ranks share every batch, and shards belong to no rank."""


class ListedDataset(msgspec.Struct, frozen=True):
    """A dataset and the job it belongs to."""

    job: str
    dataset: DatasetSummary


class DatasetList(msgspec.Struct, frozen=True):
    """What ``strata datasets ls --json`` prints."""

    url: str
    datasets: tuple[ListedDataset, ...]
    schema: int = SCHEMA


class FileReport(msgspec.Struct, frozen=True):
    """A file and how many samples it has."""

    path: str
    samples: int


class ShareReport(msgspec.Struct, frozen=True):
    """What the ranks that are present have of a dataset."""

    ranks: int
    least_shards: int
    most_shards: int
    least_samples: int
    most_samples: int


class DatasetReport(msgspec.Struct, frozen=True):
    """What ``strata datasets show --json`` prints."""

    url: str
    job: str
    dataset: DatasetSummary
    files: tuple[FileReport, ...]
    share: ShareReport | None
    """None: the ranks share the batches, and no rank has shards of its own."""
    coverage: tuple[EpochCoverage, ...]
    coverage_unknown: str = ""
    """Why the coverage is unknown."""
    live_workers: int = 0
    """Of the job; 0: nothing is being read."""
    schema: int = SCHEMA


class PlanReport(msgspec.Struct, frozen=True):
    """What ``strata datasets plan --json`` prints."""

    url: str
    job: str
    dataset_id: str
    present_before: int
    present_after: int
    joining: tuple[int, ...]
    leaving: tuple[int, ...]
    shard_count: int
    shards_moved: int
    samples_moved: int | None
    bytes_moved: int | None
    fraction_moved: float
    fewest_shards: int
    gained: dict[int, int]
    lost: dict[int, int]
    least_load: int
    most_load: int
    schema: int = SCHEMA


def read_list(url: str, job: str | None) -> DatasetList:
    """The datasets of one job, or of all."""
    listed = []
    for name in [job] if job else [one.job for one in _summaries(url)]:
        with DatasetRegistry(url, job=name, patience=PATIENCE) as registry:
            listed += [ListedDataset(name, dataset) for dataset in registry.list_datasets()]
    return DatasetList(url, tuple(listed))


def read_dataset(url: str, job: str, dataset_id: str, progress: Counted | None) -> DatasetReport:
    """Everything about one dataset."""
    with DatasetRegistry(url, job=job, patience=PATIENCE) as registry:
        dataset = registry.describe(dataset_id)
        layout = registry.layout(dataset_id)
        coverage, unknown = _coverage(registry, dataset_id, progress)
    files = zip(layout.files, layout.file_samples.tolist(), strict=True)
    return DatasetReport(
        url,
        job,
        dataset,
        tuple(FileReport(path, samples) for path, samples in files),
        None if dataset.order == BATCHES_SHARED else _share(dataset, layout),
        coverage,
        unknown,
        next((one.live_workers for one in _summaries(url) if one.job == job), 0),
    )


def read_plan(
    url: str,
    job: str,
    dataset_id: str,
    join: int,
    leave: Collection[int],
    world_size: int | None,
) -> PlanReport:
    """What would move if workers joined and left."""
    with DatasetRegistry(url, job=job, patience=PATIENCE) as registry:
        plan = registry.plan(dataset_id, join, leave, world_size=world_size)
    before, after = _present(plan.before), _present(plan.after)
    moves = {
        name: getattr(plan, name) for name in PlanReport.__struct_fields__ if hasattr(plan, name)
    }
    return PlanReport(
        url=url,
        job=job,
        present_before=len(before),
        present_after=len(after),
        joining=tuple(sorted(after - before)),
        leaving=tuple(sorted(before - after)),
        **{**moves, "dataset_id": dataset_id},
    )


def find_job(url: str, job: str | None, dataset_id: str) -> str:
    """The dataset's job: the one named, or the only one that has it."""
    job = job or os.environ.get("STRATA_JOB")
    if job:
        return job
    listed = read_list(url, None).datasets
    having = [item.job for item in listed if item.dataset.dataset_id == dataset_id]
    if not having:
        raise ShardError(
            f"dataset {dataset_id!r} is not registered at {url}: 'strata datasets ls' shows those "
            "that are"
        )
    if len(having) > 1:
        live = {job.job for job in _summaries(url) if job.live_workers}
        active = [name for name in having if name in live]
        if len(active) == 1:
            return active[0]
        raise ShardError(
            f"{len(having)} jobs have a dataset {dataset_id!r} ({', '.join(having[:8])}): name one "
            "with --job"
        )
    return having[0]


def _summaries(url: str) -> list[Any]:
    with Observer(url, patience=PATIENCE) as observer:
        return observer.job_summaries()


def _coverage(
    registry: DatasetRegistry, dataset_id: str, progress: Counted | None
) -> tuple[tuple[EpochCoverage, ...], str]:
    try:
        return tuple(registry.coverage(dataset_id, progress=progress)), ""
    except ConnectionError:
        raise
    except StrataError as exc:
        return (), str(exc)


def _share(dataset: DatasetSummary, layout: DatasetLayout) -> ShareReport:
    """How evenly shards and samples are spread."""
    slot_count, dead = dataset.slot_count or 1, dataset.dead_slots
    owners = SlotTable(dataset.shard_count, seed=dataset.seed).owners(slot_count, dead)
    live = np.setdiff1d(np.arange(slot_count), dead)
    shards = np.bincount(owners, minlength=slot_count)[live]
    # Samples are counted in floating point, which is exact up to 2**53.
    samples = np.bincount(owners, layout.shard_samples, minlength=slot_count)[live]
    return ShareReport(
        len(live), int(shards.min()), int(shards.max()), int(samples.min()), int(samples.max())
    )


def _present(membership: Membership) -> set[int]:
    return set(range(membership.slot_count)) - set(membership.dead)
