"""The places of a skeleton's nodes: their names, and where each begins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ..state_dict.buffers import Key
from ..state_dict.numpy_dtypes import decode_dtype
from ..state_dict.numpy_dtypes import name_of as name_of_dtype
from ..state_dict.skeleton import LIBRARY, ArrayEntry, Skeleton, damaged, parse, parts_of
from .naming import Place, name_of

_END = ("end",)


class Described(NamedTuple):
    """One use of an array in a state."""

    key: str
    """Its name, such as ``model/layer1.weight``."""
    kind: str
    """``torch``, ``parameter``, ``numpy``, ``jax``, ``jax key``, ``bytes`` or ``bytearray``."""
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    """What its buffer takes, which it may share with others; 0 when it is empty."""
    buffer: int | None
    """Which buffer it lies in; None when it is empty."""


def describe(skeleton: Mapping[str, Any]) -> list[Described]:
    """List the arrays of a state in their order; needs neither torch nor JAX.

    ``ValueError`` when the skeleton is damaged.
    """
    found = parse(skeleton)
    return [
        _described(name_of(place, key), node[1], found)
        for node, (_, place, key) in zip(found.nodes, outline(found.nodes), strict=True)
        if type(node) is list and len(node) == 2 and node[0] == "array"
    ]


def _described(name: str, index: Any, skeleton: Skeleton) -> Described:
    if type(index) is not int or not 0 <= index < len(skeleton.arrays):
        raise damaged(f"it uses array {index!r:.40} of {len(skeleton.arrays)}")
    entry = skeleton.arrays[index]
    nbytes = 0 if entry.buffer is None else skeleton.buffers[entry.buffer].nbytes
    dtype = _dtype_name(entry)
    return Described(name, entry.kind, dtype, tuple(entry.shape), nbytes, entry.buffer)


def _dtype_name(entry: ArrayEntry) -> str:
    if LIBRARY[entry.kind] not in {"numpy", "jax"}:
        return str(entry.dtype)
    return name_of_dtype(decode_dtype(entry.dtype))


def starts_of(nodes: list[Any], keys: Iterable[str]) -> dict[str, int]:
    """Where the values of these names begin; ``KeyError`` when there is none of a name."""
    starts = dict.fromkeys(keys, -1)
    for position, place, key in outline(nodes):
        name = name_of(place, key)
        if starts.get(name, 0) > 0:
            raise ValueError(f"{name!r} names several values: keys of two types read alike")
        if name in starts and place is not None:
            starts[name] = position
    missing = [key for key, position in starts.items() if position < 0]
    if missing:
        tops = [
            name_of(place, key) for _, place, key in outline(nodes) if place and not place.parent
        ]
        raise KeyError(f"the checkpoint has no {missing[0]!r}: it has {', '.join(tops[:20])}")
    return starts


def outline(nodes: list[Any]) -> Iterator[tuple[int, Place | None, Key]]:
    """Go through the nodes, each with the container that it lies in and its key there."""
    containers: list[tuple[Place | None, Iterator[Key]]] = [(None, iter([None]))]
    for position, node in enumerate(nodes):
        place, key = _next(containers)
        yield position, place, key
        parts = parts_of(node) if type(node) is list else None
        if parts is not None:
            containers.append((Place(place, key), iter(parts)))


def _next(containers: list[tuple[Place | None, Iterator[Key]]]) -> tuple[Place | None, Key]:
    while containers:
        place, keys = containers[-1]
        key = next(keys, _END)
        if key is not _END:
            return place, key
        containers.pop()
    raise damaged("something follows its end")
