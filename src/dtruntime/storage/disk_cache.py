"""A cache on local disk for what is read from object stores."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..config import DatasetConfig
from ..telemetry import EventLog
from . import byte_source
from .cache_folder import HEADER_BYTES, CacheFolder, delete_entry, is_entry, key_of, taken
from .data_files import FileStat, absolute, is_remote

log = EventLog("storage.cache")

DEFAULT_LIMIT_BYTES = 64 * 2**30
REST_SECONDS = 60.0
"""After a failed write nothing is kept for so long."""


@dataclass(frozen=True, slots=True)
class CacheUsage:
    """What a cache holds, and how often this process found in it what it read."""

    bytes: int
    """How much of the disk is taken by what all processes together keep in the folder."""
    entries: int
    limit_bytes: int
    hits: int
    misses: int
    hit_bytes: int
    missed_bytes: int


@dataclass(slots=True)
class _Counts:
    hits: int = 0
    misses: int = 0
    hit_bytes: int = 0
    missed_bytes: int = 0


def default_folder() -> Path:
    """``$STRATA_CACHE_DIR/shards``, or ``~/.cache/strata/shards``."""
    root = os.environ.get("STRATA_CACHE_DIR")
    return Path(root).expanduser() / "shards" if root else Path.home() / ".cache/strata/shards"


class DiskCache:
    """Keeps ranges of objects on disk, so that they are fetched once; local files are not kept.

    A range is found again by the same offset and length of the same content: an object that
    changed is never mistaken for what it was. Entries are checked when they are read, and fetched
    again when they are damaged. When the limit is reached, the least recently used ones go.
    Nothing else in the folder is ever touched.

    Threads and processes may share a folder; a cache can be pickled and survives a fork. Where the
    folder cannot be used (full, read-only, gone) reading goes on without it, after one warning.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        limit_bytes: int = DEFAULT_LIMIT_BYTES,
    ) -> None:
        place = default_folder() if folder is None else folder
        if is_remote(place):
            raise ValueError(f"a cache lies on a local disk, not at {os.fspath(place)}")
        if limit_bytes < 0:
            raise ValueError(f"limit_bytes must be at least 0, which means off, not {limit_bytes}")
        self.folder = absolute(place)
        self.limit_bytes = limit_bytes
        self._kept = CacheFolder(self.folder)
        self._warned = False
        self._rests_until = 0.0
        self._counts = _Counts()

    @classmethod
    def configured(cls, config: DatasetConfig) -> DiskCache | None:
        """Return the cache that the configuration asks for; None when it asks for none."""
        if not config.cache_limit_bytes:
            return None
        return cls(config.cache_dir or None, config.cache_limit_bytes)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_counts": _Counts()}

    def __repr__(self) -> str:
        return f"DiskCache({self.folder!r}, limit_bytes={self.limit_bytes})"

    def read_range(self, file: FileStat, offset: int, length: int) -> bytes:
        """Return ``length`` bytes from ``offset`` on, as :func:`storage.read_range` does."""
        byte_source.check_range(file, offset, length)
        return self.read_ranges(file, [(offset, length)])[0]

    def read_ranges(self, file: FileStat, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of each ``(offset, length)``; missing ones are fetched side by side."""
        if file.is_local or not self.limit_bytes:
            return byte_source.read_ranges(file, ranges)
        held = {span: self._load(file, *span) for span in dict.fromkeys(ranges)}
        missing = [span for span, data in held.items() if data is None]
        for span, data in zip(missing, byte_source.read_ranges(file, missing), strict=True):
            self._keep(key_of(file, *span), data)
            held[span] = data
        return [held[span] or b"" for span in ranges]

    def stream(self, file: FileStat, chunk: int = byte_source.CHUNK) -> Iterator[bytes]:
        """Yield a file's bytes from first to last; chunks are kept like any other range."""
        if file.is_local or not self.limit_bytes:
            return byte_source.stream(file, chunk)
        return byte_source.read_ahead(file, chunk, self.read_range)

    def usage(self) -> CacheUsage:
        """Count what is in the folder, which takes a look at every entry."""
        found = [file for file in self._kept.scan() if is_entry(file.path)]
        return CacheUsage(
            bytes=sum(file.size for file in found),
            entries=sum(not file.partial for file in found),
            limit_bytes=self.limit_bytes,
            hits=self._counts.hits,
            misses=self._counts.misses,
            hit_bytes=self._counts.hit_bytes,
            missed_bytes=self._counts.missed_bytes,
        )

    def clear(self) -> None:
        """Delete all entries, but those that are just being written; ``OSError`` if it cannot."""
        for file in self._kept.scan():
            if file.may_go:
                delete_entry(file.path)

    def _load(self, file: FileStat, offset: int, length: int) -> bytes | None:
        if not length:
            return b""
        try:
            data = self._kept.load(key_of(file, offset, length), length)
        except OSError as exc:
            self._rest(exc)
            data = None
        if data is None:
            self._counts.misses += 1
            self._counts.missed_bytes += length
        else:
            self._counts.hits += 1
            self._counts.hit_bytes += length
        return data

    def _keep(self, key: bytes, data: bytes) -> None:
        size = taken(HEADER_BYTES + len(data))
        if size > self.limit_bytes or time.monotonic() < self._rests_until:
            return
        try:
            if self._kept.make_room(size, self.limit_bytes):
                self._kept.store(key, data)
        except OSError as exc:
            self._rest(exc)

    def _rest(self, error: OSError) -> None:
        """Keep nothing for a while: what failed once will mostly fail again at once."""
        self._rests_until = time.monotonic() + REST_SECONDS
        tell = log.debug if self._warned else log.warning
        self._warned = True
        tell(
            "cache.unusable",
            folder=self.folder,
            reason=str(error),
            remedy="data are read from the store meanwhile; make room or give permission there, "
            "choose another folder (cache_dir), or switch the cache off (cache_limit_bytes = 0)",
        )
