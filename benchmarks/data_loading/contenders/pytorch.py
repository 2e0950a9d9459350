"""PyTorch's ``DataLoader`` over a dataset as one writes it without a library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ..dataset import TOUCHED
from .base import Batches, Contender, touch_tensors


class ParquetDataset(IterableDataset):
    """Batches of parquet files; loader processes share the files."""

    def __init__(self, files: list[Path], batch_size: int) -> None:
        super().__init__()
        self._files = files
        self._batch_size = batch_size

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        info = get_worker_info()
        part, parts = (info.id, info.num_workers) if info is not None else (0, 1)
        for path in self._files[part::parts]:
            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(self._batch_size, use_threads=False):
                    yield {
                        name: torch.from_numpy(batch[name].to_numpy().copy())
                        for name in batch.schema.names
                    }


class PlainDataLoader(Contender):
    """``DataLoader``."""

    @contextmanager
    def open(self, batch_size: int) -> Iterator[Batches]:
        files = ParquetDataset(sorted(self.task.data.folder.iterdir()), batch_size)
        loader = DataLoader(files, batch_size=None, num_workers=self.processes)
        yield (touch_tensors(batch[TOUCHED]) for batch in loader)
