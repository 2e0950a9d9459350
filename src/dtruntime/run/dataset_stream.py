"""Datasets as the source of a run's batches."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..client import DatasetRegistry, TrainingOrchestrator
from ..config import Config
from ..data import build_index
from ..data.index import DatasetIndex
from ..data.loader import Delivery, Loader
from ..data.loader_state import merge_states
from ..data.mixture import Mixture
from ..data.readers.format_reader import no_column
from ..data.source import FileSource, NumberSource, Source
from ..errors import ShardError
from .crew import Crew
from .streams import DataOptions, Stream, format_of, is_count

_SOURCE_OPTIONS = ("columns", "skip", "cache", "shard_size", "exact")


def dataset_stream(options: DataOptions, worker: TrainingOrchestrator | None) -> Stream:
    """The batches of files, of a number of samples, or of a source that was made before."""
    data = options.data
    if isinstance(data, Source | DatasetIndex | Mixture):
        return _loaded(data, options.loader)
    if worker is not None:
        return _registered(options, worker)
    reading = dict(options.loader)
    return _loaded(_source(data, options.format, reading), reading)


class DatasetStream(Stream):
    """A dataset read by `Loader`."""

    def __init__(
        self, make: Callable[[Crew], Loader], disconnect: Callable[[], None] | None = None
    ) -> None:
        """``disconnect`` closes what ``make`` uses, and can use again."""
        self._make = make
        self._disconnect = disconnect
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
        self._stop_reading()
        self._loader = self._make(crew)

    def batches(self) -> Iterator[tuple[Any, int]]:
        """Batches up to the end of the epoch; all ranks have the same number of them."""
        loader = self.loader
        if not loader.steps_per_epoch:
            raise ShardError(
                "an epoch has no steps: last='drop' leaves out everything, since there are fewer "
                "samples than a batch of all workers takes; use smaller batches, or last='keep'"
            )
        last: Any = None
        for step in loader.deliveries():
            self._given = step
            last = step.batch if step.batch is not None else last
            if step.batch is not None:
                yield step.batch, len(step.numbers)
            else:
                yield loader.without_samples(loader.example() if last is None else last), 0
        loader.end_epoch()

    def steps_in(self, epochs: int, step: int) -> int | None:
        """As many as there will be if the crew stays as it is."""
        loader = self.loader
        return step + len(loader) + (epochs - loader.epoch - 1) * loader.steps_per_epoch

    def used(self) -> None:
        """Take note of the batch's samples."""
        assert self._given is not None
        self.loader.accept(self._given)

    def explain(self, error: BaseException) -> str:
        """Which columns there are, when one was asked for that is not there."""
        batch = None if self._given is None else self._given.batch
        if not isinstance(error, KeyError) or not isinstance(batch, Mapping):
            return ""
        name = error.args[0] if error.args else None
        if not isinstance(name, str) or name in batch:
            return ""
        return f"the batch has {no_column(name, list(batch))}"

    def state(self) -> Any:
        """The loader's state."""
        return json.dumps(self.loader.state_dict())

    def restore(self, states: Sequence[Any], index: int) -> None:
        """Join the states, so that coverage is proved across the interruption."""
        positions = [json.loads(state) for state in states if state is not None]
        complete = len(positions) == positions[0]["world"]
        self.loader.load_state_dict(merge_states(positions) if complete else positions[0])

    def close(self) -> None:
        """Stop reading ahead, and close the connection."""
        try:
            self._stop_reading()
        finally:
            if self._disconnect is not None:
                self._disconnect()

    def _stop_reading(self) -> None:
        if self._loader is not None:
            self._loader.close()


def _registered(options: DataOptions, worker: TrainingOrchestrator) -> Stream:
    """A dataset of the job; every worker registers it, which is the same as one doing so."""
    registry = DatasetRegistry(worker.config.coordinator_url, job=worker.job)
    reading = dict(options.loader)
    try:
        _register(registry, options, reading.pop("shard_size", _shard_size()))
    except BaseException:
        registry.close()
        raise

    def make(crew: Crew) -> Loader:
        return registry.loader(
            options.dataset, **{**reading, "rank": crew.index, "world_size": crew.size}
        )

    return DatasetStream(make, registry.close)


def _register(registry: DatasetRegistry, options: DataOptions, shard_size: int) -> None:
    shuffle, seed = options.loader.get("shuffle", True), options.loader.get("seed", 0)
    if is_count(options.data):
        registry.register_dataset(options.dataset, options.data, shard_size, shuffle)
    else:
        registry.register(
            options.dataset,
            os.fspath(options.data),
            options.format or format_of(options.data),
            shard_size=shard_size,
            shuffle=shuffle,
            seed=seed,
        )


def _loaded(source: Source | DatasetIndex | Mixture, reading: Mapping[str, Any]) -> Stream:
    def make(crew: Crew) -> Loader:
        return Loader(source, **{**reading, "rank": crew.index, "world_size": crew.size})

    return DatasetStream(make)


def _source(data: Any, format: str | None, reading: dict[str, Any]) -> Source:
    chosen = {name: reading.pop(name) for name in _SOURCE_OPTIONS if name in reading}
    chosen.setdefault("shard_size", _shard_size())
    if is_count(data):
        return NumberSource(data, **chosen)
    return FileSource(build_index(os.fspath(data), format or format_of(data)), **chosen)


def _shard_size() -> int:
    return Config.load().dataset.default_shard_size
