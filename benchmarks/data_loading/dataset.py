"""The data that every contender reads: seeded, the same rows in three formats."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from .example_proto import Example

FEATURES = tuple(f"x{number}" for number in range(12))
LABEL = "label"
TOUCHED = FEATURES[0]
"""The column that every contender adds up."""
FILES = 8
ROW_GROUP = 10_000
ROW_BYTES = 4 * len(FEATURES) + 8
"""Of a decoded row."""
SEED = 20_240_601
_MASK = 0xA282EAD8


@dataclass(frozen=True, slots=True)
class Dataset:
    """Files of one format."""

    format: str
    folder: Path
    rows: int
    touched_sum: float
    """What the touched column of all rows adds up to."""
    file_bytes: int


def write(format: str, rows: int, folder: Path) -> Dataset:
    """Write a dataset; all files are in the page cache afterwards."""
    folder.mkdir(parents=True)
    total = 0.0
    for number in range(FILES):
        table = _table(number, rows * (number + 1) // FILES - rows * number // FILES)
        total += float(np.sum(table[TOUCHED].to_numpy(), dtype=np.float64))
        _WRITERS[format](table, folder / f"part-{number:02}.{format}")
    files = sorted(folder.iterdir())
    return Dataset(format, folder, rows, total, sum(len(file.read_bytes()) for file in files))


def _table(number: int, rows: int) -> pa.Table:
    random = np.random.default_rng((SEED, number))
    columns = {name: random.standard_normal(rows, dtype=np.float32) for name in FEATURES}
    return pa.table({**columns, LABEL: random.integers(0, 1000, rows)})


def _write_parquet(table: pa.Table, path: Path) -> None:
    pq.write_table(table, path, row_group_size=ROW_GROUP)


def _write_csv(table: pa.Table, path: Path) -> None:
    pyarrow.csv.write_csv(table, path)


def _write_tfrecord(table: pa.Table, path: Path) -> None:
    with path.open("wb") as file:
        for record in _examples(table):
            length = struct.pack("<Q", len(record))
            file.write(length + _masked_crc(length) + record + _masked_crc(record))


def _examples(table: pa.Table) -> Iterator[bytes]:
    features = np.stack([table[name].to_numpy() for name in FEATURES], axis=1)
    for values, label in zip(features, table[LABEL].to_pylist(), strict=True):
        example = Example()
        example.features.feature["x"].float_list.value.extend(values)
        example.features.feature[LABEL].int64_list.value.append(label)
        yield example.SerializeToString(deterministic=True)


def _masked_crc(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF)


_WRITERS = {"parquet": _write_parquet, "csv": _write_csv, "tfrecord": _write_tfrecord}
