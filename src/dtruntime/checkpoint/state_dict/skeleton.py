"""The skeleton of a tree: everything but the bytes, as JSON.

``{"format": 1, "nodes": [...], "arrays": [...], "buffers": [...]}``. The nodes are the tree in
the order in which one would write it down, a container before its parts: ``["dict", [keys]]``,
``["list", 3]``. An array is ``["array", i]``, the i-th of the arrays, so that one that is used
twice is restored as one; it says in which buffer its bytes lie. A flat list, because JSON of
many levels exhausts the stack of whoever reads it.

A skeleton comes from disk and is not trusted: nothing in it names code, every number is checked
before memory is allocated, and whatever is wrong is a ``ValueError``.

Python values as JSON, exactly.

None, booleans, strings, finite floats and integers of 64 bits stand for themselves. What JSON
cannot say is a list that begins with its tag: ``["float", "7ff0000000000000"]`` is infinity by
its bits.
"""

from __future__ import annotations

import re
import struct
from binascii import Error as Base64Error
from binascii import a2b_base64, b2a_base64
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, lru_cache
from importlib import import_module
from math import isfinite, prod
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from msgspec import Meta, Struct, ValidationError, convert

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


Node = Any
"""A plain JSON value."""

PLAIN = frozenset({type(None), bool, int, float, str})
"""Types of JSON that stand for themselves."""

MAX_KEY_DEPTH = 16
"""How deep tuples may be nested in a key."""


def encode_int(value: int) -> Node:
    """Encode an integer of any size."""
    return value if -(1 << 63) <= value < 1 << 63 else ["int", f"{value:x}"]


def encode_float(value: float) -> Node:
    """Encode a float; the bits of those that are not finite are kept."""
    return value if isfinite(value) else ["float", struct.pack(">d", value).hex()]


def encode_complex(value: complex) -> Node:
    """Encode a complex number by its two parts."""
    return ["complex", encode_float(value.real), encode_float(value.imag)]


def encode_str(value: str) -> Node:
    """Encode a string, also one with lone surrogates."""
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError:
        return ["str", value.encode("utf-8", "surrogatepass").hex()]
    return value


def to_base64(value: bytes | bytearray) -> str:
    """Write bytes in JSON."""
    return b2a_base64(value, newline=False).decode()


def from_base64(text: str) -> bytes:
    """Read bytes from JSON."""
    try:
        return a2b_base64(text.encode("ascii"), strict_mode=True)
    except (UnicodeEncodeError, Base64Error) as exc:
        raise ValueError(f"not base64: {exc}") from exc


def encode_bytes(value: bytes) -> Node:
    """Encode bytes."""
    return ["bytes", to_base64(value)]


ENCODERS = {
    type(None): lambda value: value,
    bool: lambda value: value,
    int: encode_int,
    float: encode_float,
    complex: encode_complex,
    str: encode_str,
    bytes: encode_bytes,
}
"""How values of exactly these types are encoded."""


def encode_key(key: Key, depth: int = 0) -> Node:
    """Encode a dict's key or a set's element; ``TypeError`` when it is of no such type."""
    encoder = ENCODERS.get(type(key))
    if encoder is not None:
        return encoder(key)
    if type(key) is not tuple:
        raise TypeError(f"{type(key).__name__} {key!r:.80}")
    if depth == MAX_KEY_DEPTH:
        raise TypeError(f"tuple of more than {MAX_KEY_DEPTH} levels")
    return ["tuple", [encode_key(item, depth + 1) for item in key]]


def decode_key(node: Node, depth: int = 0) -> Key:
    """Read what `encode_key` wrote; ``ValueError`` for anything else."""
    match node:
        case ["tuple", list(items)] if len(node) == 2 and depth < MAX_KEY_DEPTH:
            return tuple(decode_key(item, depth + 1) for item in items)
    found: Key = decode_scalar(node)
    return found


def decode_scalar(node: Node) -> Any:
    """Read a value without parts; ``ValueError`` for anything else."""
    if type(node) in PLAIN:
        return node
    match node:
        case ["int", str(text)]:
            return int(text, 16)
        case ["float", str(text)] if len(text) == 16:
            return struct.unpack(">d", bytes.fromhex(text))[0]
        case ["complex", real, imag]:
            return complex(_decode_float(real), _decode_float(imag))
        case ["str", str(text)]:
            return bytes.fromhex(text).decode("utf-8", "surrogatepass")
        case ["bytes", str(text)]:
            return from_base64(text)
    raise ValueError(f"no value is written as {node!r:.80}")


