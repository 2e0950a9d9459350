"""Taking a state apart: what describes it, and the memory of its arrays."""

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
    leaves_of,
    library_of,
    name_of,
    path_of,
    to_base64,
)

INLINE_BYTES = 1024
"""Bytes up to this size are written into the skeleton, longer ones are buffers."""

_LEAVE = ("leave",)


@dataclass(frozen=True, slots=True)
class Tree:
    """A state taken apart; it refers to the state's arrays and holds no copies."""

    skeleton: dict[str, Any]
    """Everything but the bytes, as plain JSON."""
    buffers: list[Buffer]
    """The memory of the arrays, in the order of first use."""


class Leaves(Protocol):
    """The arrays of one library in one state."""

    def entry(self, array: Any, position: int) -> dict[str, Any]:
        """Describe an array; ``TypeError`` or ``ValueError`` when it cannot be stored."""

    def buffers(self, entries: list[dict[str, Any]]) -> Iterable[Buffer]:
        """Say which memory has to be stored, and write into entries what several share."""


def flatten(state: object) -> Tree:
    """Take a state apart without copying any array.

    Dicts, lists, tuples, sets, scalars and the arrays of torch, numpy and JAX are restored with
    their types, values and order, at any depth. A ``defaultdict`` is restored as a dict, a named
    tuple as a tuple, and a list that is used twice as two lists; an array that is used twice
    stays one, and arrays of torch or numpy that overlap in memory overlap again. Of a tensor,
    ``.grad`` is not stored; of a JAX array, neither how it was sharded nor that its type is weak.
    What cannot be stored is a ``TypeError``; a cycle, or an array whose memory is not here, a
    ``ValueError``. Both name the place.
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
        self._known: dict[int, Node] = {}
        self._open: set[int] = set()
        self._todo: list[tuple[Any, KeyPath | None, Key]] = []
        self._leaves: dict[str, Leaves] = {}
        self._long_bytes: list[Buffer] = []
        self._handlers: dict[type, _Handler] = {
            **{kind: _scalar(encoder) for kind, encoder in ENCODERS.items()},
            bytes: self._bytes,
            bytearray: self._bytes,
            dict: self._dict,
            defaultdict: self._dict,
            OrderedDict: self._ordered_dict,
            list: self._sequence,
            tuple: self._sequence,
            set: self._set,
            frozenset: self._set,
        }

    def run(self, state: object) -> Tree:
        todo, nodes, handlers = self._todo, self._nodes, self._handlers
        todo.append((state, None, None))
        while todo:
            value, place, key = todo.pop()
            if key is _LEAVE:
                self._open.remove(value)
                continue
            try:
                handler = handlers.get(type(value)) or self._learn(value)
                nodes.append(handler(value, place, key))
            except (TypeError, ValueError) as exc:
                raise refusal(path_of(place, key), exc) from exc
        return self._tree()

    def _learn(self, value: Any) -> _Handler:
        """Find out how values of a type are stored, once."""
        kind = type(value)
        if issubclass(kind, tuple) and hasattr(kind, "_fields"):
            handler: _Handler = self._sequence
        else:
            library = library_of(kind)
            if library is None:
                raise unsupported(value)
            home = leaves_of(library)
            is_array = home.is_array(kind)
            handler = self._keeping(library) if is_array else _library_value(home.encode_value)
        self._handlers[kind] = handler
        return handler

    def _keeping(self, library: str) -> _Handler:
        """Handle a library's arrays."""
        leaves = self._leaves.get(library)
        if leaves is None:
            leaves = self._leaves[library] = leaves_of(library).Leaves()
        describe, known = leaves.entry, self._known
        arrays, names, values = self._arrays, self._names, self._values

        def handle(value: Any, place: KeyPath | None, key: Key) -> Node:
            node = known.get(id(value))
            if node is None:
                arrays.append(describe(value, len(arrays)))
                names.append(name_of(place, key))
                values.append(value)
                node = known[id(value)] = ["array", len(names) - 1]
            return node

        return handle

    def _bytes(self, value: bytes | bytearray, place: KeyPath | None, key: Key) -> Node:
        if len(value) <= INLINE_BYTES:
            return [type(value).__name__, to_base64(value)]
        node = self._known.get(id(value))
        if node is None:
            position = len(self._arrays)
            self._arrays.append(
                {"kind": type(value).__name__, "dtype": "uint8", "shape": [len(value)]}
            )
            self._names.append(name_of(place, key))
            self._values.append(value)
            self._long_bytes.append(BytesBuffer(value, position))
            node = self._known[id(value)] = ["array", position]
        return node

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
        place = self._enter(value, parent, key)
        keys = _keys(value)
        self._todo.extend([(item, place, key) for key, item in reversed(value.items())])
        return ["dict", keys]

    def _ordered_dict(self, value: OrderedDict[Any, Any], parent: KeyPath | None, key: Key) -> Node:
        place = self._enter(value, parent, key)
        metadata = getattr(value, "_metadata", None)
        if metadata is not None:
            self._todo.append((metadata, place, "_metadata"))
        self._todo.extend([(item, place, key) for key, item in reversed(value.items())])
        return ["ordered dict" if metadata is None else "state dict", _keys(value)]

    def _sequence(
        self, value: list[Any] | tuple[Any, ...], parent: KeyPath | None, key: Key
    ) -> Node:
        place = self._enter(value, parent, key)
        last = len(value) - 1
        self._todo.extend([(item, place, last - i) for i, item in enumerate(reversed(value))])
        return ["list" if type(value) is list else "tuple", len(value)]

    def _set(self, value: set[Any] | frozenset[Any], parent: KeyPath | None, key: Key) -> Node:
        return [type(value).__name__, sorted(_keys(value), key=repr)]

    def _tree(self) -> Tree:
        buffers = list(self._long_bytes)
        for leaves in self._leaves.values():
            buffers.extend(leaves.buffers(self._arrays))
        buffers.sort(key=attrgetter("position"))
        arrays, names = self._arrays, self._names
        taken: set[str] = set()
        for number, buffer in enumerate(buffers):
            arrays[buffer.position]["buffer"] = number
            for position, _ in buffer.others:
                arrays[position]["buffer"] = number
            name = names[buffer.position]
            buffer.key = name if name not in taken else _unlike(name, taken)
            taken.add(buffer.key)
        skeleton = {
            "format": FORMAT,
            "nodes": self._nodes,
            "arrays": arrays,
            "buffers": [{"key": b.key, "nbytes": b.nbytes, "dtype": b.dtype} for b in buffers],
        }
        return Tree(skeleton, buffers)


