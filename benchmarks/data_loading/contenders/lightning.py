"""LitData, with its own chunks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from litdata import StreamingDataLoader, StreamingDataset
from litdata.streaming.writer import BinaryWriter

from .base import Batches
from .rows import Converting, samples, touch


class LitData(Converting):
    """Shuffled, in the training process."""

    processes = 0

    def prepare(self) -> None:
        """Write chunks."""
        self._folder = self.task.scratch / "litdata"
        self._folder.mkdir()
        writer = BinaryWriter(str(self._folder), chunk_bytes="4MB")
        for number, (features, label) in enumerate(samples(self.task.data.folder, self.rows)):
            writer[number] = {"x": features, "label": label}
        writer.done()
        writer.merge(1)

    @contextmanager
    def open(self, batch_size: int) -> Iterator[Batches]:
        """Make a dataset and its loader."""
        dataset = StreamingDataset(str(self._folder), shuffle=True)
        loader = StreamingDataLoader(dataset, batch_size=batch_size, num_workers=self.processes)
        yield map(touch, loader)


class LitDataProcesses(LitData):
    """In two loader processes."""

    processes = 2
