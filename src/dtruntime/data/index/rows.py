"""Samples by number, wherever they lie."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from ...storage import DiskCache
from ..readers import reader_for
from ..readers.format_reader import select
from .dataset_index import DatasetIndex
from .partition import ShardSpec


class DatasetRows:
    """Reads the samples of an indexed dataset as Arrow tables.

    It may be shared by threads and sent to other processes. With a ``cache``, what is read from
    an object store is kept on disk. ``ShardError`` when a file is not as it was indexed.
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
        """Return samples ``start`` to ``stop`` (excluded), of some ``columns`` or all."""
        if not 0 <= start <= stop <= len(self):
            raise ValueError(f"samples {start} to {stop} are outside a dataset of {len(self)}")
        bounds = self.index.bounds
        first = int(np.searchsorted(bounds, start, side="right")) - 1
        tables = []
        for number in range(first, int(np.searchsorted(bounds, stop, side="left"))):
            begin, end = int(bounds[number]), int(bounds[number + 1])
            low, high = max(start, begin) - begin, min(stop, end) - begin
            tables.append(self.read_file(number, low, high, columns))
        if len(tables) == 1:
            return tables[0]
        return pa.concat_tables([*tables, select(self.index.schema, columns).empty_table()])

    def read_file(
        self, number: int, start: int, stop: int, columns: Sequence[str] | None = None
    ) -> pa.Table:
        """Return rows ``start`` to ``stop`` of one of the index's files."""
        return self._reader.read(
            self.index.files[number], start, stop, columns, schema=self.index.schema
        )

    def read_shard(self, shard: ShardSpec, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the samples of a shard."""
        return self.read(shard.start, shard.end, columns)
