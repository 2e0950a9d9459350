"""Plain reading, without a loader: the limit."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.dataset
import pyarrow.parquet as pq

from ..dataset import TOUCHED
from ..example_proto import Example
from .base import Batches, Contender


def touch(batch: pa.RecordBatch) -> tuple[int, float]:
    """Add up the touched column."""
    return len(batch), float(batch[TOUCHED].to_numpy().sum(dtype=np.float64))


class _Files(Contender):
    """Reads file after file."""

    threads = True

    @contextmanager
    def open(self, batch_size: int) -> Iterator[Batches]:
        """Begin."""
        files = sorted(self.task.data.folder.iterdir())
        yield (found for file in files for found in self._file(file, batch_size))

    def _file(self, path: Path, batch_size: int) -> Batches:
        raise NotImplementedError


class DatasetScan(Contender):
    """``pyarrow.dataset``."""

    @contextmanager
    def open(self, batch_size: int) -> Iterator[Batches]:
        """Begin."""
        files = pa.dataset.dataset(self.task.data.folder, format=self.task.data.format)
        yield map(touch, files.to_batches(batch_size=batch_size))


class ParquetBatches(_Files):
    """``ParquetFile.iter_batches``."""

    def _file(self, path: Path, batch_size: int) -> Batches:
        with pq.ParquetFile(path) as file:
            yield from map(touch, file.iter_batches(batch_size, use_threads=self.threads))


class ParquetBatchesOneThread(ParquetBatches):
    """The same, decoding in the calling thread."""

    threads = False


class CsvBatches(_Files):
    """``pyarrow.csv.open_csv``; batches are as large as its blocks."""

    def _file(self, path: Path, batch_size: int) -> Batches:
        with pyarrow.csv.open_csv(path) as reader:
            yield from map(touch, reader)


class _Records(_Files):
    """A loop over the records of a file, which does not look at checksums."""

    def _file(self, path: Path, batch_size: int) -> Batches:
        batch: list[bytes] = []
        for record in _records(path):
            batch.append(record)
            if len(batch) == batch_size:
                yield self._touch(batch)
                batch = []
        if batch:
            yield self._touch(batch)

    def _touch(self, batch: list[bytes]) -> tuple[int, float]:
        raise NotImplementedError


class TfrecordFrames(_Records):
    """Records as bytes."""

    def _touch(self, batch: list[bytes]) -> tuple[int, float]:
        return len(batch), float("nan")


class TfrecordProtobuf(_Records):
    """Records parsed by protobuf."""

    def _touch(self, batch: list[bytes]) -> tuple[int, float]:
        rows = []
        for record in batch:
            features = Example.FromString(record).features.feature
            rows.append(features["x"].float_list.value)
        return len(rows), float(np.array(rows, np.float32)[:, 0].sum(dtype=np.float64))


def _records(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=1 << 20) as file:
        while head := file.read(12):
            (length,) = struct.unpack_from("<Q", head)
            yield file.read(length)
            file.seek(4, 1)
