"""HF datasets, with its own memory-mapped Arrow files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"

from datasets import Dataset

from ..dataset import TOUCHED
from .arrow import touch
from .base import Batches, Contender

SHARDS = 64
BUFFER = 10_000


class HuggingFace(Contender):
    """Batches of arrays in the order of the files."""

    def prepare(self) -> None:
        """Convert parquet to uncompressed Arrow files."""
        files = [str(file) for file in sorted(self.task.data.folder.iterdir())]
        self.dataset: Any = Dataset.from_parquet(files, cache_dir=str(self.task.scratch / "hf"))

    @contextmanager
    def open(self, batch_size: int) -> Iterator[Batches]:
        """Begin."""
        yield map(self._touch, self._batches(batch_size))

    def _batches(self, batch_size: int) -> Iterator[Any]:
        found: Iterator[Any] = self.dataset.with_format("numpy").iter(batch_size)
        return found

    def _touch(self, batch: Any) -> tuple[int, float]:
        return len(batch[TOUCHED]), float(np.asarray(batch[TOUCHED]).sum(dtype=np.float64))


class HuggingFaceShuffled(HuggingFace):
    """Shards and a buffer shuffled, which is much faster here than an index of all rows."""

    def _batches(self, batch_size: int) -> Iterator[Any]:
        streamed = self.dataset.to_iterable_dataset(num_shards=SHARDS)
        mixed = streamed.shuffle(seed=0, buffer_size=BUFFER)
        found: Iterator[Any] = mixed.with_format("numpy").iter(batch_size)
        return found


class HuggingFaceMapped(HuggingFace):
    """Arrow tables as the files hold them: nothing is decoded or copied."""

    def _batches(self, batch_size: int) -> Iterator[Any]:
        found: Iterator[Any] = self.dataset.with_format("arrow").iter(batch_size)
        return found

    def _touch(self, batch: Any) -> tuple[int, float]:
        return touch(batch)
