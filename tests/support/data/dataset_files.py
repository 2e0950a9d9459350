"""Files whose samples are numbered through, for tests of datasets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq

SAMPLES = [2500, 10, 1, 4000]
"""The samples of each file."""
TOTAL = sum(SAMPLES)

Write = Callable[[pa.Table, Path], None]


def write_parquet(table: pa.Table, path: Path) -> None:
    pq.write_table(table, path, row_group_size=300)


WRITERS: dict[str, Write] = {"parquet": write_parquet, "csv": arrow_csv.write_csv}


def numbers(start: int, count: int) -> pa.Table:
    return pa.table({"number": np.arange(start, start + count), "text": ["x"] * count})


def write_files(folder: Path, format: str) -> Path:
    """Write part-0 and so on; returns the folder."""
    folder.mkdir()
    start = 0
    for part, count in enumerate(SAMPLES):
        WRITERS[format](numbers(start, count), folder / f"part-{part}.{format}")
        start += count
    return folder


def replace_one(folder: Path) -> None:
    """Put other samples into part-1."""
    write_parquet(numbers(5, 10), folder / "part-1.parquet")
