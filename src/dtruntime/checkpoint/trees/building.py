"""From nodes to values, without recursion."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..state_dict.buffers import Key
from ..state_dict.numpy_arrays import decode_scalar as decode_numpy_scalar
from ..state_dict.numpy_dtypes import decode_dtype
from ..state_dict.skeleton import damaged, parts_of
from ..state_dict.supported_types import landings_of
from .scalars import PLAIN, Node, decode_key, decode_scalar, from_base64

Array = Callable[[int], Any]
"""Gives the value of the array of an index."""


_ARRAY = ["array"]


class _Container:
    """A container whose parts are not all there yet."""

    __slots__ = ("keys", "kind", "parts")

    def __init__(self, kind: str, keys: Sequence[Key]) -> None:
        self.kind = kind
        self.keys = keys
        self.parts: list[Any] = []

    def close(self) -> Any:
        if self.kind == "list":
            return self.parts
        if self.kind == "tuple":
            return tuple(self.parts)
        return self._close_dict()

    def _close_dict(self) -> dict[Key, Any]:
        found: dict[Key, Any] = {} if self.kind == "dict" else OrderedDict()
        metadata = self.parts.pop() if self.kind == "state dict" else None
        found.update(zip(self.keys, self.parts, strict=False))
        if len(found) != len(self.parts):
            raise damaged("a dict has a key twice")
        if metadata is not None:
            # What torch's load_state_dict looks for on the state dict of a module.
            found._metadata = metadata  # type: ignore[attr-defined]
        return found


def build(nodes: list[Node], start: int, array: Array) -> tuple[Any, int]:
    """Make the value that begins at a node, and say where the next begins.

    ``ValueError`` when the nodes are not what `flatten` writes.
    """
    containers: list[_Container] = []
    for position in range(start, len(nodes)):
        node = nodes[position]
        is_leaf = type(node) in PLAIN or (type(node) is list and node[:1] == _ARRAY)
        keys = None if is_leaf else parts_of(node)
        if keys:
            containers.append(_Container(node[0], keys))
            continue
        value = _leaf(node, array) if keys is None else _Container(node[0], keys).close()
        while containers:
            containers[-1].parts.append(value)
            if len(containers[-1].parts) < len(containers[-1].keys):
                break
            value = containers.pop().close()
        else:
            return value, position + 1
    raise damaged("it ends early")


def _leaf(node: Node, array: Array) -> Any:
    if type(node) in PLAIN:
        return node
    match node:
        case ["array", index] if type(index) is int:
            return array(index)
        case ["set", list(keys)]:
            return {decode_key(key) for key in keys}
        case ["frozenset", list(keys)]:
            return frozenset([decode_key(key) for key in keys])
        case ["bytearray", str(text)]:
            return bytearray(from_base64(text))
        case [str(tag), *_] if tag.startswith("numpy"):
            return _numpy_value(node)
        case [str(tag), *_] if tag.startswith("torch"):
            return _torch_value(node)
    return decode_scalar(node)


def _numpy_value(node: Node) -> Any:
    match node:
        case ["numpy", dtype, str(text)]:
            return decode_numpy_scalar(dtype, text)
        case ["numpy str", inner] if type(text := decode_scalar(inner)) is str:
            return np.str_(text)
        case ["numpy bytes", inner] if type(raw := decode_scalar(inner)) is bytes:
            return np.bytes_(raw)
        case ["numpy dtype", dtype]:
            return decode_dtype(dtype)
    raise damaged(f"{node!r:.80} is no value of numpy")


def _torch_value(node: Node) -> Any:
    match node:
        case ["torch size", list(lengths)]:
            return landings_of("torch").decode_size(lengths)
        case ["torch dtype", str(name)]:
            return landings_of("torch").decode_dtype(name)
        case ["torch device", str(name)]:
            return landings_of("torch").decode_device(name)
    raise damaged(f"{node!r:.80} is no value of torch")
