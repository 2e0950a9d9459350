"""MosaicML Streaming, with its own format MDS."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from .base import Batches, Converting, touch_tensors


def _without_torchvision() -> None:
    """Streaming imports torchvision for image datasets, which are not used here."""
    needed = {
        "torchvision": {},
        "torchvision.datasets": {"VisionDataset": object},
        "torchvision.transforms": {},
        "torchvision.transforms.functional": {"to_tensor": None},
    }
    for name, content in needed.items():
        module: Any = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__path__ = []
        module.__dict__.update(content)
        sys.modules.setdefault(name, module)


_without_torchvision()

import numpy as np  # noqa: E402
from streaming import MDSWriter, StreamingDataset  # noqa: E402
from streaming.base.partition import get_partitions  # noqa: E402
from streaming.base.shuffle import get_shuffle  # noqa: E402
from streaming.base.util import clean_stale_shared_memory  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

SHARD_BYTES = 1 << 26
RANKS_PER_NODE = 8
SHARD_SAMPLES = 10_000
SHUFFLE_BLOCK = 1 << 18


class Mosaic(Converting):
    """Shuffled."""

    def prepare(self) -> None:
        """Write MDS."""
        self._folder = self.task.scratch / "mds"
        columns = {"x": "ndarray:float32:12", "label": "int64"}
        with MDSWriter(out=str(self._folder), columns=columns, size_limit=SHARD_BYTES) as writer:
            for features, label in self.samples():
                writer.write({"x": features, "label": label})

    @contextmanager
    def open(self, batch_size: int) -> Iterator[Batches]:
        clean_stale_shared_memory()
        dataset = StreamingDataset(local=str(self._folder), batch_size=batch_size, shuffle=True)
        loader = DataLoader(dataset, batch_size=batch_size, num_workers=self.processes)
        yield (touch_tensors(batch["x"][:, 0]) for batch in loader)


def plan_resume(samples: int, ranks: int, batch: int, consumed: int) -> Any:
    """Which samples each rank reads from here on, with Streaming's default shuffle."""
    nodes = ranks // RANKS_PER_NODE
    ids = get_partitions("relaxed", samples, nodes, nodes, RANKS_PER_NODE, 1, batch, consumed)
    sizes = np.full(samples // SHARD_SAMPLES, SHARD_SAMPLES, np.int64)
    shuffle = get_shuffle("py1e", sizes, nodes, 0, 3, SHUFFLE_BLOCK)
    return np.where(ids != -1, shuffle[ids], -1)