def _scalar(encoder: Callable[[Any], Node]) -> _Handler:
    return lambda value, place, key: encoder(value)


def _library_value(encoder: Callable[[Any], Node]) -> _Handler:
    def handle(value: Any, place: KeyPath | None, key: Key) -> Node:
        node = encoder(value)
        if node is None:
            raise unsupported(value)
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


def _unlike(name: str, taken: set[str]) -> str:
    """Tell names apart that differ in the type of a key only."""
    unique, number = name, 1
    while unique in taken:
        number += 1
        unique = f"{name}#{number}"
    return unique


_KINDS: list[tuple[tuple[type, ...], str, str]] = [
    ((type,), "a class", "save its name, or what makes its instances"),
    (
        (types.FunctionType, types.BuiltinFunctionType, types.MethodType),
        "a function",
        "leave it out",
    ),
    ((types.ModuleType,), "a module", "leave it out"),
    ((enum.Enum,), "a member of an enumeration", "save its .value"),
    ((os.PathLike,), "a path", "save str(path)"),
    ((io.IOBase,), "a file", "save its content as bytes"),
    ((memoryview,), "a memoryview", "save bytes(view) or an array"),
    ((types.GeneratorType,), "a generator", "save list(generator)"),
    ((dict,), "a dict of its own type", "save dict(value)"),
    ((list,), "a list of its own type", "save list(value)"),
    ((tuple,), "a tuple of its own type", "save tuple(value)"),
    (
        (str, bytes, bytearray, int, float, complex),
        "of a type derived from a builtin",
        "convert it to the builtin",
    ),
]


def unsupported(value: Any) -> TypeError:
    """Make the error for a value of a type that is not stored."""
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    for types_, what, remedy in _KINDS:
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


def refusal(path: str, cause: TypeError | ValueError) -> TypeError | ValueError:
    """Put the place of a value before the reason."""
    kind = TypeError if isinstance(cause, TypeError) else ValueError
    return kind(f"{path} {cause}")
