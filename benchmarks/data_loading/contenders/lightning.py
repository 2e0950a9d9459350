"""LitData, with its own chunks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from litdata import StreamingDataLoader, StreamingDataset
from litdata.streaming.writer import BinaryWriter

from .base import Batches, Converting, touch_tensors


class LitData(Converting):
    """Shuffled."""

    def prepare(self) -> None:
        """Write chunks."""
        self._folder = self.task.scratch / "litdata"
        self._folder.mkdir()
        writer = BinaryWriter(str(self._folder), chunk_bytes="4MB")
        for number, (features, label) in enumerate(self.samples()):
            writer[number] = {"x": features, "label": label}
        writer.done()
        writer.merge(1)

    @contextmanager
    def open(self, batch_size: int) -> Iterator[Batches]:
        dataset = StreamingDataset(str(self._folder), shuffle=True)
        loader = StreamingDataLoader(dataset, batch_size=batch_size, num_workers=self.processes)
        yield (touch_tensors(batch["x"][:, 0]) for batch in loader)
