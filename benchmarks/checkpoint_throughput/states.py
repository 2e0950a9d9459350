"""What is saved: bytes and state dicts of a given size, every chunk of them different."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

LARGEST = 16 * 2**20
"""No tensor has more bytes."""
SMALL = 4096
"""Beside each tensor there is a small one, as a layer has a bias."""
_SEED = 7


def make_bytes(size: int) -> bytes:
    """Random bytes."""
    numbers = np.empty(size // 4, np.uint32)
    _fill(numbers, 0)
    return numbers.tobytes()


def make_arrays(size: int) -> dict[str, NDArray[np.float32]]:
    """Weights and biases of some layers, ``size`` bytes in all."""
    arrays = {name: np.empty(nbytes // 4, np.float32) for name, nbytes in _layers(size)}
    for salt, array in enumerate(arrays.values()):
        _fill(array.view(np.uint32), salt)
    return arrays


def make_tensors(size: int) -> dict[str, Any]:
    """The same as tensors of torch, in memory of torch's own allocator as that of a model is."""
    import torch

    tensors = {name: torch.empty(nbytes // 4) for name, nbytes in _layers(size)}
    for salt, tensor in enumerate(tensors.values()):
        _fill(tensor.numpy().view(np.uint32), salt)
    return tensors


def check_tensors(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Who does not load what was saved is not measured."""
    import torch

    for name, tensor in expected.items():
        if not torch.equal(found[name].view(torch.int32), tensor.view(torch.int32)):
            raise ValueError(f"{name} came back with other values")


def _layers(size: int) -> Iterator[tuple[str, int]]:
    layers = max(8, -(-size // LARGEST))
    for number in range(layers):
        whole = size * (number + 1) // layers - size * number // layers
        yield f"layers.{number}.weight", max(SMALL, (whole - SMALL) // SMALL * SMALL)
        yield f"layers.{number}.bias", SMALL


def _fill(numbers: NDArray[np.uint32], salt: int) -> None:
    """Random numbers that differ from block to block, without a random one for each."""
    block = _random_block()
    for at in range(0, len(numbers), len(block)):
        part = numbers[at : at + len(block)]
        np.add(block[: len(part)], np.uint32((salt * 2654435761 + at) % 2**32), out=part)


@functools.cache
def _random_block() -> NDArray[np.uint32]:
    return np.random.default_rng(_SEED).integers(0, 2**32, LARGEST // 4, np.uint32)
