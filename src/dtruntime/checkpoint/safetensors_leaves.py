"""The leaves of a state checkpoint under the flat names that safetensors has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointDamagedError
from .file_format.manifest import Part
from .safetensors_format import METADATA, NAMES, NUMPY, SIZES
from .state_dict.buffers import Key
from .state_dict.numpy_dtypes import decode_dtype
from .state_dict.shared_memory import dense_strides
from .state_dict.skeleton import LIBRARY, ArrayEntry, Skeleton, parse, parts_of
from .trees.naming import ROOT, Place, readable
from .trees.outline import outline


@dataclass(frozen=True, slots=True)
class TensorLeaf:
    """An array, and where its bytes are."""

    name: str
    number: int
    """Which of the state's arrays it is; the same one may have several names."""
    dtype: str
    entry: ArrayEntry
    buffer: tuple[int, int]
    """Where its buffer begins in the part's stream, and how many bytes that has."""

    @property
    def nbytes(self) -> int:
        """How many bytes it has in a file."""
        return prod(self.entry.shape) * SIZES[NAMES[self.dtype]]

    @property
    def plain(self) -> bool:
        """Whether its bytes are stored as a file has them."""
        entry = self.entry
        size = SIZES[NAMES[self.dtype]]
        dense = entry.strides is None or entry.strides == list(dense_strides(entry.shape, size))
        return dense and not (entry.conj or entry.neg or _swapped(entry))

    def assemble(self, memory: NDArray[np.uint8]) -> bytes:
        """The bytes of one that is not plain, made of its buffer's."""
        size = SIZES[NAMES[self.dtype]]
        strides = self.entry.strides or dense_strides(self.entry.shape, size)
        dtype = _numpy_dtype(self.dtype, size)
        if _swapped(self.entry):
            dtype = dtype.newbyteorder(">")
        array: NDArray[Any] = np.ndarray(
            tuple(self.entry.shape), dtype, memory.data, self.entry.offset, tuple(strides)
        )
        if self.entry.conj:
            array = array.conj()
        if self.entry.neg:
            array = -array
        return array.astype(dtype.newbyteorder("<")).tobytes()


@dataclass(frozen=True, slots=True)
class Leaves:
    """The leaves of a state."""

    tensors: list[TensorLeaf]
    values: dict[str, Any]
    """Everything else, as JSON."""
    shared: list[list[str]]
    """Names of tensors that were one, or lay in each other's memory."""


def leaves_of(part: Part, under: str | None = None) -> Leaves:
    """All leaves; with ``under`` only those in there, by the rest of their names.

    ``TypeError`` and ``ValueError`` name what safetensors has no room for.
    """
    try:
        skeleton = parse(part.skeleton)
        found = list(_named(skeleton, under))
    except ValueError as exc:
        raise CheckpointDamagedError(str(exc)) from exc
    if under is not None and not found:
        raise KeyError(f"the state has nothing under {under!r}")
    names = Counter(name for name, _ in found)
    twice = next((name for name, count in names.items() if count > 1), None)
    if twice is not None or METADATA in names:
        raise ValueError(
            f"two values of the state would both be called {twice or METADATA!r} in a safetensors "
            "file, where names are keys joined by dots: rename one"
        )
    tensors = [_tensor(name, node[1], skeleton, part) for name, node in found if _is_array(node)]
    values = {name: node for name, node in found if not _is_array(node)}
    return Leaves(tensors, values, _shared(tensors))


def _is_array(node: Any) -> bool:
    return type(node) is list and len(node) == 2 and node[0] == "array"


def _named(skeleton: Skeleton, under: str | None) -> Iterator[tuple[str, Any]]:
    nodes = skeleton.nodes
    prefix = "" if under is None else f"{under}."
    for node, (_, place, key) in zip(nodes, outline(nodes), strict=True):
        if type(node) is list and parts_of(node):
            continue
        name = _dotted(place, key)
        if name == under:
            yield name.rpartition(".")[2], node
        elif name.startswith(prefix):
            yield name.removeprefix(prefix), node


def _dotted(place: Place | None, key: Key) -> str:
    keys: list[str] = []
    while place is not None:
        keys.append(readable(key))
        key, place = place.key, place.parent
    return ".".join(reversed(keys)) or ROOT


def _tensor(name: str, number: Any, skeleton: Skeleton, part: Part) -> TensorLeaf:
    if type(number) is not int or not 0 <= number < len(skeleton.arrays):
        raise CheckpointDamagedError(f"{name!r:.80} is array {number!r:.40} of the state")
    entry = skeleton.arrays[number]
    dtype = _dtype_name(entry)
    if dtype not in NAMES:
        raise TypeError(
            f"{name!r} has elements of type {dtype}, which safetensors does not have: convert it "
            "before saving, or export another part of the state with under="
        )
    if entry.buffer is None:
        return TensorLeaf(name, number, dtype, entry, (0, 0))
    extent = part.extents[entry.buffer]
    leaf = TensorLeaf(name, number, dtype, entry, (extent.offset, extent.length))
    if leaf.plain and entry.offset + leaf.nbytes > extent.length:
        raise CheckpointDamagedError(f"{name!r:.80} does not fit its {extent.length} bytes")
    return leaf


def _dtype_name(entry: ArrayEntry) -> str:
    if LIBRARY[entry.kind] in {"numpy", "jax"}:
        dtype = decode_dtype(entry.dtype)
        return dtype.name if dtype.names is None and not dtype.shape else str(dtype)
    return str(entry.dtype)


def _swapped(entry: ArrayEntry) -> bool:
    return isinstance(entry.dtype, str) and entry.dtype.startswith(">")


def _numpy_dtype(name: str, size: int) -> np.dtype[Any]:
    """Numbers where they have to be computed with, else anything of that size."""
    return np.dtype(name if name in NUMPY else f"u{size}")


def _shared(tensors: list[TensorLeaf]) -> list[list[str]]:
    groups: dict[int, list[str]] = {}
    for leaf in tensors:
        if leaf.entry.buffer is not None:
            groups.setdefault(leaf.entry.buffer, []).append(leaf.name)
    return [names for names in groups.values() if len(names) > 1]
