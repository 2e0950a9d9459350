"""The skeleton of a tree: everything but the bytes, as JSON.

``{"format": 1, "nodes": [...], "arrays": [...], "buffers": [...]}``. The nodes are the tree in
the order in which one would write it down, a container before its parts: ``["dict", [keys]]``,
``["list", 3]``. An array is ``["array", i]``, the i-th of the arrays, so that one that is used
twice is restored as one; it says in which buffer its bytes lie. A flat list, because JSON of
many levels exhausts the stack of whoever reads it.

A skeleton comes from disk and is not trusted: nothing in it names code, every number is checked
before memory is allocated, and whatever is wrong is a ``ValueError``.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, ValidationError, convert

from ..trees.scalars import Node, decode_key
from .buffers import Key

FORMAT = 1
MAX_BYTES = 1 << 44
"""No buffer is larger: 16 TiB."""
MAX_NODES = 20_000_000
"""No tree has more values."""

Count = Annotated[int, Meta(ge=0, le=MAX_BYTES)]
Stride = Annotated[int, Meta(ge=-MAX_BYTES, le=MAX_BYTES)]
Kind = Literal["torch", "parameter", "numpy", "jax", "jax key", "bytes", "bytearray"]

LIBRARY: dict[str, str] = {
    "torch": "torch",
    "parameter": "torch",
    "numpy": "numpy",
    "jax": "jax",
    "jax key": "jax",
    "bytes": "python",
    "bytearray": "python",
}
"""Whose an array is, by its kind."""


class ArrayEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """One array of a tree."""

    kind: Kind
    dtype: str | dict[str, Any]
    shape: Annotated[list[Count], Meta(max_length=64)]
    buffer: Count | None = None
    """None when it has no bytes."""
    offset: Count = 0
    strides: Annotated[list[Stride], Meta(max_length=64)] | None = None
    """In bytes; None for C order."""
    device: str = "cpu"
    requires_grad: bool = False
    conj: bool = False
    neg: bool = False
    committed: bool = False
    impl: str | None = None


class BufferEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """One buffer of a tree."""

    key: str
    nbytes: Annotated[int, Meta(ge=1, le=MAX_BYTES)]
    dtype: str


class Skeleton(Struct, frozen=True, forbid_unknown_fields=True):
    """What the JSON says, checked for its form."""

    format: int
    nodes: Annotated[list[Any], Meta(min_length=1)]
    arrays: list[ArrayEntry]
    buffers: list[BufferEntry]


def parse(skeleton: Mapping[str, Any]) -> Skeleton:
    """Read a skeleton; ``ValueError`` when it has not the form of one."""
    if not isinstance(skeleton, Mapping):
        raise damaged(f"it is a {type(skeleton).__name__}")
    if skeleton.get("format") != FORMAT:
        raise ValueError(
            f"this version reads format {FORMAT} of state dicts, not "
            f"{skeleton.get('format')!r:.40}: update Strata"
        )
    try:
        found = convert(skeleton, Skeleton)
    except (ValidationError, OverflowError) as exc:
        raise damaged(str(exc)) from exc
    for array in found.arrays:
        if prod(max(length, 1) for length in array.shape) > MAX_BYTES:
            raise damaged(f"an array has the shape {array.shape}")
        if array.strides is not None and len(array.strides) != len(array.shape):
            raise damaged(f"an array has the shape {array.shape}, strides {array.strides}")
        if array.buffer is not None and array.buffer >= len(found.buffers):
            raise damaged(f"an array lies in buffer {array.buffer} of {len(found.buffers)}")
    return found


def damaged(what: str) -> ValueError:
    """Make the error of a skeleton that nobody wrote so."""
    return ValueError(f"the description of the state dict is damaged: {what}")


def parts_of(node: Node) -> list[Key] | range | None:
    """The keys of a container's parts; None when the node is no container."""
    match node:
        case ["dict" | "ordered dict" | "state dict", list(keys)] if len(node) == 2:
            found = [decode_key(key) for key in keys]
            return [*found, "_metadata"] if node[0] == "state dict" else found
        case ["list" | "tuple", int(length)] if type(length) is int and 0 <= length <= MAX_NODES:
            return range(length)
    return None