def _decode_float(node: Node) -> float:
    value = decode_scalar(node)
    if type(value) is not float:
        raise ValueError(f"{node!r:.80} is not a float")
    return value


ROOT = "state"


class KeyPath:
    """A container within a state; the outermost one has no parent."""

    __slots__ = ("key", "parent", "prefix")

    def __init__(self, parent: KeyPath | None, key: Key) -> None:
        self.parent = parent
        self.key = key
        self.prefix = ""
        """What the names of its parts begin with, such as ``optimizer/state/``, once made."""

    def make_prefix(self) -> str:
        """Make the prefix; that of the outermost place is empty."""
        keys: list[str] = []
        place = self
        while place.parent is not None and not place.prefix:
            keys.append(f"{readable(place.key)}/")
            place = place.parent
        self.prefix = place.prefix + "".join(reversed(keys))
        return self.prefix


def name_of(place: KeyPath | None, key: Key) -> str:
    """The readable name of what lies in a place under a key: ``model/layer1.weight``."""
    if place is None:
        return ROOT
    prefix = place.prefix or place.make_prefix()
    return prefix + key if type(key) is str and key.isascii() else prefix + readable(key)


def path_of(place: KeyPath | None, key: Key) -> str:
    """The same as Python would write it: ``state['model']['layer1.weight']``."""
    keys = []
    while place is not None:
        keys.append(key)
        key = place.key
        place = place.parent
    return ROOT + "".join(f"[{item!r}]" for item in reversed(keys))


def readable(key: Key) -> str:
    """A key as a part of a name."""
    text = key if type(key) is str else str(key)
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


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
    return dtype_name(decode_dtype(entry.dtype))


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


def outline(nodes: list[Any]) -> Iterator[tuple[int, KeyPath | None, Key]]:
    """Go through the nodes, each with the container that it lies in and its key there."""
    containers: list[tuple[KeyPath | None, Iterator[Key]]] = [(None, iter([None]))]
    for position, node in enumerate(nodes):
        place, key = _next(containers)
        yield position, place, key
        parts = parts_of(node) if type(node) is list else None
        if parts is not None:
            containers.append((KeyPath(place, key), iter(parts)))


def _next(containers: list[tuple[KeyPath | None, Iterator[Key]]]) -> tuple[KeyPath | None, Key]:
    while containers:
        place, keys = containers[-1]
        key = next(keys, _END)
        if key is not _END:
            return place, key
        containers.pop()
    raise damaged("something follows its end")


