"""Strata's loader."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from dtruntime.data import TfrecordOptions, build_index
from dtruntime.data.loader import Loader

from ..dataset import TOUCHED
from .base import Batches, Contender


class Strata(Contender):
    """Batches in the order of the files."""

    shuffle = False
    output: Any = "numpy"
    options: Any = None

    def prepare(self) -> None:
        """Index the files."""
        data = self.task.data
        self._index = build_index(data.folder, data.format, options=self.options, use_cache=False)

    @contextmanager
    def open(self, batch_size: int) -> Iterator[Batches]:
        """Make a loader."""
        with Loader(self._index, batch_size, shuffle=self.shuffle, output=self.output) as loader:
            yield map(self._touch, loader)

    def _touch(self, batch: dict[str, Any]) -> tuple[int, float]:
        column = batch[TOUCHED]
        return len(column), float(column.sum(dtype=np.float64))


class StrataShuffled(Strata):
    """Batches of the whole epoch's shuffle."""

    shuffle = True


class StrataTorchInOrder(Strata):
    """Tensors in the order of the files."""

    output = "torch"

    def _touch(self, batch: dict[str, Any]) -> tuple[int, float]:
        column = batch[TOUCHED]
        return len(column), float(column.double().sum())


class StrataTorch(StrataTorchInOrder):
    """Tensors of the whole epoch's shuffle."""

    shuffle = True


class StrataExamples(Strata):
    """Parsed Examples; vectors come one by one and are stacked here."""

    def _touch(self, batch: dict[str, Any]) -> tuple[int, float]:
        column = np.stack(batch["x"])[:, 0]
        return len(column), float(column.sum(dtype=np.float64))


class StrataRecords(Strata):
    """Records as bytes, checksums verified."""

    options = TfrecordOptions(raw=True)

    def _touch(self, batch: dict[str, Any]) -> tuple[int, float]:
        return len(batch["record"]), float("nan")
