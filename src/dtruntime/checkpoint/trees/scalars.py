"""Python values as JSON, exactly.

None, booleans, strings, finite floats and integers of 64 bits stand for themselves. What JSON
cannot say is a list that begins with its tag: ``["float", "7ff0000000000000"]`` is infinity by
its bits.
"""

from __future__ import annotations

import struct
from binascii import Error as Base64Error
from binascii import a2b_base64, b2a_base64
from math import isfinite
from typing import Any

from ..state_dict.buffers import Key

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
