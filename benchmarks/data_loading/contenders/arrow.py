"""Plain reading, without a loader: the limit."""

from __future__ import annotations

import struct
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.dataset
import pyarrow.parquet as pq

from ..dataset import TOUCHED, Example
from .base import Batches, Contender


def touch(batch: pa.RecordBatch) -> tuple[int, float]:
    """Add up the touched column."""
    return len(batch), float(batch[TOUCHED].to_numpy().sum(dtype=np.float64))


class DatasetScan(Contender):
    """``pyarrow.dataset``."""

    @contextmanager
    def open(self, batch_size: int) -> Iterator[Batches]:
        files = pa.dataset.dataset(self.task.data.folder, format=self.task.data.format)
        yield map(touch, files.to_batches(batch_size=batch_size))


class _Files(Contender):
    """Reads file after file."""

    @contextmanager
    def open(self, batch_size: int) -> Iterator[Batches]:
        files = sorted(self.task.data.folder.iterdir())
        yield (batch for file in files for batch in self.read(file, batch_size))

    @abstractmethod
    def read(self, path: Path, batch_size: int) -> Batches:
        """Read one file."""


class ParquetBatches(_Files):
    """``ParquetFile.iter_batches``."""

    threads = True

    def read(self, path: Path, batch_size: int) -> Batches:
        with pq.ParquetFile(path) as file:
            yield from map(touch, file.iter_batches(batch_size, use_threads=self.threads))


class CsvBatches(_Files):
    """``pyarrow.csv.open_csv``; batches are as large as its blocks."""

    def read(self, path: Path, batch_size: int) -> Batches:
        with pyarrow.csv.open_csv(path) as reader:
            yield from map(touch, reader)


class Records(_Files):
    """A loop over the records of a file without checksums: as bytes, or parsed by protobuf."""

    parsed = False

    def read(self, path: Path, batch_size: int) -> Batches:
        records = _records(path)
        while batch := list(islice(records, batch_size)):
            total = float("nan")
            if self.parsed:
                features = (Example.FromString(record).features.feature for record in batch)
                rows = np.array([each["x"].float_list.value for each in features], np.float32)
                total = float(rows[:, 0].sum(dtype=np.float64))
            yield len(batch), total


def _records(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=1 << 20) as file:
        while head := file.read(12):
            (length,) = struct.unpack_from("<Q", head)
            yield file.read(length)
            file.seek(4, 1)