_PLAIN = re.compile(r"[<>|][biufcSUVmM]\d{1,10}(\[\d{0,9}[A-Za-zμ]{1,7}\])?")
_ML_DTYPES = frozenset(
    {"bfloat16", "bcomplex32", "complex32", "int1", "int2", "int4", "uint1", "uint2", "uint4"}
    | {"float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "float8_e3m4", "float8_e4m3"}
    | {"float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"}
    | {"float8_e5m2fnuz", "float8_e8m0fnu"}
)
_MAX_DEPTH = 16
_MAX_NAME = 40


def encode_dtype(dtype: np.dtype[Any], depth: int = 0) -> str | dict[str, Any]:
    """Describe a type; ``TypeError`` when its elements are not of a fixed size in place."""
    if depth > _MAX_DEPTH:
        raise TypeError(f"has elements of more than {_MAX_DEPTH} levels")
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return {"base": encode_dtype(base, depth + 1), "shape": list(shape)}
    return _encode_plain(dtype) if dtype.names is None else _encode_structured(dtype, depth)


@lru_cache(maxsize=256)
def _encode_plain(dtype: np.dtype[Any]) -> str:
    if dtype.type.__module__ == "ml_dtypes" and dtype.name in _ML_DTYPES:
        return dtype.name
    if dtype.hasobject or dtype.kind not in "biufcSUVmM":
        raise TypeError(f"has elements of type {dtype}: only those of a fixed size can be stored")
    return dtype.str


def _encode_structured(dtype: np.dtype[Any], depth: int) -> dict[str, Any]:
    assert dtype.names is not None
    assert dtype.fields is not None
    fields = []
    for name in dtype.names:
        kind, offset, *title = dtype.fields[name]
        if not all(isinstance(text, str) for text in title):
            raise TypeError(f"has elements of type {dtype}: titles of fields must be strings")
        fields.append([name, encode_dtype(kind, depth + 1), offset, *title])
    found: dict[str, Any] = {"fields": fields, "itemsize": dtype.itemsize}
    return {**found, "aligned": True} if dtype.isalignedstruct else found


def decode_dtype(node: object) -> np.dtype[Any]:
    """Read what `encode_dtype` wrote; ``ValueError`` for anything else."""
    try:
        return _decode(node, 0)
    except (TypeError, OverflowError, SyntaxError, MemoryError) as exc:
        raise ValueError(f"{node!r:.80} is not a type of elements: {exc}") from exc


def _decode(node: Any, depth: int) -> np.dtype[Any]:
    match node:
        case str() if node in _ML_DTYPES:
            return _from_ml_dtypes(node)
        case str() if _PLAIN.fullmatch(node):
            return np.dtype(node)
        case {"base": base, "shape": list(shape)} if len(node) == 2 and depth < _MAX_DEPTH:
            return np.dtype((_decode(base, depth + 1), tuple(map(_size, shape))))
        case {"fields": list(fields), "itemsize": int(itemsize)} if depth < _MAX_DEPTH:
            aligned = node.get("aligned", False) is True
            return _structured(fields, itemsize, aligned, depth)
    raise ValueError(f"{node!r:.80} is not a type of elements")


def _structured(fields: list[Any], itemsize: int, aligned: bool, depth: int) -> np.dtype[Any]:
    found = [_field(field, depth) for field in fields]
    spec: Any = {
        "names": [name for name, _, _, _ in found],
        "formats": [kind for _, kind, _, _ in found],
        "offsets": [offset for _, _, offset, _ in found],
        "titles": [title for _, _, _, title in found],
        "itemsize": _size(itemsize),
    }
    dtype: np.dtype[Any] = np.dtype(spec, align=aligned)
    return dtype


def _field(node: Any, depth: int) -> tuple[str, np.dtype[Any], int, str | None]:
    match node:
        case [str(name), kind, offset]:
            return name, _decode(kind, depth + 1), _size(offset), None
        case [str(name), kind, offset, str(title)]:
            return name, _decode(kind, depth + 1), _size(offset), title
    raise ValueError(f"{node!r:.80} is not a field: a name, a type, an offset and maybe a title")


def _size(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise ValueError(f"{value!r:.80} is not a size")
    return value


def _from_ml_dtypes(name: str) -> np.dtype[Any]:
    try:
        import ml_dtypes
    except ImportError as exc:
        raise ModuleNotFoundError(
            f"the checkpoint has {name} arrays: install ml_dtypes to load them"
        ) from exc
    if not hasattr(ml_dtypes, name):
        raise ValueError(f"this version of ml_dtypes has no {name}: install a newer one")
    found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return found


@lru_cache(maxsize=256)
def dtype_name(dtype: np.dtype[Any]) -> str:
    """Name a type for people and for the choice of a compression."""
    return dtype.name if len(dtype.name) <= _MAX_NAME else f"{dtype.name[:_MAX_NAME]}…"


_LEAVES = {
    "torch": "torch_tensors",
    "numpy": "numpy_arrays",
    "jax": "jax_arrays",
}
_ALIASES = {"jaxlib": "jax", "ml_dtypes": "numpy"}


def library_of(kind: type) -> str | None:
    """Say whose type it is, or derives from."""
    for base in kind.__mro__:
        root = (base.__module__ or "").partition(".")[0]
        library = _ALIASES.get(root, root)
        if library in _LEAVES:
            return library
    return None


@cache
def leaves_of(library: str) -> Any:
    """The module that takes a library's values apart."""
    return import_module(f".{_LEAVES[library]}", __package__)


@cache
def landings_of(library: str) -> Any:
    """The module that restores them; ``ModuleNotFoundError`` when the library is not there."""
    try:
        return leaves_of(library)
    except ImportError as exc:
        raise ModuleNotFoundError(
            f"the checkpoint has values of {library}: install dtruntime[{library}] to load them"
        ) from exc
