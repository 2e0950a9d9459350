"""The sources of a loader: samples in shards, from files or as plain numbers."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ..errors import ShardError
from ..storage.disk_cache import DiskCache
from ..types import check_whole
from .index import shards
from .index.dataset_index import DatasetIndex, ShardSpec
from .readers import reader_for
from .readers.format_reader import select

Ints = NDArray[np.int64]
Ranges = Iterable[tuple[int, int]]
NUMBER = "sample"
"""The only column of a dataset without files."""


class KeptSamples:
    """The samples that are left when ranges are skipped, renumbered from 0."""

    def __init__(self, total: int, skip: Ranges = ()) -> None:
        """``skip`` has the start and the end (excluded) of each range."""
        self.total = total
        self.skipped = _merged(total, skip)
        edges = np.array([0, *(x for pair in self.skipped for x in pair), total], np.int64)
        self._starts = edges[::2]
        lengths = edges[1::2] - edges[::2]
        self._counts = np.concatenate(([0], np.cumsum(lengths)))

    def __len__(self) -> int:
        return int(self._counts[-1])

    def before(self, samples: Ints) -> Ints:
        """How many kept samples come before each of ``samples``."""
        if not self.skipped:
            return samples
        run = np.searchsorted(self._starts, samples, side="right") - 1
        inside = np.minimum(samples - self._starts[run], np.diff(self._counts)[run])
        kept: Ints = self._counts[run] + inside
        return kept

    def numbers(self, kept: Ints) -> Ints:
        """The numbers of kept samples in the whole dataset."""
        if not self.skipped:
            return kept
        run = np.searchsorted(self._counts, kept, side="right") - 1
        return self._starts[run] + kept - self._counts[run]


class Source(ABC):
    """Samples in shards, numbered without those that are skipped."""

    def __init__(self, bounds: Ints, skip: Ranges, fingerprint: str) -> None:
        """``bounds`` are the first samples of all shards, followed by the number of samples."""
        self.kept = KeptSamples(int(bounds[-1]), skip)
        self.bounds = bounds
        self.starts = self.kept.before(bounds)
        if not len(self.kept):
            raise ShardError("every sample is skipped: leave some to read")
        layout = hashlib.sha256(bounds.astype("<i8").tobytes() + repr(self.kept.skipped).encode())
        self.fingerprint = fingerprint
        """Identifies the data."""
        self.layout = layout.hexdigest()[:16]
        """Identifies the shards and the skipped samples."""
        self.mean_shard_bytes = 0
        """How much is read for a shard, on average."""
        self.is_remote = False
        """Whether it is read over a network."""

    def __len__(self) -> int:
        return len(self.kept)

    @property
    def total(self) -> int:
        """The number of samples, including skipped ones."""
        return self.kept.total

    @property
    def sources(self) -> tuple[Source, ...]:
        """This source; a `Mixture` has several."""
        return (self,)

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """The columns that are read."""

    def read(self, shard: int, count: int = 1) -> pa.Table:
        """The samples of ``count`` shards from ``shard`` on, without skipped ones."""
        start, stop = int(self.bounds[shard]), int(self.bounds[shard + count])
        table = self._read(start, stop)
        first, last = int(self.starts[shard]), int(self.starts[shard + count])
        if last - first == stop - start:
            return table
        kept = np.arange(first, last, dtype=np.int64)
        return table.take(pa.array(self.kept.numbers(kept) - start))

    @abstractmethod
    def _read(self, start: int, stop: int) -> pa.Table:
        """Samples ``start`` to ``stop`` of the whole dataset."""


class FileSource(Source):
    """The samples of indexed files."""

    def __init__(
        self,
        index: DatasetIndex,
        shard_size: int = 10_000,
        *,
        exact: bool = False,
        columns: Sequence[str] | None = None,
        skip: Ranges = (),
        cache: DiskCache | None = None,
    ) -> None:
        """``cache`` stores what is read from object stores; for the others see `shards`."""
        self._schema = select(index.schema, columns)
        self._columns = None if columns is None else list(columns)
        self._rows = DatasetRows(index, cache)
        cut = shards(index, shard_size, exact)
        super().__init__(cut.bounds, skip, index.fingerprint)
        self.mean_shard_bytes = index.total_bytes // max(1, len(cut))
        self.is_remote = any(not file.stat.is_local for file in index.files)

    @property
    def schema(self) -> pa.Schema:
        """The columns that are read."""
        return self._schema

    def _read(self, start: int, stop: int) -> pa.Table:
        return self._rows.read(start, stop, self._columns)


class NumberSource(Source):
    """Samples that are only numbers, in the column ``sample``."""

    def __init__(self, total: int, shard_size: int = 10_000, *, skip: Ranges = ()) -> None:
        check_whole("total", total, 1)
        check_whole("shard_size", shard_size, 1)
        bounds = np.append(np.arange(0, total, shard_size, dtype=np.int64), total)
        super().__init__(bounds, skip, f"numbers-{total}")

    @property
    def schema(self) -> pa.Schema:
        """The column ``sample``."""
        return pa.schema([(NUMBER, pa.int64())])

    def _read(self, start: int, stop: int) -> pa.Table:
        return pa.table({NUMBER: np.arange(start, stop, dtype=np.int64)})


def _merged(total: int, skip: Ranges) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(skip):
        if not 0 <= start <= stop <= total:
            raise ValueError(f"skipped samples {start} to {stop} are outside a dataset of {total}")
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], stop)
        elif start < stop:
            merged.append((start, stop))
    return merged


class DatasetRows:
    """Reads the samples of an indexed dataset as Arrow tables.

    Thread-safe, and can be sent to other processes. With a ``cache``, what is read from an object
    store is kept on disk. ``ShardError`` when a file has changed since it was indexed.
    """

    def __init__(self, index: DatasetIndex, cache: DiskCache | None = None) -> None:
        self.index = index
        self.cache = cache
        self._reader = reader_for(index.options, cache)

    def __len__(self) -> int:
        return self.index.total_samples

    def __reduce__(self) -> tuple[type[DatasetRows], tuple[DatasetIndex, DiskCache | None]]:
        return DatasetRows, (self.index, self.cache)

    def read(self, start: int, stop: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Return samples ``start`` to ``stop`` (excluded), of all or some columns."""
        index = self.index
        if not 0 <= start <= stop <= len(self):
            raise ValueError(f"samples {start} to {stop} are outside a dataset of {len(self)}")
        schema = select(index.schema, columns)
        tables = [
            self._reader.read(index.files[number], low, high, schema)
            for number, low, high in index.pieces(start, stop)
        ]
        return tables[0] if len(tables) == 1 else pa.concat_tables([*tables, schema.empty_table()])

    def read_shard(self, shard: ShardSpec, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the samples of a shard."""
        return self.read(shard.start, shard.end, columns)
