"""Strata's loader."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from dtruntime.data import TfrecordOptions, build_index
from dtruntime.data.loader import Loader

from ..dataset import TOUCHED
from .base import Batches, Contender, touch_tensors


class Strata(Contender):
    """Batches in the order of the files, or of the whole epoch's shuffle."""

    shuffle = False
    output: Any = "numpy"
    format_options: Any = None

    def prepare(self) -> None:
        """Index the files."""
        data, options = self.task.data, self.format_options
        self._index = build_index(data.folder, data.format, options=options, use_cache=False)

    @contextmanager
    def open(self, batch_size: int) -> Iterator[Batches]:
        with Loader(self._index, batch_size, shuffle=self.shuffle, output=self.output) as loader:
            yield map(self.touch, loader)

    def touch(self, batch: dict[str, Any]) -> tuple[int, float]:
        """The size of a batch, and the sum of its touched column."""
        column = batch[TOUCHED]
        if self.output == "torch":
            return touch_tensors(column)
        return len(column), float(column.sum(dtype=np.float64))


class StrataExamples(Strata):
    """Parsed Examples; vectors come one by one and are stacked here."""

    def touch(self, batch: dict[str, Any]) -> tuple[int, float]:
        column = np.stack(batch["x"])[:, 0]
        return len(column), float(column.sum(dtype=np.float64))


class StrataRecords(Strata):
    """Records as bytes, checksums verified."""

    format_options = TfrecordOptions(raw=True)

    def touch(self, batch: dict[str, Any]) -> tuple[int, float]:
        return len(batch["record"]), float("nan")
