"""Files as Arrow wants them: mapped into memory where they are local, else by ranged reads."""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa

from ...storage import ByteSource, FileStat, byte_source

NEAR = 1024 * 1024
"""Ranges that are less than this apart are fetched together."""
READ_AHEAD = 64 * 1024


class RemoteFile(io.RawIOBase):
    """A seekable object that fetches what is read, unless it was loaded before."""

    def __init__(self, file: FileStat, source: ByteSource = byte_source) -> None:
        super().__init__()
        self._file = file
        self._source = source
        self._at = 0
        self._starts: list[int] = []
        self._loaded: list[bytes] = []

    def load(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Fetch each ``(offset, length)``, side by side, and keep it."""
        merged = _merged(ranges)
        loaded = [*zip(self._starts, self._loaded, strict=True)]
        fetched = self._source.read_ranges(self._file, merged)
        loaded += zip((offset for offset, _ in merged), fetched, strict=True)
        loaded.sort(key=lambda part: part[0])
        self._starts = [offset for offset, _ in loaded]
        self._loaded = [data for _, data in loaded]

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """The position."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move the position."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence]
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Read up to ``size`` bytes."""
        rest = max(0, self._file.size - self._at)
        size = rest if size < 0 else min(size, rest)
        data = self._held(self._at, size)
        self._at += size
        return data

    def _held(self, offset: int, size: int) -> bytes:
        number = bisect_right(self._starts, offset) - 1
        if number >= 0:
            data = self._loaded[number]
            begin = offset - self._starts[number]
            if begin + size <= len(data):
                return data[begin : begin + size]
        ahead = min(max(size, READ_AHEAD), self._file.size - offset)
        return self._source.read_range(self._file, offset, ahead)[:size]


@contextmanager
def arrow_source(
    file: FileStat, ranges: Sequence[tuple[int, int]] = (), source: ByteSource = byte_source
) -> Iterator[pa.NativeFile]:
    """Open a file for Arrow; ``ranges`` of an object are fetched first, side by side."""
    if not file.is_local:
        remote = RemoteFile(file, source)
        remote.load(ranges)
        yield pa.PythonFile(remote, mode="r")
        return
    byte_source.open_local(file).close()
    if file.size == 0:
        yield pa.BufferReader(b"")
        return
    with pa.memory_map(file.url) as mapped:
        yield mapped


def _merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for offset, length in sorted(ranges):
        if merged and offset - (merged[-1][0] + merged[-1][1]) < NEAR:
            begin = merged[-1][0]
            merged[-1] = begin, max(merged[-1][0] + merged[-1][1], offset + length) - begin
        else:
            merged.append((offset, length))
    return merged
