"""Takes a state apart into its skeleton and the memory of its arrays."""

from __future__ import annotations

import enum
import io
import os
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, is_dataclass
from operator import attrgetter
from typing import Any, Protocol

from ..._buffers import collector_paused
from .buffers import Buffer, BytesBuffer, Key
from .skeleton import (
    ENCODERS,
    FORMAT,
    MAX_NODES,
    KeyPath,
    Node,
    encode_key,
    expression_of,
    library_module,
    library_of,
    name_of,
    to_base64,
)

INLINE_BYTES = 1024
"""Byte strings up to this size are written into the skeleton; longer ones are buffers."""

_LEAVE = ("leave",)


@dataclass(frozen=True, slots=True)
class Tree:
    """A state taken apart; it refers to the state's arrays and holds no copies."""

    skeleton: dict[str, Any]
    """Everything but the bytes, as plain JSON."""
    buffers: list[Buffer]
    """The memory of the arrays, in order of first use."""


class ArrayCollector(Protocol):
    """The arrays of one library in one state."""

    def entry(self, array: Any, position: int) -> dict[str, Any]:
        """Describe an array; ``TypeError`` or ``ValueError`` if it cannot be stored."""

    def buffers(self, entries: list[dict[str, Any]]) -> Iterable[Buffer]:
        """The memory to store; writes into ``entries`` where arrays lie that share it."""


def flatten(state: object) -> Tree:
    """Take a state apart without copying any array.

    Dicts, lists, tuples, sets, scalars and the arrays of torch, numpy and JAX are restored with
    their types, values and order, at any depth. A ``defaultdict`` is restored as a dict, a named
    tuple as a tuple, and a list that is used twice as two lists; an array that is used twice
    stays one, and arrays of torch or numpy that overlap in memory overlap again. Of a tensor,
    ``.grad`` is not stored; of a JAX array, neither its sharding nor that its type is weak.
    ``TypeError`` for what cannot be stored; ``ValueError`` for a cycle, or an array whose memory is
    elsewhere. Both name the place.
    """
    with collector_paused():
        return _Walk().run(state)


_Handler = Callable[[Any, "KeyPath | None", Key], Node]


