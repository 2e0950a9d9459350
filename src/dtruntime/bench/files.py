"""The files to read: those that are named, or some that are written for it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..data.index import DatasetIndex, build_index
from ..errors import ConfigError, ShardError
from ..storage.data_files import is_remote
from ..storage.error_translation import storage_errors
from ..storage.local_disk.atomic_file import flush
from .raw_storage import PREFIX, check_room

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
