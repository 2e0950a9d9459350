"""Compressed files: their content as a stream, or in memory while it is small."""

from __future__ import annotations

import io
import re
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa

from ...errors import ShardError
from ...storage import ByteSource, FileStat, data_files

CHUNK = 8 * 2**20
KEPT_BYTES = 256 * 2**20
_MAGIC = {
    "gzip": re.compile(rb"\x1f\x8b"),
    "bz2": re.compile(rb"BZh[1-9](1AY&SY|\x17\x72\x45\x38\x50\x90)"),
    "zstd": re.compile(rb"\x28\xb5\x2f\xfd"),
}


def compression_of(head: bytes) -> str:
    """The compression of a file, by its first bytes; empty when there is none."""
    return next((name for name, magic in _MAGIC.items() if magic.match(head)), "")


def may_be_zlib(head: bytes) -> bool:
    """Whether a file may be a zlib stream, which has no unique signature."""
    return len(head) > 1 and head[0] == 0x78 and int.from_bytes(head[:2], "big") % 31 == 0


def inflate(file: FileStat, compression: str, source: ByteSource) -> Iterator[bytes]:
    """Yield the decompressed content of a file; ``ShardError`` when it is cut off or corrupt."""
    with _corruption(file, compression):
        if compression == "zlib":
            yield from _inflate_zlib(source.stream(file))
            return
        chunks = io.BufferedReader(_Chunks(source.stream(file)), CHUNK)
        packed = pa.PythonFile(chunks, mode="r")
        with pa.CompressedInputStream(packed, compression) as inflated:
            while data := inflated.read(CHUNK):
                yield data


@contextmanager
def _corruption(file: FileStat, compression: str) -> Iterator[None]:
    try:
        yield
    except ShardError:
        raise
    except (OSError, EOFError, pa.ArrowException, zlib.error) as exc:
        raise ShardError(
            f"{file.url} cannot be decompressed as {compression} ({exc}): it is corrupt or cut "
            "off; write it again, or leave it out"
        ) from exc


def _inflate_zlib(chunks: Iterator[bytes]) -> Iterator[bytes]:
    machine = zlib.decompressobj()
    for data in chunks:
        while data and not machine.eof:
            yield machine.decompress(data, CHUNK)
            data = machine.unconsumed_tail
    yield machine.flush()
    if not machine.eof:
        raise EOFError("the stream ends early")


class _Chunks(io.RawIOBase):
    """A file object over chunks of bytes."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        super().__init__()
        self._chunks = chunks
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, target: memoryview) -> int:  # type: ignore[override]
        if not self._rest:
            self._rest = memoryview(next(self._chunks, b""))
        count = min(len(target), len(self._rest))
        target[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


class InflatedFiles:
    """Random access to the content of compressed files.

    Small content is cached; the least recently used is dropped first. Larger content is read as a
    stream that continues where the last read ended: reading backwards starts it again.
    """

    def __init__(self, kept_bytes: int = KEPT_BYTES, source: ByteSource = data_files) -> None:
        self._limit = kept_bytes
        self._source = source
        self._kept: OrderedDict[FileStat, bytes] = OrderedDict()
        self._stream: _Forward | None = None
        self._lock = threading.Lock()

    def read(
        self, file: FileStat, compression: str, offset: int, length: int, extent: int
    ) -> bytes:
        """Return ``length`` bytes from ``offset``; ``extent`` is where the last block ends."""
        with self._lock:
            if extent <= self._limit:
                data = self._whole(file, compression)
                return data[offset : offset + length]
            if self._stream is None or not self._stream.can_reach(file, offset):
                self._stream = _Forward(file, inflate(file, compression, self._source))
            return self._stream.read(offset, length)

    def _whole(self, file: FileStat, compression: str) -> bytes:
        data = self._kept.pop(file, None)
        if data is None:
            data = b"".join(inflate(file, compression, self._source))
        self._kept[file] = data
        while sum(map(len, self._kept.values())) > self._limit and len(self._kept) > 1:
            self._kept.popitem(last=False)
        return data


class _Forward:
    """A stream of bytes with a position."""

    def __init__(self, file: FileStat, chunks: Iterator[bytes]) -> None:
        self._file = file
        self._chunks = chunks
        self._data = b""
        self._at = 0

    def can_reach(self, file: FileStat, offset: int) -> bool:
        return file == self._file and offset >= self._at

    def read(self, offset: int, length: int) -> bytes:
        pieces: list[bytes] = []
        while length:
            if piece := self._data[offset - self._at :][:length]:
                pieces.append(piece)
                offset, length = offset + len(piece), length - len(piece)
                continue
            self._at += len(self._data)
            self._data = next(self._chunks, b"")
            if not self._data:
                raise ShardError(
                    f"{self._file.url} has less content than when it was indexed: index the "
                    "dataset again"
                )
        return b"".join(pieces)
