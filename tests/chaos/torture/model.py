"""What workers compute: a state that every sample of every step changes, in the order of steps."""

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtruntime.data.loader import Loader
from dtruntime.data.source import NumberSource

MASK = 2**64 - 1
SLOTS = 8
WORDS = 4096
"""So many words has each slot; one slot changes with each step."""


class Fold:
    """A digest of all batches so far, whoever had which samples of them, and some ballast."""

    def __init__(self) -> None:
        self.digest = 0
        self.slots = [np.zeros(WORDS, np.uint64) for _ in range(SLOTS)]

    def step(self, number: int, value: int) -> None:
        """Fold in the value of the whole batch of a step."""
        data = f"{self.digest:x}/{number}/{value & MASK:x}".encode()
        self.digest = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
        words = np.arange(WORDS, dtype=np.uint64) * np.uint64(self.digest | 1)
        self.slots[number % SLOTS] = words

    def state_dict(self) -> dict[str, Any]:
        slots = {f"slot-{number}": slot for number, slot in enumerate(self.slots)}
        return {"digest": np.array([self.digest], np.uint64), **slots}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.digest = int(state["digest"][0])
        self.slots = [np.array(state[f"slot-{number}"]) for number in range(SLOTS)]

    def equals(self, other: "Fold") -> bool:
        same = [np.array_equal(a, b) for a, b in zip(self.slots, other.slots, strict=True)]
        return self.digest == other.digest and all(same)


def value_of(samples: NDArray[np.int64], epoch: int) -> int:
    """What a part of a batch adds to the value of the batch: a sum, so that parts add up."""
    mixed = samples.astype(np.uint64) + np.uint64((epoch + 1) * 0x9E3779B97F4A7C15 & MASK)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return int((mixed ^ (mixed >> np.uint64(31))).sum(dtype=np.uint64))


def undisturbed(
    samples: int, epochs: int, batch: int, reading: dict[str, Any]
) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """The epoch and the samples of each step, read by one loader without any run."""
    options = dict(reading)
    source = NumberSource(samples, options.pop("shard_size"))
    with Loader(source, global_batch_size=batch, **options) as loader:
        for epoch in range(epochs):
            for found in loader:
                yield epoch, np.sort(found["sample"])
