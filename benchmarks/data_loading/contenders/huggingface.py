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
    """Batches of arrays, or with the format ``arrow`` of tables that are not decoded or copied."""

    shuffle = False
    """Shards and a buffer shuffled, which is much faster here than an index of all rows."""
    format = "numpy"

    def prepare(self) -> None:
        """Convert parquet to uncompressed Arrow files."""
        files = [str(file) for file in sorted(self.task.data.folder.iterdir())]
        self.dataset: Any = Dataset.from_parquet(files, cache_dir=str(self.task.scratch / "hf"))

    @contextmanager
    def open(self, batch_size: int) -> Iterator[Batches]:
        rows = self.dataset
        if self.shuffle:
            streamed = rows.to_iterable_dataset(num_shards=SHARDS)
            rows = streamed.shuffle(seed=0, buffer_size=BUFFER)
        batches = rows.with_format(self.format).iter(batch_size)
        yield map(touch if self.format == "arrow" else _touch_arrays, batches)


def _touch_arrays(batch: Any) -> tuple[int, float]:
    return len(batch[TOUCHED]), float(np.asarray(batch[TOUCHED]).sum(dtype=np.float64))
