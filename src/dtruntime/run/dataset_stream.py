"""The stream of a dataset: files, a number of samples, or a source for `Loader`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
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
    """Open a stream; with a worker, files and numbers become a registered dataset of its job."""
    source, loader = options.data, dict(options.loader)
    if not isinstance(source, Source | DatasetIndex | Mixture):
        if worker is not None:
            return _registered(options, worker)
        source = _source(source, options.format, loader)
    return DatasetStream(partial(Loader, source, **loader))


class DatasetStream(Stream):
    """A dataset read by `Loader`."""

    def __init__(
        self, make: Callable[..., Loader], disconnect: Callable[[], None] | None = None
    ) -> None:
        """``make`` takes a rank and a world size; ``disconnect`` closes what it uses for now."""
        self._make = make
        self._disconnect = disconnect
        self._loader: Loader | None = None
        self._delivery: Delivery | None = None

    @property
    def loader(self) -> Loader:
        """The loader of the current crew."""
        assert self._loader is not None, "the stream is not open"
        return self._loader

    @property
    def epoch(self) -> int:  # type: ignore[override]
        """The current epoch."""
        return self.loader.epoch

    def open(self, crew: Crew) -> None:
        """Make a loader for the crew."""
        if self._loader is not None:
            self._loader.close()
        self._loader = self._make(rank=crew.index, world_size=crew.size)

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
            self._delivery = step
            last = step.batch if step.batch is not None else last
            if step.batch is not None:
                yield step.batch, len(step.numbers)
            else:
                yield loader.without_samples(loader.example() if last is None else last), 0
        loader.end_epoch()

    def steps_in(self, epochs: int, step: int) -> int | None:
        """The number of steps if the crew stays as it is."""
        loader = self.loader
        return step + len(loader) + (epochs - loader.epoch - 1) * loader.steps_per_epoch

    def used(self) -> None:
        """Record the batch's samples as consumed."""
        assert self._delivery is not None
        self.loader.accept(self._delivery)

    def explain(self, error: BaseException) -> str:
        """The columns that there are, if the program asked for another one."""
        batch = None if self._delivery is None else self._delivery.batch
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
        """Merge the ranks' states, so that coverage is proved across the interruption."""
        positions = [json.loads(state) for state in states if state is not None]
        complete = len(positions) == positions[0]["world"]
        self.loader.load_state_dict(merge_states(positions) if complete else positions[0])

    def close(self) -> None:
        """Stop reading ahead, and close the connection."""
        try:
            if self._loader is not None:
                self._loader.close()
        finally:
            if self._disconnect is not None:
                self._disconnect()


def _registered(options: DataOptions, worker: TrainingOrchestrator) -> Stream:
    """A dataset of the job; it makes no difference that every worker registers it."""
    registry = DatasetRegistry(worker.config.coordinator_url, job=worker.job)
    loader = dict(options.loader)
    shard_size = loader.pop("shard_size", _shard_size())
    shuffle, seed = loader.get("shuffle", True), loader.get("seed", 0)
    try:
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
    except BaseException:
        registry.close()
        raise
    return DatasetStream(partial(registry.loader, options.dataset, **loader), registry.close)


def _source(data: Any, format: str | None, loader: dict[str, Any]) -> Source:
    """A source, made with those of the loader's options that are meant for it."""
    options = {name: loader.pop(name) for name in _SOURCE_OPTIONS if name in loader}
    options.setdefault("shard_size", _shard_size())
    if is_count(data):
        return NumberSource(data, **options)
    return FileSource(build_index(os.fspath(data), format or format_of(data)), **options)


def _shard_size() -> int:
    return Config.load().dataset.default_shard_size
