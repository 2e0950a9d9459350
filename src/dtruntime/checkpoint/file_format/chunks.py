"""Chunks: how a part's stream is cut into them, how they are compressed, and which exist already.

Buffers lie in the stream one after the other. A large buffer has chunks of its own, so that it is
recognised by its digests when it has not changed, and need not be stored again.
"""

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

PAGE = 4096
ALIGNMENT = 64
"""Every buffer begins at a multiple of this, so that arrays can be used where they lie."""
LARGE = 2**20
"""Buffers from this size on have chunks of their own."""
CHUNK = 8 * 2**20
"""The largest chunk that is written."""
GROUP = 64 * 2**20
"""How many bytes are digested and handed to the storage together."""
FIRST_GROUP = 24 * 2**20
"""The first group is smaller, so that the storage soon has something to do: a part of an upload is
16 MiB, and a group may lack a chunk."""

COMPRESSIONS = ("none", "gzip", "zstd")
WORTH_IT = 0.9
"""A chunk is stored uncompressed unless compression shrinks it to less than this share."""
TRIAL = 64 * 1024
"""How much of a chunk is compressed first; if that does not pay, the rest is left alone."""
_GZIP_LEVEL, _ZSTD_LEVEL = 1, 1
MOST_BYTES = 64 * 2**20
"""The largest chunk that is read: more than was ever written."""

LIVE_SHARE = 0.5
"""A pack of which less than this is in use is not referred to any more, so that it can go."""
LONGEST_CHAIN = 8
"""The most differences that have to be applied to make a chunk."""

Bytes = bytes | memoryview
Encode = Callable[[Bytes], bytes]


@dataclass(frozen=True, slots=True)
class StreamLayout:
    """Where buffers lie in a stream, in the order given, and where it is cut into chunks."""

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


def _cut(bounds: list[int], at: int) -> None:
    if at > bounds[-1]:
        bounds.append(at)


def _aligned(at: int, to: int) -> int:
    return -(-at // to) * to


def packed(bounds: Sequence[int], size: int) -> Iterator[tuple[int, ...]]:
    """Split chunks into runs of at most ``size`` bytes; yields the bounds of each run."""
    run: list[int] = list(bounds[:1])
    for start, stop in pairwise(bounds):
        if len(run) > 1 and stop - run[0] > size:
            yield tuple(run)
            run = [start]
        run.append(stop)
    if len(run) > 1:
        yield tuple(run)


def grouped(bounds: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Split chunks into groups; yields the bounds of each. The first of a stream is small."""
    if bounds and bounds[0] == 0:
        for first in islice(packed(bounds, FIRST_GROUP), 1):
            yield first
            bounds = bounds[len(first) - 1 :]
    yield from packed(bounds, GROUP)


class Compressor:
    """Compresses chunks by one method, where it pays. Threads may share it."""

    def __init__(self, method: str = "none") -> None:
        if method not in COMPRESSIONS:
            raise ValueError(
                f"compression must be one of {', '.join(COMPRESSIONS)}, not {method!r}"
            )
        self.method = method
        self._encode = None if method == "none" else _encoder(method)

    def encode(self, data: memoryview) -> tuple[str, Bytes]:
        """The codec that a chunk is stored by, and its bytes in that codec."""
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
    """A chunk's ``length`` bytes; ``StorageError`` if ``data`` does not decode to them."""
    if codec == "":
        return data
    if length > MOST_BYTES:
        raise StorageError(f"a chunk of {length} bytes is larger than any that was ever written")
    if codec == "gzip":
        decoded = _inflate(data, length)
    elif codec in ("zstd", "delta"):
        decoded = _unzstd(data, length)
    else:
        raise StorageError(f"the chunk is stored by {codec!r}, which this version does not know")
    if len(decoded) != length:
        raise StorageError(f"the chunk decompresses to {len(decoded)} bytes, not {length}")
    return decoded


def difference(new: memoryview, old: Bytes, width: int) -> bytes | None:
    """What turns ``old`` into ``new``, both of elements of ``width`` bytes; None if not worth it.

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
    return whole


def _unzstd(data: Bytes, length: int) -> bytes:
    library = _zstandard()
    try:
        whole: bytes = library.ZstdDecompressor().decompress(data, max_output_size=length)
    except library.ZstdError as exc:
        raise StorageError(f"the chunk cannot be decompressed: {exc}") from exc
    return whole


def _zstandard() -> Any:
    try:
        return importlib.import_module("zstandard")
    except ImportError as exc:
        raise StorageError(
            "compression by zstd needs the zstandard package: pip install 'dtruntime[zstd]', or "
            "use compression='gzip'"
        ) from exc


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A chunk, and the pack that it lies in."""

    chunk: Chunk
    pack: Pack
    depth: int = 0
    """How many differences have to be applied to make it."""


class ChunkIndex:
    """The chunks of a committed checkpoint by digest: they need not be stored again."""

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

    def forget_missing(self, sizes: Mapping[str, int]) -> None:
        """Forget chunks whose pack is gone, or has another size than it had."""
        self._keep(lambda pack: sizes.get(pack.file) == pack.size)

    def forget(self, is_damaged: Callable[[str], bool]) -> None:
        """Forget chunks whose pack was found to be damaged."""
        packs = {stored.pack.file for stored in self._by_digest.values()}
        damaged = {file for file in packs if is_damaged(file)}
        self._keep(lambda pack: pack.file not in damaged)

    def find(self, digest: str, length: int) -> StoredChunk | None:
        """Where a chunk is stored."""
        stored = self._by_digest.get(digest)
        return stored if stored is not None and stored.chunk.length == length else None

    def with_bases(self, stored: StoredChunk) -> list[StoredChunk] | None:
        """A chunk and all that it is a difference from; None if something is missing."""
        chain = [stored]
        while chain[-1].chunk.base:
            base = self._by_digest.get(chain[-1].chunk.base)
            if base is None or len(chain) > LONGEST_CHAIN:
                return None
            chain.append(base)
        return chain

    def _keep(self, is_usable: Callable[[Pack], bool]) -> None:
        items = self._by_digest.items()
        self._by_digest = {digest: stored for digest, stored in items if is_usable(stored.pack)}


def _depth(chunk: Chunk, bases: Mapping[str, Chunk]) -> int:
    depth = 0
    while chunk.base and chunk.base in bases:
        chunk, depth = bases[chunk.base], depth + 1
    return depth


def _worn_packs(parts: Iterable[Part]) -> set[str]:
    """Packs of which little is still in use."""
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