class _Walk:
    """One pass over a state, in the order of its parts."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._arrays: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._values: list[Any] = []
        """Keeps the arrays alive, so that none gets the id of another."""
        self._nodes_by_id: dict[int, Node] = {}
        self._open: set[int] = set()
        self._todo: list[tuple[Any, KeyPath | None, Key]] = []
        self._collectors: dict[str, ArrayCollector] = {}
        self._byte_buffers: list[Buffer] = []
        self._long_bytes = self._array_handler(self._bytes_entry)
        self._handlers: dict[type, _Handler] = {
            **{kind: _scalar_handler(encoder) for kind, encoder in ENCODERS.items()},
            bytes: self._bytes,
            bytearray: self._bytes,
            dict: self._dict,
            defaultdict: self._dict,
            OrderedDict: self._dict,
            list: self._sequence,
            tuple: self._sequence,
            set: self._set,
            frozenset: self._set,
        }

    def run(self, state: object) -> Tree:
        todo, nodes, handlers = self._todo, self._nodes, self._handlers
        todo.append((state, None, None))
        while todo:
            value, path, key = todo.pop()
            if key is _LEAVE:
                self._open.remove(value)
                continue
            try:
                handler = handlers.get(type(value)) or self._add_handler(value)
                nodes.append(handler(value, path, key))
            except (TypeError, ValueError) as exc:
                kind = TypeError if isinstance(exc, TypeError) else ValueError
                raise kind(f"{expression_of(path, key)} {exc}") from exc
        return self._tree()

    def _add_handler(self, value: Any) -> _Handler:
        """Choose how values of a new type are stored."""
        kind = type(value)
        library = library_of(kind)
        if issubclass(kind, tuple) and hasattr(kind, "_fields"):
            handler: _Handler = self._sequence
        elif library is None:
            raise _unsupported(value)
        elif library_module(library).is_array(kind):
            if library not in self._collectors:
                self._collectors[library] = library_module(library).ArrayCollector()
            handler = self._array_handler(self._collectors[library].entry)
        else:
            handler = _scalar_handler(library_module(library).encode_value, optional=True)
        self._handlers[kind] = handler
        return handler

    def _array_handler(self, describe: Callable[[Any, int], dict[str, Any]]) -> _Handler:
        nodes_by_id, arrays = self._nodes_by_id, self._arrays
        names, values = self._names, self._values

        def handle(value: Any, path: KeyPath | None, key: Key) -> Node:
            node = nodes_by_id.get(id(value))
            if node is None:
                arrays.append(describe(value, len(arrays)))
                names.append(name_of(path, key))
                values.append(value)
                node = nodes_by_id[id(value)] = ["array", len(names) - 1]
            return node

        return handle

    def _bytes(self, value: bytes | bytearray, path: KeyPath | None, key: Key) -> Node:
        if len(value) <= INLINE_BYTES:
            return [type(value).__name__, to_base64(value)]
        return self._long_bytes(value, path, key)

    def _bytes_entry(self, value: bytes | bytearray, position: int) -> dict[str, Any]:
        self._byte_buffers.append(BytesBuffer(value, position))
        return {"kind": type(value).__name__, "dtype": "uint8", "shape": [len(value)]}

    def _enter(self, value: Collection[Any], parent: KeyPath | None, key: Key) -> KeyPath:
        if id(value) in self._open:
            raise ValueError("contains itself: a state must not have cycles")
        if len(self._nodes) + len(self._todo) + len(value) > MAX_NODES:
            raise ValueError(
                f"has more than {MAX_NODES:,} values: put long lists of numbers into arrays"
            )
        self._open.add(id(value))
        self._todo.append((id(value), None, _LEAVE))
        return KeyPath(parent, key)

    def _dict(self, value: dict[Any, Any], parent: KeyPath | None, key: Key) -> Node:
        path = self._enter(value, parent, key)
        kind, keys = "dict", _keys(value)
        if type(value) is OrderedDict:
            metadata = getattr(value, "_metadata", None)
            kind = "ordered dict" if metadata is None else "state dict"
            if metadata is not None:
                self._todo.append((metadata, path, "_metadata"))
        self._todo.extend([(item, path, key) for key, item in reversed(value.items())])
        return [kind, keys]

    def _sequence(
        self, value: list[Any] | tuple[Any, ...], parent: KeyPath | None, key: Key
    ) -> Node:
        path = self._enter(value, parent, key)
        last = len(value) - 1
        self._todo.extend([(item, path, last - i) for i, item in enumerate(reversed(value))])
        return ["list" if type(value) is list else "tuple", len(value)]

    def _set(self, value: set[Any] | frozenset[Any], parent: KeyPath | None, key: Key) -> Node:
        return [type(value).__name__, sorted(_keys(value), key=repr)]

    def _tree(self) -> Tree:
        arrays, buffers = self._arrays, self._byte_buffers
        for collector in self._collectors.values():
            buffers.extend(collector.buffers(arrays))
        buffers.sort(key=attrgetter("position"))
        taken: set[str] = set()
        for number, buffer in enumerate(buffers):
            arrays[buffer.position]["buffer"] = number
            for position, _ in buffer.others:
                arrays[position]["buffer"] = number
            buffer.key = _unique(self._names[buffer.position], taken)
            taken.add(buffer.key)
        skeleton = {
            "format": FORMAT,
            "nodes": self._nodes,
            "arrays": arrays,
            "buffers": [{"key": b.key, "nbytes": b.nbytes, "dtype": b.dtype} for b in buffers],
        }
        return Tree(skeleton, buffers)


def _scalar_handler(encoder: Callable[[Any], Node], *, optional: bool = False) -> _Handler:
    """Store values in the skeleton; an ``optional`` encoder returns None for what it cannot."""

    def handle(value: Any, path: KeyPath | None, key: Key) -> Node:
        node = encoder(value)
        if optional and node is None:
            raise _unsupported(value)
        return node

    return handle


def _keys(value: Iterable[Any]) -> list[Node]:
    try:
        return [key if type(key) is str and key.isascii() else encode_key(key) for key in value]
    except TypeError as exc:
        raise TypeError(
            f"has the key {exc}: keys and elements of sets must be strings, numbers, None, bytes "
            "or tuples of these"
        ) from None


def _unique(name: str, taken: set[str]) -> str:
    """A name that no other has: keys that differ in type only read alike."""
    unique, number = name, 1
    while unique in taken:
        number += 1
        unique = f"{name}#{number}"
    return unique


_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_REMEDIES: list[tuple[type | tuple[type, ...], str, str]] = [
    (type, "a class", "save its name, or what makes its instances"),
    (_FUNCTIONS, "a function", "leave it out"),
    (types.ModuleType, "a module", "leave it out"),
    (enum.Enum, "a member of an enumeration", "save its .value"),
    (os.PathLike, "a path", "save str(path)"),
    (io.IOBase, "a file", "save its content as bytes"),
    (memoryview, "a memoryview", "save bytes(view) or an array"),
    (types.GeneratorType, "a generator", "save list(generator)"),
    (dict, "a subclass of dict", "save dict(value)"),
    (list, "a subclass of list", "save list(value)"),
    (tuple, "a subclass of tuple", "save tuple(value)"),
    (
        (str, bytes, bytearray, int, float, complex),
        "an instance of a subclass of a builtin type",
        "convert it to the builtin",
    ),
]


def _unsupported(value: Any) -> TypeError:
    """The error for a value of a type that cannot be stored."""
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    for types_, what, remedy in _REMEDIES:
        if isinstance(value, types_):
            return TypeError(f"is {what} ({name}): {remedy}")
    if is_dataclass(value):
        return TypeError(f"is a dataclass ({name}): save dataclasses.asdict(value)")
    if callable(getattr(value, "state_dict", None)):
        return TypeError(f"is a {name}: save its .state_dict()")
    return TypeError(
        f"is a {name}: save it as dicts, lists, numbers, strings, bytes and arrays "
        "(checkpoints are never pickled)"
    )
