"""What a run's arguments mean: its worker, its checkpoints, and where its batches come from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint import CheckpointManager
from ..client import DatasetRegistry, TrainingOrchestrator, WorkerConfig
from ..data import build_index
from ..data.index import DatasetIndex
from ..data.loading import FileSource, Loader, NumberSource, Source
from ..data.loading.mixture import Mixture
from ..errors import ConfigError
from .actions import Agreements, Watch
from .batches import DatasetStream, Numbers, OwnStream, Stream
from .crew import Alone, Crew, Membership, Together
from .formation import Formation
from .gate import Gate
from .notices import Notices
from .recovery import Recovery
from .saves import CrewCommits, Saves
from .tracking import Tracked

_SUFFIXES = {".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".tsv": "csv"}
_SOURCE_OPTIONS = ("columns", "skip", "cache", "shard_size", "exact")


@dataclass(frozen=True, slots=True)
class DataOptions:
    """What to read, and how."""

    data: Any
    format: str | None
    dataset: str
    loader: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Opened:
    """The parts of a run that is open."""

    manager: CheckpointManager
    stream: Stream
    saves: Saves
    formation: Formation
    agreements: Agreements | None
    watch: Watch | None

    def close(self, *, give_up: bool) -> None:
        """Close everything; with ``give_up``, do not wait for what needs other workers."""
        if self.watch is not None:
            self.watch.close()
        if self.agreements is not None:
            self.agreements.end()
        if give_up:
            self.formation.break_up()
        else:
            self.formation.disband()
        self.manager.close()


def worker_of(
    url: str | None, job: str | None, rank: int | None, world_size: int | None
) -> TrainingOrchestrator | None:
    """The worker that takes part in a job, or ``None`` for a run of one process."""
    if url is None and not os.environ.get("COORDINATOR_URL"):
        config = WorkerConfig(rank=rank, world_size=world_size).resolved()
        if (config.world_size or 1) > 1:
            raise ConfigError(
                f"this is one of {config.world_size} workers, and workers find each other through "
                "a coordinator: start one (strata coordinator) and set COORDINATOR_URL or "
                "coordinator_url="
            )
        return None
    return TrainingOrchestrator(coordinator_url=url, job=job, rank=rank, world_size=world_size)


def open_run(
    checkpoints: str | os.PathLike[str],
    checkpoint_options: Mapping[str, Any],
    data: DataOptions,
    tracked: Tracked,
    seed: int,
    *,
    worker: TrainingOrchestrator | None,
    recovery: Recovery,
    group: tuple[str | None, float],
    gate: Gate,
    notices: Notices,
) -> Opened:
    """Register with the coordinator, and open checkpoints and data."""
    if group[0] is not None and tracked.is_sharded:
        raise ConfigError(
            "a sharded model is tied to the process group that it was sharded in, and cannot go on "
            "in another: leave out process_group=, make the group with torch.distributed."
            "init_process_group(), and let a launcher restart all workers together (torchrun)"
        )
    membership: Membership = Alone()
    agreements = watch = None
    if worker is not None:
        worker.register()
        membership = Together(worker, recovery)
        agreements = Agreements(worker, gate)
        watch = Watch(worker, lambda: notices.reason if notices.look() else "")
    commits = None if worker is None else CrewCommits(worker)
    manager = CheckpointManager(
        checkpoints, orchestrator=commits, sharded=commits is not None, **checkpoint_options
    )
    stream = open_stream(data, worker)
    saves = Saves(manager, commits, tracked, stream, seed)
    formation = Formation(membership, worker, stream, saves, _group(group, worker))
    return Opened(manager, stream, saves, formation, agreements, watch)


def _group(options: tuple[str | None, float], worker: TrainingOrchestrator | None) -> Any:
    backend, seconds = options
    if backend is None:
        return None
    from .process_group import ProcessGroup

    host = "127.0.0.1" if worker is None else worker.coordinator_host
    return ProcessGroup(backend, seconds, host)


def open_stream(options: DataOptions, worker: TrainingOrchestrator | None) -> Stream:
    """Where batches come from."""
    data = options.data
    if data is None:
        return Numbers()
    if isinstance(data, str | os.PathLike) or _is_count(data):
        if worker is not None:
            return _registered(options, worker)
        reading = dict(options.loader)
        return _loaded(_source(data, options.format, reading), reading)
    if isinstance(data, Source | DatasetIndex | Mixture):
        return _loaded(data, options.loader)
    return OwnStream(data)


def _registered(options: DataOptions, worker: TrainingOrchestrator) -> Stream:
    """A dataset of the job; every worker registers it, which is the same as one doing so."""
    registry = DatasetRegistry(worker.config.coordinator_url, job=worker.job)
    reading = dict(options.loader)
    size = reading.pop("shard_size", 10_000)
    shuffle, seed = reading.get("shuffle", True), reading.get("seed", 0)
    if _is_count(options.data):
        registry.register_dataset(options.dataset, options.data, size, shuffle)
    else:
        registry.register(
            options.dataset,
            os.fspath(options.data),
            options.format or _format_of(options.data),
            shard_size=size,
            shuffle=shuffle,
            seed=seed,
        )

    def make(crew: Crew) -> Loader:
        return registry.loader(
            options.dataset, **{**reading, "rank": crew.index, "world_size": crew.size}
        )

    return DatasetStream(make)


def _loaded(source: Source | DatasetIndex | Mixture, reading: Mapping[str, Any]) -> Stream:
    def make(crew: Crew) -> Loader:
        return Loader(source, **{**reading, "rank": crew.index, "world_size": crew.size})

    return DatasetStream(make)


def _source(data: Any, format: str | None, reading: dict[str, Any]) -> Source:
    chosen = {name: reading.pop(name) for name in _SOURCE_OPTIONS if name in reading}
    if _is_count(data):
        return NumberSource(data, **chosen)
    return FileSource(build_index(os.fspath(data), format or _format_of(data)), **chosen)


def _is_count(data: Any) -> bool:
    return isinstance(data, int) and not isinstance(data, bool)


def _format_of(data: str | os.PathLike[str]) -> str:
    """The format that the name tells, or else that of the files in the folder."""
    path = Path(os.fspath(data))
    names = [path.name]
    if path.is_dir():
        names = sorted(entry.name for entry in path.iterdir())
    for name in names:
        for suffix in Path(name).suffixes:
            if suffix in _SUFFIXES:
                return _SUFFIXES[suffix]
        if "tfrecord" in name:
            return "tfrecord"
    raise ConfigError(
        f"the format of {os.fspath(data)} is not clear from its name: give format='parquet', "
        "'csv' or 'tfrecord'"
    )
