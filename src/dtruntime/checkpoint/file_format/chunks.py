"""How chunks are made smaller, and made whole again."""

from __future__ import annotations

import importlib
import threading
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import StorageError

COMPRESSIONS = ("none", "gzip", "zstd")
WORTH_IT = 0.9
"""A chunk is stored as it is unless it gets smaller than this part of it."""
TRIAL = 64 * 1024
"""So much of a chunk is tried first; the rest is spared if that does not pay."""
_GZIP_LEVEL, _ZSTD_LEVEL = 1, 1
MOST_BYTES = 64 * 2**20
"""No chunk was ever written that is larger, nor takes more than that."""

Bytes = bytes | memoryview
Encode = Callable[[Bytes], bytes]


class Compressor:
    """Compresses chunks by one method, where it pays. It may be shared by threads."""

    def __init__(self, method: str = "none") -> None:
        if method not in COMPRESSIONS:
            raise ValueError(
                f"compression must be one of {', '.join(COMPRESSIONS)}, not {method!r}"
            )
        self.method = method
        self._encode = None if method == "none" else _encoder(method)

    def encode(self, data: memoryview) -> tuple[str, Bytes]:
        """The chunk as it is to be stored, and the codec that it is stored by."""
        if self._encode is None or not data.nbytes:
            return "", data
        if data.nbytes > 4 * TRIAL:
            middle = data.nbytes // 2
            trial = data[middle : middle + TRIAL]
            if len(self._encode(trial)) > WORTH_IT * TRIAL:
                return "", data
        encoded = self._encode(data)
        return (self.method, encoded) if len(encoded) < WORTH_IT * data.nbytes else ("", data)


def decode(codec: str, data: Bytes, length: int) -> Bytes:
    """A chunk's ``length`` bytes; ``StorageError`` when they cannot be made of ``data``."""
    if codec == "":
        return data
    if length > MOST_BYTES:
        raise StorageError(f"a chunk of {length} bytes is larger than any that was ever written")
    if codec == "gzip":
        return _inflate(data, length)
    if codec in ("zstd", "delta"):
        return _unzstd(data, length)
    raise StorageError(f"the chunk is stored by {codec!r}, which this version does not know")


def difference(new: memoryview, old: Bytes, width: int) -> bytes | None:
    """What makes ``new`` of ``old``, both of elements of ``width`` bytes; none if it does not pay.

    The bits that differ, with the elements' first bytes together, then their second ones and so
    on: the high bytes of numbers that changed a little are nearly all zero.
    """
    mixed = np.frombuffer(new, np.uint8) ^ np.frombuffer(old, np.uint8)
    encoded = _encoder("zstd")(_planes(mixed, width).data)
    return encoded if len(encoded) < WORTH_IT * new.nbytes else None


def apply_difference(encoded: Bytes, old: Bytes, width: int, length: int) -> bytes:
    """The chunk that `difference` was made for."""
    planes = np.frombuffer(decode("delta", encoded, length), np.uint8)
    if len(old) != length:
        raise StorageError(f"a difference of {length} bytes does not fit a base of {len(old)}")
    whole = length // width * width
    mixed = np.empty(length, np.uint8)
    mixed[:whole] = planes[:whole].reshape(width, -1).T.ravel()
    mixed[whole:] = planes[whole:]
    return (mixed ^ np.frombuffer(old, np.uint8)).tobytes()


def _planes(data: NDArray[np.uint8], width: int) -> NDArray[np.uint8]:
    whole = len(data) // width * width
    return np.concatenate((data[:whole].reshape(-1, width).T.ravel(), data[whole:]))


_local = threading.local()


def _encoder(method: str) -> Encode:
    if method == "gzip":
        return lambda data: zlib.compress(data, _GZIP_LEVEL, wbits=31)
    _zstandard()

    def encode(data: Bytes) -> bytes:
        # A compressor belongs to one thread at a time.
        compressor = getattr(_local, "compressor", None)
        if compressor is None:
            compressor = _local.compressor = _zstandard().ZstdCompressor(level=_ZSTD_LEVEL)
        encoded: bytes = compressor.compress(data)
        return encoded

    return encode


def _inflate(data: Bytes, length: int) -> bytes:
    inflater = zlib.decompressobj(wbits=31)
    try:
        whole = inflater.decompress(data, length + 1)
    except zlib.error as exc:
        raise StorageError(f"the chunk cannot be decompressed: {exc}") from exc
    if not inflater.eof:
        raise StorageError("the chunk cannot be decompressed: its end is missing")
    return _checked(whole, length)


def _unzstd(data: Bytes, length: int) -> bytes:
    library = _zstandard()
    try:
        whole = library.ZstdDecompressor().decompress(data, max_output_size=length)
    except library.ZstdError as exc:
        raise StorageError(f"the chunk cannot be decompressed: {exc}") from exc
    return _checked(whole, length)


def _checked(data: bytes, length: int) -> bytes:
    if len(data) != length:
        raise StorageError(f"the chunk decompresses to {len(data)} bytes, not {length}")
    return data


def _zstandard() -> Any:
    try:
        return importlib.import_module("zstandard")
    except ImportError as exc:
        raise StorageError(
            "compression by zstd needs the zstandard package: pip install 'dtruntime[zstd]', or "
            "use compression='gzip'"
        ) from exc
