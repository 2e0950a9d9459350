"""The skeleton of a state: everything but the arrays' bytes, as JSON.

``{"format": 1, "nodes": [...], "arrays": [...], "buffers": [...]}``. The nodes are the state in
the order of writing, a container before its parts: ``["dict", [keys]]``, ``["list", 3]``. An array
is ``["array", i]``, the i-th of the arrays, so that one that is used twice is restored as one; its
entry says in which buffer its bytes lie. The list is flat because deeply nested JSON exhausts the
stack of its reader.

None, booleans, strings, finite floats and 64-bit integers stand for themselves. What JSON cannot
express is a list that begins with a tag: ``["float", "7ff0000000000000"]`` is infinity by its bits.

A numpy dtype is its string (``"<f4"``), one of ml_dtypes its name (``"bfloat16"``), a structured
one ``{"fields": [[name, type, offset], ...], "itemsize": n}`` with a title after the offset if a
field has one, and a field that is itself an array ``{"base": type, "shape": [...]}``. The metadata
of a dtype is not kept.

A skeleton is read from disk and not trusted: nothing in it names code, every number is checked
before memory is allocated, and whatever is wrong is a ``ValueError``.
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
"""The largest buffer: 16 TiB."""
MAX_NODES = 20_000_000
"""The most values of a state."""
MAX_KEY_DEPTH = 16
"""How deep tuples may be nested in a key."""
ROOT = "state"

Node = Any
"""A plain JSON value."""
PLAIN = frozenset({type(None), bool, int, float, str})
"""Types that stand for themselves in JSON."""

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
"""The library that an array belongs to, by its kind."""
_MODULES = {"torch": "torch_tensors", "numpy": "numpy_arrays", "jax": "jax_arrays"}
_ALIASES = {"jaxlib": "jax", "ml_dtypes": "numpy"}


class ArrayEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """One array of a state."""

    kind: Kind
    dtype: str | dict[str, Any]
    shape: Annotated[list[Count], Meta(max_length=64)]
    buffer: Count | None = None
    """None if it has no bytes."""
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
    """One buffer of a state."""

    key: str
    nbytes: Annotated[int, Meta(ge=1, le=MAX_BYTES)]
    dtype: str


class Skeleton(Struct, frozen=True, forbid_unknown_fields=True):
    """The parsed JSON, of which only the form is checked."""

    format: int
    nodes: Annotated[list[Any], Meta(min_length=1)]
    arrays: list[ArrayEntry]
    buffers: list[BufferEntry]


def parse(skeleton: Mapping[str, Any]) -> Skeleton:
    """Read a skeleton; ``ValueError`` if it does not have the form of one."""
    if not isinstance(skeleton, Mapping):
        raise damaged(f"it is a {type(skeleton).__name__}")
    if skeleton.get("format") != FORMAT:
        raise ValueError(
            f"this version reads format {FORMAT} of state dicts, not "
            f"{skeleton.get('format')!r:.40}: update Strata"
        )
    try:
        parsed = convert(skeleton, Skeleton)
    except (ValidationError, OverflowError) as exc:
        raise damaged(str(exc)) from exc
    for array in parsed.arrays:
        if prod(max(length, 1) for length in array.shape) > MAX_BYTES:
            raise damaged(f"an array has the shape {array.shape}")
        if array.strides is not None and len(array.strides) != len(array.shape):
            raise damaged(f"an array has the shape {array.shape}, strides {array.strides}")
        if array.buffer is not None and array.buffer >= len(parsed.buffers):
            raise damaged(f"an array lies in buffer {array.buffer} of {len(parsed.buffers)}")
    return parsed


def damaged(what: str) -> ValueError:
    """The error for a skeleton that `flatten` cannot have written."""
    return ValueError(f"the description of the state dict is damaged: {what}")


def library_of(kind: type) -> str | None:
    """The library that a type, or a base of it, comes from."""
    for base in kind.__mro__:
        root = (base.__module__ or "").partition(".")[0]
        library = _ALIASES.get(root, root)
        if library in _MODULES:
            return library
    return None


@cache
def library_module(library: str) -> Any:
    """The module for a library's values, which imports the library.

    ``ModuleNotFoundError`` if that is not installed.
    """
    try:
        return import_module(f".{_MODULES[library]}", __package__)
    except ImportError as exc:
        raise ModuleNotFoundError(
            f"the checkpoint has values of {library}: install dtruntime[{library}] to load them"
        ) from exc


def encode_int(value: int) -> Node:
    """Encode an integer of any size."""
    return value if -(1 << 63) <= value < 1 << 63 else ["int", f"{value:x}"]


def encode_float(value: float) -> Node:
    """Encode a float, one that is not finite by its bits."""
    return value if isfinite(value) else ["float", struct.pack(">d", value).hex()]


def encode_str(value: str) -> Node:
    """Encode a string, which may have lone surrogates."""
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
    complex: lambda value: ["complex", encode_float(value.real), encode_float(value.imag)],
    str: encode_str,
    bytes: encode_bytes,
}
"""How values of exactly these types are encoded."""


def encode_key(key: Key, depth: int = 0) -> Node:
    """Encode a dict's key or a set's element; ``TypeError`` if its type is not supported."""
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
        case ["tuple", list(items)] if depth < MAX_KEY_DEPTH:
            return tuple(decode_key(item, depth + 1) for item in items)
    key: Key = decode_scalar(node)
    return key


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


_PLAIN_DTYPE = re.compile(r"[<>|][biufcSUVmM]\d{1,10}(\[\d{0,9}[A-Za-zμ]{1,7}\])?")
_ML_DTYPES = frozenset(
    {"bfloat16", "bcomplex32", "complex32", "int1", "int2", "int4", "uint1", "uint2", "uint4"}
    | {"float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "float8_e3m4", "float8_e4m3"}
    | {"float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"}
    | {"float8_e5m2fnuz", "float8_e8m0fnu"}
)
_MAX_DTYPE_DEPTH = 16
_MAX_DTYPE_NAME = 40


def encode_dtype(dtype: np.dtype[Any], depth: int = 0) -> str | dict[str, Any]:
    """Describe a numpy dtype; ``TypeError`` unless its elements are stored in place."""
    if depth > _MAX_DTYPE_DEPTH:
        raise TypeError(f"has elements of more than {_MAX_DTYPE_DEPTH} levels")
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
    node: dict[str, Any] = {"fields": fields, "itemsize": dtype.itemsize}
    return {**node, "aligned": True} if dtype.isalignedstruct else node


def decode_dtype(node: object) -> np.dtype[Any]:
    """Read what `encode_dtype` wrote; ``ValueError`` for anything else."""
    try:
        return _decode_dtype(node, 0)
    except (TypeError, OverflowError, SyntaxError, MemoryError) as exc:
        raise ValueError(f"{node!r:.80} is not a type of elements: {exc}") from exc


def _decode_dtype(node: Any, depth: int) -> np.dtype[Any]:
    match node:
        case str() if node in _ML_DTYPES:
            return _from_ml_dtypes(node)
        case str() if _PLAIN_DTYPE.fullmatch(node):
            return np.dtype(node)
        case {"base": base, "shape": list(shape)} if len(node) == 2 and depth < _MAX_DTYPE_DEPTH:
            return np.dtype((_decode_dtype(base, depth + 1), tuple(map(_size, shape))))
        case {"fields": list(fields), "itemsize": int(itemsize)} if depth < _MAX_DTYPE_DEPTH:
            decoded = [_decode_field(field, depth) for field in fields]
            names, formats, offsets, titles = zip(*decoded, strict=True) if decoded else [()] * 4
            spec: Any = {
                "names": list(names),
                "formats": list(formats),
                "offsets": list(offsets),
                "titles": list(titles),
                "itemsize": _size(itemsize),
            }
            dtype: np.dtype[Any] = np.dtype(spec, align=node.get("aligned", False) is True)
            return dtype
    raise ValueError(f"{node!r:.80} is not a type of elements")


def _decode_field(node: Any, depth: int) -> tuple[str, np.dtype[Any], int, str | None]:
    match node:
        case [str(name), kind, offset]:
            return name, _decode_dtype(kind, depth + 1), _size(offset), None
        case [str(name), kind, offset, str(title)]:
            return name, _decode_dtype(kind, depth + 1), _size(offset), title
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
    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return dtype


@lru_cache(maxsize=256)
def dtype_name(dtype: np.dtype[Any]) -> str:
    """The name of a dtype, for people and for the choice of a compression."""
    name = dtype.name
    return name if len(name) <= _MAX_DTYPE_NAME else f"{name[:_MAX_DTYPE_NAME]}…"


class KeyPath:
    """A container within a state; the outermost one has no parent."""

    __slots__ = ("key", "parent", "prefix")

    def __init__(self, parent: KeyPath | None, key: Key) -> None:
        self.parent = parent
        self.key = key
        self.prefix = ""
        """The beginning of its parts' names, such as ``optimizer/state/``; made when needed."""

    def make_prefix(self) -> str:
        """Make the prefix; that of the outermost container is empty."""
        keys: list[str] = []
        path = self
        while path.parent is not None and not path.prefix:
            keys.append(f"{readable(path.key)}/")
            path = path.parent
        self.prefix = path.prefix + "".join(reversed(keys))
        return self.prefix


