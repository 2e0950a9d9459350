"""What every contender does, and the rows of the files for those that convert samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dtruntime.bench.loader_throughput import FEATURES, LABEL

from ..dataset import Dataset

Batches = Iterator[tuple[int, float]]
"""How many samples a batch has, and the sum of its touched column."""


@dataclass(frozen=True, slots=True)
class Task:
    """What to read, and where there is room for a copy of it."""

    data: Dataset
    converted_rows: int
    """For those that convert sample by sample: how many rows to convert."""
    scratch: Path


class Contender(ABC):
    """Reads a dataset in batches."""

    processes = 0
    """Loader processes."""

    def __init__(self, task: Task, **options: Any) -> None:
        """``options`` are attributes that differ from the class's."""
        self.task = task
        vars(self).update(options)

    @property
    def rows(self) -> int:
        """How many samples a whole pass has."""
        return self.task.data.rows

    def prepare(self) -> None:  # noqa: B027 - most have nothing to prepare
        """Index or convert the data: once, before the first pass."""

    @abstractmethod
    def open(self, batch_size: int) -> AbstractContextManager[Batches]:
        """Make ready for a pass; what is measured is the iteration."""


class Converting(Contender):
    """Reads a copy of the first rows in a format of its own.

    The features of a row are kept as one vector, which is the fastest layout for all of them.
    """

    @property
    def rows(self) -> int:
        """Only so many are converted."""
        return min(self.task.converted_rows, self.task.data.rows)

    def samples(self) -> Iterator[tuple[NDArray[np.float32], int]]:
        """The rows to convert, one by one."""
        left = self.rows
        for path in sorted(self.task.data.folder.iterdir()):
            table = pq.read_table(path).slice(0, left)
            left -= len(table)
            features = np.stack([table[name].to_numpy() for name in FEATURES], axis=1)
            yield from zip(features, table[LABEL].to_pylist(), strict=True)
            if not left:
                return


def touch_tensors(column: Any) -> tuple[int, float]:
    """The size and the sum of a column of torch."""
    return len(column), float(column.double().sum())
