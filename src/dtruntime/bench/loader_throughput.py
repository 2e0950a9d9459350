"""The loader, beside a scan of the same files and columns by pyarrow alone."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias, TypeVar

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
from .report import Announce, Section, Series, results

ROUNDS = 5
TURN_SECONDS = 3.0
"""A turn ends after this time, also in the middle of the files."""
LIMIT = "pyarrow scan"
FILES = 8
FEATURES = tuple(f"x{number}" for number in range(12))
LABEL = "label"
ROW_GROUP = 10_000
ROW_BYTES = 4 * len(FEATURES) + 8
"""Of a decoded row of `random_table`."""
Counts: TypeAlias = Generator[int, None, None]
"""The number of samples in each batch that is read."""
T = TypeVar("T")


def bench_data(
    paths: Sequence[str],
    columns: Sequence[str] | None,
    *,
    format: str,
    size: int,
    batch_size: int,
    tell: Announce,
) -> Section:
    """Measure ``paths``, or files of ``size`` bytes that are written for it and removed."""
    with contextlib.ExitStack() as stack:
        place = ", ".join(paths) or "parquet files of its own"
        if not paths:
            tell("writing files")
            paths = [stack.enter_context(_written_files(size))]
        tell("indexing")
        index = _index_files(paths, format)
        source = FileSource(index, columns=columns)
        names = list(source.schema.names)
        dataset = pa.dataset.dataset([file.url for file in index.files], format=index.format)

        def scan() -> Iterator[pa.RecordBatch]:
            yield from dataset.to_batches(columns=names)

        def load(shuffle: bool) -> Counts:
            with Loader(source, batch_size, shuffle=shuffle) as loader:
                for batch in loader:
                    yield len(batch[names[0]])

        tell("first reading")
        # What fits is in memory after that, and the size of a sample is known.
        rows = nbytes = 0
        for batch in _for_a_turn(scan()):
            rows, nbytes = rows + len(batch), nbytes + batch.nbytes
        each = nbytes / rows
        turns: dict[Series, Callable[[], Counts]] = {
            Series(LIMIT, "samples", bytes_each=each): lambda: (len(b) for b in scan()),
            Series("loader, in order", "samples", LIMIT, each): lambda: load(False),
            Series("loader, shuffled", "samples", LIMIT, each): lambda: load(True),
        }
        for number in range(ROUNDS):
            tell(f"round {number + 1}")
            for series, read in turns.items():
                with contextlib.closing(read()) as counts:
                    began = time.perf_counter()
                    rows = sum(_for_a_turn(counts))
                    series.add(time.perf_counter() - began, rows)
        facts = {
            "files": len(index.files),
            "file_bytes": index.total_bytes,
            "samples": index.total_samples,
            "columns": len(names),
            "batch_size": batch_size,
            "rounds": ROUNDS,
        }
        notes = [
            "bytes are those of decoded samples",
            "files are read once before: as much as fits comes from memory, not from the disk",
        ]
        return Section("data", place, {**facts}, results(list(turns)), notes)


def _for_a_turn(batches: Iterable[T]) -> Iterator[T]:
    """Batches until the turn is over."""
    began = time.perf_counter()
    for batch in batches:
        yield batch
        if time.perf_counter() - began > TURN_SECONDS:
            return


def _index_files(paths: Sequence[str], format: str) -> DatasetIndex:
    """Index files, folders and globs of this machine as one dataset.

    ``ConfigError`` for remote files, ``ShardError`` when files differ in their columns.
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
def _written_files(size: int) -> Iterator[str]:
    """A folder with parquet files of about ``size`` bytes, which is removed at the end."""
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as name:
        remedy = "choose a smaller --size, name files, or set TMPDIR to another folder"
        check_room(Path(name), size, remedy)
        with storage_errors("write", name):
            for number in range(FILES):
                path = Path(name, f"part-{number}.parquet")
                rows = max(1, size // FILES // ROW_BYTES)
                # Noise does not compress, and a dictionary of it only costs time.
                options = {"compression": "none", "use_dictionary": False}
                table = random_table(rows, number)
                pq.write_table(table, path, row_group_size=ROW_GROUP, **options)
                with path.open("rb") as file:
                    flush(file.fileno())  # so that nothing is still being written while it is read
        yield name


def random_table(rows: int, *seed: int) -> pa.Table:
    """Rows of twelve features and a label, the same for the same seed."""
    random = np.random.default_rng(seed)
    columns = {name: random.standard_normal(rows, dtype=np.float32) for name in FEATURES}
    return pa.table({**columns, LABEL: random.integers(0, 1000, rows)})