def name_of(path: KeyPath | None, key: Key) -> str:
    """The readable name of the value under a key: ``model/layer1.weight``."""
    if path is None:
        return ROOT
    prefix = path.prefix or path.make_prefix()
    return prefix + key if type(key) is str and key.isascii() else prefix + readable(key)


def expression_of(path: KeyPath | None, key: Key) -> str:
    """The same as Python would write it: ``state['model']['layer1.weight']``."""
    keys = []
    while path is not None:
        keys.append(key)
        key, path = path.key, path.parent
    return ROOT + "".join(f"[{item!r}]" for item in reversed(keys))


def readable(key: Key) -> str:
    """A key as a part of a name."""
    text = key if type(key) is str else str(key)
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


class Described(NamedTuple):
    """One use of an array in a state."""

    key: str
    """Its name, such as ``model/layer1.weight``."""
    kind: str
    """``torch``, ``parameter``, ``numpy``, ``jax``, ``jax key``, ``bytes`` or ``bytearray``."""
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    """The size of its buffer, which it may share with others; 0 if it is empty."""
    buffer: int | None
    """The index of its buffer; None if it is empty."""


def describe(skeleton: Mapping[str, Any]) -> list[Described]:
    """List the arrays of a state in their order; needs neither torch nor JAX.

    ``ValueError`` if the skeleton is damaged.
    """
    parsed = parse(skeleton)
    return [
        _described(name_of(path, key), node[1], parsed)
        for node, (_, path, key) in zip(parsed.nodes, outline(parsed.nodes), strict=True)
        if type(node) is list and len(node) == 2 and node[0] == "array"
    ]


