"""The loader, beside a scan of the same files and columns by pyarrow alone."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TypeAlias

import pyarrow as pa
import pyarrow.dataset

from ..data.index import DatasetIndex
from ..data.loader import Loader
from ..data.source import FileSource
from .files import index_files, written_files
from .measures import Section, Series, Tell, results

ROUNDS = 5
TURN_SECONDS = 3.0
"""A turn ends after so long, also in the middle of the files."""
LIMIT = "pyarrow scan"

Counts: TypeAlias = Generator[int, None, None]
"""The number of samples in each batch that is read."""


def bench_data(
    paths: Sequence[str],
    columns: Sequence[str] | None,
    *,
    format: str,
    size: int,
    batch_size: int,
    tell: Tell,
) -> Section:
    """Measure ``paths``, or files of ``size`` bytes that are written for it and removed."""
    with contextlib.ExitStack() as stack:
        if not paths:
            tell("writing files")
            paths, place = [stack.enter_context(written_files(size))], "parquet files of its own"
        else:
            place = ", ".join(paths)
        tell("indexing")
        race = _Race(index_files(paths, format), columns, batch_size)
        tell("first reading")
        race.warm_up()
        for number in range(ROUNDS):
            tell(f"round {number + 1}")
            race.round()
        return race.section(place)


class _Race:
    """Everything in each round, so that all meet the same machine."""

    def __init__(self, index: DatasetIndex, columns: Sequence[str] | None, batch_size: int) -> None:
        self._index = index
        self._source = FileSource(index, columns=columns)
        self._columns = list(self._source.schema.names)
        self._batch_size = batch_size
        files = [file.url for file in index.files]
        self._dataset = pa.dataset.dataset(files, format=index.format)
        self._records: dict[Series, Callable[[], Counts]] = {}

    def warm_up(self) -> None:
        """Read for a turn: what fits is in memory then, and a sample's size is known."""
        rows = size = 0
        began = time.perf_counter()
        for batch in self._scanned():
            rows, size = rows + len(batch), size + batch.nbytes
            if time.perf_counter() - began > TURN_SECONDS:
                break
        each = size / rows
        self._records = {
            Series(LIMIT, "samples", bytes_each=each): self._scan,
            Series("loader, in order", "samples", LIMIT, each): lambda: self._load(False),
            Series("loader, shuffled", "samples", LIMIT, each): lambda: self._load(True),
        }

    def round(self) -> None:
        """Measure everything once."""
        for record, read in self._records.items():
            with contextlib.closing(read()) as batches:
                record.add(*_turn(batches))

    def section(self, place: str) -> Section:
        """What came out."""
        return Section(
            name="data",
            place=place,
            facts={
                "files": len(self._index.files),
                "file_bytes": self._index.total_bytes,
                "samples": self._index.total_samples,
                "columns": len(self._columns),
                "batch_size": self._batch_size,
                "rounds": ROUNDS,
            },
            measures=results(list(self._records)),
            notes=[
                "bytes are those of decoded samples",
                "files are read once before: as much as fits comes from memory, not from the disk",
            ],
        )

    def _scanned(self) -> Iterator[pa.RecordBatch]:
        yield from self._dataset.to_batches(columns=self._columns)

    def _scan(self) -> Counts:
        for batch in self._scanned():
            yield len(batch)

    def _load(self, shuffle: bool) -> Counts:
        with Loader(self._source, self._batch_size, shuffle=shuffle) as loader:
            for batch in loader:
                yield len(batch[self._columns[0]])


def _turn(batches: Counts) -> tuple[float, int]:
    """Read for a while, or to the end."""
    rows = 0
    began = time.perf_counter()
    for count in batches:
        rows += count
        if time.perf_counter() - began > TURN_SECONDS:
            break
    return time.perf_counter() - began, rows
