"""The loader, beside a scan of the same files and columns by pyarrow alone."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq

from ..data.index import DatasetIndex, build_index
from ..data.loader import Loader
from ..data.source import FileSource
from ..errors import ConfigError, ShardError
from ..storage.backend import storage_errors
from ..storage.local_writer import flush
from ..storage.urls import is_remote
from .raw_storage import PREFIX, check_room
from .report import Section, Series, Tell, results

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
        race = _LoaderRounds(index_files(paths, format), columns, batch_size)
        tell("first reading")
        race.warm_up()
        for number in range(ROUNDS):
            tell(f"round {number + 1}")
            race.round()
        return race.section(place)


class _LoaderRounds:
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


FILES = 8
FEATURES = 12
ROW_GROUP = 10_000
_ROW_BYTES = 4 * FEATURES + 8
_SEED = 11


def index_files(paths: Sequence[str], format: str) -> DatasetIndex:
    """Index files, folders and globs of this machine as one dataset.

    ``ConfigError`` for what lies elsewhere, ``ShardError`` when files differ in their columns.
    """
    for path in paths:
        if is_remote(path):
            raise ConfigError(f"{path} is not on this machine: name local files, or mount them")
    parts = [build_index(path, format, use_cache=False) for path in paths]
    first = parts[0]
    for part in parts[1:]:
        if not part.schema.equals(first.schema):
            raise ShardError(f"{part.path} does not have the columns of {first.path}")
    files = {file.url: file for part in parts for file in part.files}
    return DatasetIndex(first.path, first.options, tuple(files.values()), first.schema)


@contextlib.contextmanager
def written_files(size: int) -> Iterator[str]:
    """A folder with parquet files of about ``size`` bytes, which is removed at the end."""
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as name:
        remedy = "choose a smaller --size, name files, or set TMPDIR to another folder"
        check_room(Path(name), size, remedy)
        with storage_errors("write", name):
            for number in range(FILES):
                _write(Path(name, f"part-{number}.parquet"), size // FILES // _ROW_BYTES, number)
        yield name


def _write(path: Path, rows: int, number: int) -> None:
    random = np.random.default_rng((_SEED, number))
    columns = {
        f"x{column}": random.standard_normal(max(1, rows), dtype=np.float32)
        for column in range(FEATURES)
    }
    table = pa.table({**columns, "label": random.integers(0, 1000, max(1, rows))})
    # Noise does not compress, and a dictionary of it only costs time.
    pq.write_table(table, path, row_group_size=ROW_GROUP, compression="none", use_dictionary=False)
    with path.open("rb") as file:
        flush(file.fileno())  # so that nothing is still being written while it is read