def _described(name: str, index: Any, skeleton: Skeleton) -> Described:
    if type(index) is not int or not 0 <= index < len(skeleton.arrays):
        raise damaged(f"it uses array {index!r:.40} of {len(skeleton.arrays)}")
    entry = skeleton.arrays[index]
    nbytes = 0 if entry.buffer is None else skeleton.buffers[entry.buffer].nbytes
    is_numpy = LIBRARY[entry.kind] in {"numpy", "jax"}
    dtype = dtype_name(decode_dtype(entry.dtype)) if is_numpy else str(entry.dtype)
    return Described(name, entry.kind, dtype, tuple(entry.shape), nbytes, entry.buffer)


def starts_of(nodes: list[Any], keys: Iterable[str]) -> dict[str, int]:
    """Where the values with these names begin; ``KeyError`` if there is none of a name."""
    starts = dict.fromkeys(keys, -1)
    for position, path, key in outline(nodes):
        name = name_of(path, key)
        if starts.get(name, 0) > 0:
            raise ValueError(f"{name!r} names several values: keys of two types read alike")
        if name in starts and path is not None:
            starts[name] = position
    missing = [key for key, position in starts.items() if position < 0]
    if missing:
        tops = [name_of(path, key) for _, path, key in outline(nodes) if path and not path.parent]
        raise KeyError(f"the checkpoint has no {missing[0]!r}: it has {', '.join(tops[:20])}")
    return starts


def outline(nodes: list[Any]) -> Iterator[tuple[int, KeyPath | None, Key]]:
    """Yield each node's position, the container that it lies in, and its key there."""
    containers: list[tuple[KeyPath | None, Iterator[Key]]] = [(None, iter([None]))]
    end: Key = ("end",)
    key: Key = None
    for position, node in enumerate(nodes):
        while containers and (key := next(containers[-1][1], end)) is end:
            containers.pop()
        if not containers:
            raise damaged("something follows its end")
        path = containers[-1][0]
        yield position, path, key
        parts = parts_of(node) if type(node) is list else None
        if parts is not None:
            containers.append((KeyPath(path, key), iter(parts)))


def parts_of(node: Node) -> list[Key] | range | None:
    """The keys of a container's parts; None if the node is not a container."""
    match node:
        case ["dict" | "ordered dict" | "state dict", list(nodes)]:
            keys = [decode_key(key) for key in nodes]
            return [*keys, "_metadata"] if node[0] == "state dict" else keys
        case ["list" | "tuple", int(length)] if type(length) is int and 0 <= length <= MAX_NODES:
            return range(length)
    return None
