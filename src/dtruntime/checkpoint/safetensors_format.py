"""Files of the safetensors format: the length of a header, the header in JSON, and the data.

The format is described at https://github.com/huggingface/safetensors; its library is not needed.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from ..errors import StorageError

METADATA = "__metadata__"
MOST_HEADER = 100_000_000
"""The format's own limit of a header."""
_MOST_DIMENSIONS = 64
_MOST_LENGTH = 1 << 48

NAMES = {
    "bool": "BOOL",
    "int8": "I8",
    "uint8": "U8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
}
"""The format's names of element types, by ours."""
SIZES = {
    name: 1 if name in ("BOOL", "U8", "I8") or name.startswith("F8") else int(name[-2:]) // 8
    for name in NAMES.values()
}
NUMPY = {name for name in NAMES if name != "bfloat16" and not name.startswith("float8")}
"""Types that numpy has without ml_dtypes."""
_OURS = {theirs: ours for ours, theirs in NAMES.items()}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor in a file."""

    name: str
    dtype: str
    """By our name."""
    shape: tuple[int, ...]
    start: int
    """Its first byte in the file."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """An open file with a valid header."""

    tensors: tuple[Tensor, ...]
    metadata: dict[str, str]
    memory: mmap.mmap | None
    """The memory-mapped file; None when it has no data."""


def header_of(
    tensors: Mapping[str, tuple[str, tuple[int, ...], int]], metadata: Mapping[str, str]
) -> bytes:
    """The header of a file, for tensors given by dtype, shape and size."""
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    at = 0
    for name, (dtype, shape, nbytes) in tensors.items():
        header[name] = {
            "dtype": NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [at, at + nbytes],
        }
        at += nbytes
    body = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    body += b" " * (-len(body) % 8)
    if len(body) > MOST_HEADER:
        raise ValueError(
            f"the header of the safetensors file would have {len(body):,} bytes, and the format "
            f"allows {MOST_HEADER:,}: export less of the state with under="
        )
    return struct.pack("<Q", len(body)) + body


def open_file(path: str | os.PathLike[str]) -> SafetensorsFile:
    """Open a file and validate its header; ``StorageError`` when it is invalid."""
    place = os.fspath(path)
    try:
        with open(place, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            header, begin = _read_header(file, size)
            opened = _parse(header, begin, size)
            memory = None
            if size > begin:
                memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except _Unsound as exc:
        raise StorageError(f"{place} is not a sound safetensors file: {exc}") from None
    except OSError as exc:
        raise StorageError(f"{place} cannot be read: {exc}") from exc
    return SafetensorsFile(opened[0], opened[1], memory)


class _Unsound(Exception):
    """A file is invalid."""


def _read_header(file: Any, size: int) -> tuple[bytes, int]:
    start = file.read(8)
    if len(start) < 8:
        raise _Unsound(f"it has {size} bytes")
    length = struct.unpack("<Q", start)[0]
    if length > min(size - 8, MOST_HEADER):
        raise _Unsound(f"its header would have {length:,} bytes, of {size:,} in the file")
    return file.read(length), 8 + length


def _parse(header: bytes, begin: int, size: int) -> tuple[tuple[Tensor, ...], dict[str, str]]:
    try:
        parsed = json.loads(header.decode(), object_pairs_hook=_unique)
    except RecursionError:
        raise _Unsound("its header is nested too deeply") from None
    except ValueError as exc:
        raise _Unsound(f"its header is not JSON: {exc}") from None
    if not isinstance(parsed, dict):
        raise _Unsound(f"its header is a {type(parsed).__name__}")
    metadata = parsed.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(type(v) is str for v in metadata.values()):
        raise _Unsound(f"{METADATA} must have strings only")
    tensors = sorted(
        (_tensor(name, entry, begin) for name, entry in parsed.items()),
        key=lambda tensor: (tensor.start, tensor.nbytes),
    )
    _check_cover(tensors, begin, size)
    return tuple(tensors), metadata


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _tensor(name: str, entry: Any, begin: int) -> Tensor:
    match entry:
        case {"dtype": str(theirs), "shape": list(shape), "data_offsets": [start, stop]} if (
            len(entry) == 3
        ):
            pass
        case _:
            raise _Unsound(f"{name!r:.80} is no tensor: {entry!r:.80}")
    if theirs not in _OURS:
        raise _Unsound(f"{name!r:.80} has elements of type {theirs!r:.40}, which is not supported")
    if len(shape) > _MOST_DIMENSIONS or not all(map(_is_length, [*shape, start, stop])):
        raise _Unsound(f"{name!r:.80} has the shape {shape!r:.80} at {[start, stop]!r:.80}")
    nbytes = prod(shape) * SIZES[theirs]
    if stop - start != nbytes:
        raise _Unsound(f"{name!r:.80} takes {nbytes} bytes, and lies at {start} to {stop}")
    return Tensor(name, _OURS[theirs], tuple(shape), begin + start, nbytes)


def _is_length(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST_LENGTH


def _check_cover(tensors: list[Tensor], begin: int, size: int) -> None:
    """Tensors must follow each other without gaps: nothing hides between them."""
    at = begin
    for tensor in tensors:
        if tensor.start != at:
            raise _Unsound(f"{tensor.name!r:.80} begins at byte {tensor.start}, not at {at}")
        at += tensor.nbytes
    if at != size:
        raise _Unsound(f"its tensors end at byte {at} of {size}")


def views_of(opened: SafetensorsFile) -> Iterator[tuple[Tensor, memoryview]]:
    """Every tensor with its bytes, a private copy: changes do not reach the file."""
    whole = memoryview(b"") if opened.memory is None else memoryview(opened.memory)
    for tensor in opened.tensors:
        yield tensor, whole[tensor.start : tensor.start + tensor.nbytes]
