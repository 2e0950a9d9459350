"""The demo's data, noisy pictures of digits drawn from a seed, and the model that reads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Batch = Mapping[str, NDArray[Any]]
"""Columns of samples: ``sample_id``, ``label``, and the bytes of the picture, ``pixels``."""
Floats = NDArray[np.float32]

SIDE = 12
PIXELS = SIDE * SIDE
CLASSES = 10
HELD_OUT = 4000
NOISE = 30.0
MOMENTUM = 0.9

# Five by seven dots each, a number per row.
_GLYPHS = (
    (0x0E, 0x11, 0x13, 0x15, 0x19, 0x11, 0x0E),
    (0x04, 0x0C, 0x04, 0x04, 0x04, 0x04, 0x0E),
    (0x0E, 0x11, 0x01, 0x02, 0x04, 0x08, 0x1F),
    (0x1F, 0x02, 0x04, 0x02, 0x01, 0x11, 0x0E),
    (0x02, 0x06, 0x0A, 0x12, 0x1F, 0x02, 0x02),
    (0x1F, 0x10, 0x1E, 0x01, 0x01, 0x11, 0x0E),
    (0x06, 0x08, 0x10, 0x1E, 0x11, 0x11, 0x0E),
    (0x1F, 0x01, 0x02, 0x04, 0x08, 0x08, 0x08),
    (0x0E, 0x11, 0x11, 0x0E, 0x11, 0x11, 0x0E),
    (0x0E, 0x11, 0x11, 0x0F, 0x01, 0x02, 0x0C),
)
_DOTS = np.array([[[row >> (4 - x) & 1 for x in range(5)] for row in g] for g in _GLYPHS])


def draw(count: int, *seed: int, first_id: int = 0) -> Batch:
    """Pictures of digits that differ in place, contrast and noise."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(CLASSES, size=count)
    down, right = rng.integers(SIDE + 1 - np.array(_DOTS.shape[1:]), size=(count, 2)).T
    pictures = np.zeros((count, SIDE, SIDE), np.float32)
    rows, columns = (np.arange(length) for length in _DOTS.shape[1:])
    here = np.arange(count)[:, None, None]
    pictures[here, (down[:, None] + rows)[:, :, None], (right[:, None] + columns)[:, None]] = _DOTS[
        labels
    ]
    contrast = rng.uniform(90, 200, size=(count, 1, 1)).astype(np.float32)
    noise = rng.standard_normal(pictures.shape, dtype=np.float32) * np.float32(NOISE)
    pixels = np.clip(pictures * contrast + 40 + noise, 0, 255).astype(np.uint8)
    ids = np.arange(first_id, first_id + count, dtype=np.int64)
    return {"sample_id": ids, "pixels": pixels.reshape(count, PIXELS), "label": labels}


def write_shards(folder: Path, total_samples: int, shard_size: int, seed: int) -> int:
    """Write a dataset, one file per shard; returns its size in bytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True, exist_ok=True)
    for shard_id, start in enumerate(range(0, total_samples, shard_size)):
        count = min(shard_size, total_samples - start)
        samples = draw(count, seed, 0, shard_id, first_id=start)
        pictures = [picture.tobytes() for picture in samples["pixels"]]
        columns = {
            "sample_id": pa.array(samples["sample_id"]),
            "label": pa.array(samples["label"].astype(np.int8)),
            "pixels": pa.array(pictures, pa.binary(PIXELS)),
        }
        path = folder / f"shard_{shard_id}.parquet"
        # Noise does not compress, and a dictionary of it only costs time.
        pq.write_table(pa.table(columns), path, compression="none", use_dictionary=False)
    return sum(path.stat().st_size for path in folder.iterdir())


def read_ids(folder: Path) -> NDArray[np.int64]:
    """The ids of all samples in a dataset's files, ascending."""
    import pyarrow.parquet as pq

    files = folder.glob("shard_*.parquet")
    tables = [pq.read_table(file, columns=["sample_id"], use_threads=False) for file in files]
    return np.sort(np.concatenate([table["sample_id"].to_numpy() for table in tables]))


class Classifier:
    """Pictures to classes; all parameters lie in one vector."""

    def __init__(self, hidden: int, parameters: Floats) -> None:
        sizes = (PIXELS * hidden, hidden, hidden * CLASSES, CLASSES)
        self.parameters = parameters
        self._velocity = np.zeros_like(parameters)
        w1, b1, w2, b2 = np.split(parameters, np.cumsum(sizes)[:-1])
        self._w1, self._b1 = w1.reshape(PIXELS, hidden), b1
        self._w2, self._b2 = w2.reshape(hidden, CLASSES), b2

    @classmethod
    def initial(cls, hidden: int, seed: int) -> Classifier:
        """An untrained model, the same for the same seed."""
        rng = np.random.default_rng((seed, 2))
        model = cls(hidden, np.zeros(hidden * (PIXELS + 1 + CLASSES) + CLASSES, np.float32))
        model._w1[:] = rng.standard_normal(model._w1.shape) * np.sqrt(2 / PIXELS)
        model._w2[:] = rng.standard_normal(model._w2.shape) * np.sqrt(1 / hidden)
        return model

    def gradient(self, batch: Batch) -> tuple[Floats, float]:
        """The summed gradients of all samples, ordered as the parameters, and their summed loss."""
        inputs = _normalised(batch["pixels"])
        activation, log_probabilities = self._forward(inputs)
        labelled = np.arange(len(inputs)), batch["label"]
        loss = -float(log_probabilities[labelled].sum(dtype=np.float64))
        error = np.exp(log_probabilities)
        error[labelled] -= 1
        back = (error @ self._w2.T) * (activation > 0)
        parts = (inputs.T @ back, back.sum(0), activation.T @ error, error.sum(0))
        return np.concatenate([part.ravel() for part in parts]), loss

    def accuracy(self, batch: Batch) -> float:
        """The share of samples whose digit it names."""
        _, log_probabilities = self._forward(_normalised(batch["pixels"]))
        return float((log_probabilities.argmax(1) == batch["label"]).mean())

    def step(self, gradient: Floats, rate: float) -> None:
        """Descend along the gradient, with momentum."""
        self._velocity *= np.float32(MOMENTUM)
        self._velocity += gradient
        self.parameters -= np.float32(rate) * self._velocity

    def state_dict(self) -> dict[str, Floats]:
        """What has to be saved."""
        return {"parameters": self.parameters, "velocity": self._velocity}

    def load_state_dict(self, state: Mapping[str, Floats]) -> None:
        """Restore what was saved."""
        self.parameters[:] = state["parameters"]
        self._velocity[:] = state["velocity"]

    def _forward(self, inputs: Floats) -> tuple[Floats, Floats]:
        """The hidden layer, and the logarithm of each class's probability."""
        activation = np.maximum(inputs @ self._w1 + self._b1, 0)
        logits = activation @ self._w2 + self._b2
        logits -= logits.max(1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(1, keepdims=True))
        return activation, logits


def _normalised(pixels: NDArray[np.uint8]) -> Floats:
    return (pixels.astype(np.float32) - np.float32(90)) / np.float32(80)
