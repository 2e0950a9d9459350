"""Rows of the parquet files, one by one, for libraries that convert samples."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ..dataset import FEATURES, LABEL
from .base import Contender


class Converting(Contender):
    """Reads a copy of the first rows in a format of its own.

    The features of a row are kept as one vector, which is the fastest layout for all of them.
    """

    @property
    def rows(self) -> int:
        """Only so many are converted."""
        return min(self.task.converted_rows, self.task.data.rows)


def samples(folder: Path, count: int) -> Iterator[tuple[NDArray[np.float32], int]]:
    """The first ``count`` rows."""
    left = count
    for path in sorted(folder.iterdir()):
        table = pq.read_table(path).slice(0, left)
        left -= len(table)
        features = np.stack([table[name].to_numpy() for name in FEATURES], axis=1)
        yield from zip(features, table[LABEL].to_pylist(), strict=True)
        if not left:
            return


def touch(batch: Any) -> tuple[int, float]:
    """Add up the touched feature of a batch of tensors."""
    column = batch["x"][:, 0]
    return len(column), float(column.double().sum())
