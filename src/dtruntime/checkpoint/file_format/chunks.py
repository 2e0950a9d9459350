"""How chunks are made smaller, and made whole again."""

from __future__ import annotations

import importlib
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import StorageError
from .manifest import Chunk, Pack, Part

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


PAGE = 4096
ALIGNMENT = 64
"""Every buffer begins at a multiple of this, so that arrays can be used where they lie."""
LARGE = 2**20
"""A buffer of this size has chunks of its own, so that it is told apart when it has not changed."""
CHUNK = 8 * 2**20
"""No chunk is larger."""
GROUP = 64 * 2**20
"""So many bytes are digested and handed to the storage together."""
FIRST_GROUP = 24 * 2**20
"""Fewer at the beginning, so that the storage soon has something to do: a part of an upload is 16
MiB, and a group may lack a chunk."""


@dataclass(frozen=True, slots=True)
class StreamLayout:
    """Where buffers lie, in the order given, and the stretches that make chunks."""

    offsets: tuple[int, ...]
    length: int
    bounds: tuple[int, ...]
    """Where chunks begin, and at the end the length."""

    def chunks(self) -> Iterator[tuple[int, int]]:
        """The start and end of each chunk."""
        return pairwise(self.bounds)


def lay_out(sizes: Sequence[int]) -> StreamLayout:
    """Place buffers one after the other; large ones begin on a page and with a chunk."""
    offsets = []
    bounds = [0]
    at = 0
    for size in sizes:
        large = size >= LARGE
        if large or (bounds[-1] < at and at + size - bounds[-1] > CHUNK):
            at = _aligned(at, PAGE)
            _cut(bounds, at)
        else:
            at = _aligned(at, ALIGNMENT)
        offsets.append(at)
        at += size
        if large:
            while at - bounds[-1] > CHUNK:
                _cut(bounds, bounds[-1] + CHUNK)
            at = _aligned(at, PAGE)
            _cut(bounds, at)
    _cut(bounds, at)
    return StreamLayout(tuple(offsets), at, tuple(bounds))


def packed(bounds: Sequence[int], size: int) -> Iterator[tuple[int, ...]]:
    """The bounds of as many whole chunks as fit ``size`` bytes, again and again."""
    some: list[int] = list(bounds[:1])
    for start, stop in pairwise(bounds):
        if len(some) > 1 and stop - some[0] > size:
            yield tuple(some)
            some = [start]
        some.append(stop)
    if len(some) > 1:
        yield tuple(some)


def grouped(bounds: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The bounds of the groups in a stretch of the stream; the stream's first one is small."""
    if bounds and bounds[0] == 0:
        for first in islice(packed(bounds, FIRST_GROUP), 1):
            yield first
            bounds = bounds[len(first) - 1 :]
    yield from packed(bounds, GROUP)


def _cut(bounds: list[int], at: int) -> None:
    if at > bounds[-1]:
        bounds.append(at)


def _aligned(at: int, to: int) -> int:
    return -(-at // to) * to


LIVE_SHARE = 0.5
"""A pack of which less than this is still used is not referred to any more, so that it can go."""
LONGEST_CHAIN = 8
"""So many differences may have to be applied to make a chunk."""


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A chunk and the pack that has it."""

    chunk: Chunk
    pack: Pack
    depth: int = 0
    """How many differences make it."""


class ChunkIndex:
    """The chunks of a committed checkpoint, by digest."""

    def __init__(self, parts: Iterable[Part] = ()) -> None:
        self._by_digest: dict[str, StoredChunk] = {}
        parts = list(parts)
        worn = _worn_packs(parts)
        for part in parts:
            bases = {chunk.digest: chunk for chunk in part.bases}
            for chunk in (*part.chunks, *part.bases):
                pack = part.packs[chunk.pack]
                depth = _depth(chunk, bases)
                if pack.file not in worn:
                    self._by_digest.setdefault(chunk.digest, StoredChunk(chunk, pack, depth))

    def __len__(self) -> int:
        return len(self._by_digest)

    def forget_missing(self, there: Mapping[str, int]) -> None:
        """Forget chunks whose pack is not there any more, or not as long as it was."""
        self._by_digest = {
            digest: stored
            for digest, stored in self._by_digest.items()
            if there.get(stored.pack.file) == stored.pack.size
        }

    def forget(self, is_damaged: Callable[[str], bool]) -> None:
        """Forget chunks whose pack was found to be damaged."""
        packs = {stored.pack.file for stored in self._by_digest.values()}
        damaged = {file for file in packs if is_damaged(file)}
        self._by_digest = {
            digest: stored
            for digest, stored in self._by_digest.items()
            if stored.pack.file not in damaged
        }

    def find(self, digest: str, length: int) -> StoredChunk | None:
        """Where a chunk is stored."""
        stored = self._by_digest.get(digest)
        return stored if stored is not None and stored.chunk.length == length else None

    def with_bases(self, stored: StoredChunk) -> list[StoredChunk] | None:
        """A chunk and everything it is a difference from; none when something is missing."""
        found = [stored]
        while found[-1].chunk.base:
            base = self._by_digest.get(found[-1].chunk.base)
            if base is None or len(found) > LONGEST_CHAIN:
                return None
            found.append(base)
        return found


def _depth(chunk: Chunk, bases: Mapping[str, Chunk]) -> int:
    depth = 0
    while chunk.base and chunk.base in bases:
        chunk, depth = bases[chunk.base], depth + 1
    return depth


def _worn_packs(parts: Iterable[Part]) -> set[str]:
    """Packs of which little is used."""
    used: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for part in parts:
        for pack in part.packs:
            sizes[pack.file] = pack.size
        places = {(c.pack, c.position, c.stored) for c in (*part.chunks, *part.bases)}
        for number, _, stored in places:
            file = part.packs[number].file
            used[file] = used.get(file, 0) + stored
    return {file for file, size in sizes.items() if used.get(file, 0) < LIVE_SHARE * size}
