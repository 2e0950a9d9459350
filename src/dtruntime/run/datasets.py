"""Datasets as the source of a run's batches."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..client import DatasetRegistry, TrainingOrchestrator
from ..data import build_index
from ..data.index import DatasetIndex
from ..data.loading import FileSource, Loader, NumberSource, Source
from ..data.loading.loader import Delivery
from ..data.loading.mixture import Mixture
from ..data.loading.state import merge_states
from ..errors import ConfigError
from .batches import DataOptions, OwnStream, Stream
from .crew import Crew

_SUFFIXES = {".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".tsv": "csv"}
_SOURCE_OPTIONS = ("columns", "skip", "cache", "shard_size", "exact")


def dataset_stream(options: DataOptions, worker: TrainingOrchestrator | None) -> Stream:
    """The batches of files, of a number of samples, or of a source that was made before."""
    data = options.data
    if isinstance(data, Source | DatasetIndex | Mixture):
        return _loaded(data, options.loader)
    if not (isinstance(data, str | os.PathLike) or _is_count(data)):
        return OwnStream(data)
    if worker is not None:
        return _registered(options, worker)
    reading = dict(options.loader)
    return _loaded(_source(data, options.format, reading), reading)


class DatasetStream(Stream):
    """A dataset read by `Loader`."""

    def __init__(self, make: Callable[[Crew], Loader]) -> None:
        self._make = make
        self._loader: Loader | None = None
        self._given: Delivery | None = None

    @property
    def loader(self) -> Loader:
        """The loader of the present crew."""
        assert self._loader is not None, "the stream is not open"
        return self._loader

    @property
    def epoch(self) -> int:  # type: ignore[override]
        """The epoch that is read."""
        return self.loader.epoch

    def open(self, crew: Crew) -> None:
        """Make a loader for the crew."""
        self.close()
        self._loader = self._make(crew)

    def batches(self) -> Iterator[tuple[Any, int]]:
        """Batches up to the end of the epoch; all ranks have the same number of them."""
        loader = self.loader
        last: Any = None
        for step in loader.deliveries():
            self._given = step
            last = step.batch if step.batch is not None else last
            if step.batch is not None:
                yield step.batch, len(step.numbers)
            else:
                yield _none_of(loader.example() if last is None else last), 0
        loader.end_epoch()

    def steps_in(self, epochs: int, step: int) -> int | None:
        """As many as there will be if the crew stays as it is."""
        loader = self.loader
        return step + len(loader) + (epochs - loader.epoch - 1) * loader.steps_per_epoch

    def used(self) -> None:
        """Take note of the batch's samples."""
        assert self._given is not None
        self.loader.accept(self._given)

    def state(self) -> Any:
        """The loader's state."""
        return json.dumps(self.loader.state_dict())

    def restore(self, states: Sequence[Any], index: int) -> None:
        """Join the states, so that coverage is proved across the interruption."""
        positions = [json.loads(state) for state in states if state is not None]
        complete = len(positions) == positions[0]["world"]
        self.loader.load_state_dict(merge_states(positions) if complete else positions[0])

    def close(self) -> None:
        """Stop reading ahead."""
        if self._loader is not None:
            self._loader.close()


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


def _none_of(batch: Any) -> Any:
    """A batch of the same form without samples."""
    if isinstance(batch, Mapping):
        return {name: _none_of(column) for name, column in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)(_none_of(part) for part in batch)
    return batch[:0]
