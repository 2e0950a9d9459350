"""TFRecord files and Examples, made from the specifications and not by the code under test."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

Values = Sequence[bytes] | Sequence[float] | Sequence[int]

_POLYNOMIAL = 0x82F63B78


def _table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
        table.append(byte)
    return table


_TABLE = _table()


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def frame(record: bytes) -> bytes:
    length = struct.pack("<Q", len(record))
    return length + masked(length) + record + masked(record)


def write_records(path: Path, records: Iterable[bytes]) -> Path:
    path.write_bytes(b"".join(map(frame, records)))
    return path


def varint(value: int) -> bytes:
    value &= 2**64 - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def feature(kind: str, values: Values, *, packed: bool = True) -> bytes:
    """A Feature message; kind is "bytes", "float" or "int64"."""
    if kind == "bytes":
        return field(1, b"".join(field(1, bytes(value)) for value in values))  # type: ignore[arg-type]
    if kind == "float":
        encoded = [struct.pack("<f", value) for value in values]
        tag, number = varint(1 << 3 | 5), 2
    else:
        encoded = [varint(int(value)) for value in values]
        tag, number = varint(1 << 3 | 0), 3
    if packed:
        return field(number, field(1, b"".join(encoded)) if encoded else b"")
    return field(number, b"".join(tag + one for one in encoded))


def example(features: Mapping[str, tuple[str, Values]], *, packed: bool = True) -> bytes:
    entries = (
        field(1, field(1, name.encode()) + field(2, feature(kind, values, packed=packed)))
        for name, (kind, values) in features.items()
    )
    return field(1, b"".join(entries))
