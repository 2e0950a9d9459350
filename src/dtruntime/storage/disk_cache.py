"""A disk cache for data that is read from object stores.

``FOLDER/strata-shards-v1/`` has everything: ``tally``, whose length is the number of blocks in use,
and entries under ``00/`` to ``ff/``, each with its key and checksum in front. A file with another
name, or that does not begin as an entry does, is neither counted nor touched.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from ..config import DatasetConfig
from ..telemetry import EventLog
from . import data_files
from .data_files import FileStat
from .urls import absolute, is_remote

log = EventLog("storage.cache")

DEFAULT_LIMIT_BYTES = 64 * 2**30
REST_SECONDS = 60.0
"""How long nothing is cached after a failed write."""
LAYOUT = "strata-shards-v1"
PARTIAL_SECONDS = 600
"""A partial entry that has not grown for this long was left by a process that died."""
RECOUNT_SHARE = 20
"""A process that has written this part of the limit recounts, whatever the tally says."""
ROOM_SHARE = 10
"""Eviction makes room for this part of the limit, so that not every write has to evict."""
UNIT = 4096
"""Sizes are counted in blocks of the file system."""
MAGIC = b"STRATA-1"

_SHELF = re.compile(r"[0-9a-f]{2}")
_NAME = re.compile(r"[0-9a-f]{64}\.range(\.[0-9a-f]{16}\.partial)?")
_HEADER = struct.Struct("<8s32sQI")
HEADER_BYTES = _HEADER.size
# Neither follow a link nor wait for the writer of a pipe that lies where an entry should.
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_TALLY_MAGIC = b"STRATA-TALLY\n"
_TALLY_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@dataclass(frozen=True, slots=True)
class CacheUsage:
    """What a cache holds, and how often this process found there what it read."""

    bytes: int
    """The disk space that all processes together use in the folder."""
    entries: int
    limit_bytes: int
    hits: int
    misses: int
    hit_bytes: int
    missed_bytes: int


def default_folder() -> Path:
    """``$STRATA_CACHE_DIR/shards``, or ``~/.cache/strata/shards``."""
    root = os.environ.get("STRATA_CACHE_DIR")
    return Path(root).expanduser() / "shards" if root else Path.home() / ".cache/strata/shards"


class DiskCache:
    """Keeps ranges of objects on disk, so that they are fetched once; local files are not cached.

    A range is found again by the same offset and length of the same content: an object that
    changed is never mistaken for its former self. Entries are checked when they are read, and
    fetched again if they are damaged. When the limit is reached, the least recently used ones go.
    Nothing else in the folder is ever touched.

    Threads and processes may share a folder; a cache can be pickled and survives a fork. If the
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
        self._forget_counts()

    @classmethod
    def configured(cls, config: DatasetConfig) -> DiskCache | None:
        """Return the cache that the configuration asks for; None if it asks for none."""
        if not config.cache_limit_bytes:
            return None
        return cls(config.cache_dir or None, config.cache_limit_bytes)

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._forget_counts()

    def __repr__(self) -> str:
        return f"DiskCache({self.folder!r}, limit_bytes={self.limit_bytes})"

    def _forget_counts(self) -> None:
        self._hits = self._misses = self._hit_bytes = self._missed_bytes = 0

    def read_range(self, file: FileStat, offset: int, length: int) -> bytes:
        """Return ``length`` bytes from ``offset`` on, as :func:`storage.read_range` does."""
        data_files.check_range(file, offset, length)
        return self.read_ranges(file, [(offset, length)])[0]

    def read_ranges(self, file: FileStat, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of each ``(offset, length)``; missing ones are fetched in parallel."""
        if file.is_local or not self.limit_bytes:
            return data_files.read_ranges(file, ranges)
        held = {span: self._load(file, *span) for span in dict.fromkeys(ranges)}
        missing = [span for span, data in held.items() if data is None]
        for span, data in zip(missing, data_files.read_ranges(file, missing), strict=True):
            self._keep(key_of(file, *span), data)
            held[span] = data
        return [held[span] or b"" for span in ranges]

    def stream(self, file: FileStat, chunk: int = data_files.CHUNK) -> Iterator[bytes]:
        """Yield a file's bytes from first to last; chunks are cached like any other range."""
        if file.is_local or not self.limit_bytes:
            return data_files.stream(file, chunk)
        return data_files.read_ahead(file, chunk, self.read_range)

    def usage(self) -> CacheUsage:
        """Count what is in the folder, which opens every entry."""
        files = [file for file in self._kept.scan() if is_entry(file.path)]
        return CacheUsage(
            bytes=sum(file.size for file in files),
            entries=sum(not file.partial for file in files),
            limit_bytes=self.limit_bytes,
            hits=self._hits,
            misses=self._misses,
            hit_bytes=self._hit_bytes,
            missed_bytes=self._missed_bytes,
        )

    def clear(self) -> None:
        """Delete all entries except those being written; ``OSError`` if it cannot."""
        for file in self._kept.scan():
            if file.may_go:
                delete_entry(file.path)

    def _load(self, file: FileStat, offset: int, length: int) -> bytes | None:
        if not length:
            return b""
        data = None
        try:
            data = self._kept.load(key_of(file, offset, length), length)
        except OSError as exc:
            self._rest(exc)
        if data is None:
            self._misses += 1
            self._missed_bytes += length
        else:
            self._hits += 1
            self._hit_bytes += length
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
        """Cache nothing for a while: what failed once will usually fail again at once."""
        self._rests_until = time.monotonic() + REST_SECONDS
        write = log.debug if self._warned else log.warning
        self._warned = True
        write(
            "cache.unusable",
            folder=self.folder,
            reason=str(error),
            remedy="data is read from the store meanwhile; make room or give permission there, "
            "choose another folder (cache_dir), or switch the cache off (cache_limit_bytes = 0)",
        )


@dataclass(frozen=True, slots=True)
class CacheFile:
    """A file with the name of an entry."""

    path: str
    size: int
    """The disk space that it takes."""
    used: float
    """When it was last read or written, in seconds of the wall clock."""
    partial: bool

    @property
    def may_go(self) -> bool:
        """Whether no process is writing it."""
        return not self.partial or time.time() - self.used > PARTIAL_SECONDS


class CacheFolder:
    """Entries by key. Methods raise ``OSError`` if the folder cannot be used."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._root = os.path.join(folder, LAYOUT)
        self._made = False
        self._written = 0

    def load(self, key: bytes, length: int) -> bytes | None:
        """Return an entry's data, and mark it as used; None if it is missing or damaged.

        A damaged entry is deleted if it is ours.
        """
        path = self._path(key)
        try:
            handle = os.open(path, _READ)
        except FileNotFoundError:
            return None
        try:
            head = os.read(handle, HEADER_BYTES)
            data = _read_rest(handle, length)
            if head == _header(key, data) and len(data) == length:
                with suppress(OSError):  # the folder may be read-only
                    os.utime(handle)
                return data
        finally:
            os.close(handle)
        log.debug("cache.damaged", file=path)
        delete_entry(path)
        return None

    def store(self, key: bytes, data: bytes) -> None:
        """Keep data under a key; there has to be room. A file that is not ours stays."""
        path = self._path(key)
        with suppress(FileExistsError):
            os.mkdir(os.path.dirname(path), 0o700)
        with suppress(FileNotFoundError):
            if not _is_ours(path):
                return
        partial = f"{path}.{os.urandom(8).hex()}.partial"
        try:
            with open(partial, "xb", opener=_private) as sink:
                sink.write(_header(key, data))
                sink.write(data)
            os.replace(partial, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(partial)
            raise

    def make_room(self, size: int, limit: int) -> bool:
        """Take ``size`` of ``limit`` bytes, evicting entries if necessary.

        False if there is no room, or if another process is making some.
        """
        self._make()
        with CacheTally.opened(os.path.join(self._root, "tally")) as tally:
            before = tally.read()
            tally.add(size)
            self._written += size
            due = not before or self._written > limit // RECOUNT_SHARE
            if not due and tally.read() <= limit:
                return True
            with tally.locked() as mine:
                return mine and self._recount(tally, size, limit)

    def scan(self) -> Iterator[CacheFile]:
        """Yield every file with the name of an entry."""
        for shelf in _scandir(self._root):
            if _SHELF.fullmatch(shelf.name) and shelf.is_dir(follow_symlinks=False):
                for file in _scandir(shelf.path):
                    name = _NAME.fullmatch(file.name)
                    if name and file.is_file(follow_symlinks=False):
                        with suppress(FileNotFoundError):
                            info = file.stat(follow_symlinks=False)
                            size = taken(info.st_size)
                            yield CacheFile(file.path, size, info.st_mtime, bool(name[1]))

    def _recount(self, tally: CacheTally, size: int, limit: int) -> bool:
        before = tally.read()
        total = self._evict(size, limit)
        fits = total + size <= limit
        # The scan may have missed what others wrote during it.
        tally.reset(total + fits * size + tally.read() - before)
        self._written = 0
        return fits

    def _evict(self, size: int, limit: int) -> int:
        """Delete what dead processes left, then the least recently used; returns what remains."""
        files = list(self.scan())
        total = sum(file.size for file in files)
        for file in files:
            if file.partial and file.may_go:
                delete_entry(file.path)
                total -= file.size
        if total + size <= limit:
            return total
        enough = limit - max(size, limit // ROOM_SHARE)
        entries = sorted((file for file in files if not file.partial), key=attrgetter("used"))
        for number, entry in enumerate(entries):
            if total <= enough:
                log.debug("cache.evicted", folder=self._folder, entries=number, bytes_left=total)
                break
            delete_entry(entry.path)
            total -= entry.size  # also of a foreign file, which does not count
        return total

    def _make(self) -> None:
        """Make the folder once: one that vanishes later may be a disk that was unmounted."""
        if not self._made:
            os.makedirs(self._folder, exist_ok=True)
        self._made = True
        with suppress(FileExistsError):
            os.mkdir(self._root, 0o700)

    def _path(self, key: bytes) -> str:
        name = key.hex()
        return os.path.join(self._root, name[:2], f"{name}.range")


def _scandir(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def key_of(file: FileStat, offset: int, length: int) -> bytes:
    """The key of a range: other content has another one."""
    identity = file.url, file.size, file.fingerprint, offset, length
    return hashlib.sha256(repr(identity).encode()).digest()


def delete_entry(path: str) -> bool:
    """Delete an entry, complete or partial; False if the file is not ours and stays."""
    with suppress(FileNotFoundError):
        if not _is_ours(path):
            return False
        os.unlink(path)
    return True


def is_entry(path: str) -> bool:
    """Whether a file exists and begins as an entry does."""
    try:
        return _is_ours(path)
    except OSError:
        return False


def _is_ours(path: str) -> bool:
    """Whether a file begins as an entry does, or as one that a crash left unwritten."""
    handle = os.open(path, _READ)
    try:
        head = os.read(handle, len(MAGIC))
    finally:
        os.close(handle)
    return MAGIC.startswith(head) or not head.strip(b"\0")


def _header(key: bytes, data: bytes) -> bytes:
    from google_crc32c import value as crc32c

    return _HEADER.pack(MAGIC, key, len(data), crc32c(data))


def _read_rest(handle: int, length: int) -> bytes:
    """Up to ``length`` bytes, mostly in one piece; a system call has an upper limit."""
    pieces = []
    while length and (piece := os.read(handle, length)):
        pieces.append(piece)
        length -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


class CacheTally:
    """A file whose length is the number of blocks that a cache takes.

    Appending is atomic, so processes add to it without a lock. The one that recounts holds the
    file's lock, which the system releases if that process dies.
    """

    def __init__(self, handle: int) -> None:
        self._handle = handle

    @classmethod
    @contextmanager
    def opened(cls, path: str) -> Iterator[CacheTally]:
        """Open the file, creating it if it is missing; ``OSError`` if it is not a tally."""
        handle = os.open(path, _TALLY_FLAGS, 0o600)
        try:
            if not os.fstat(handle).st_size:
                os.write(handle, _TALLY_MAGIC)
            if os.pread(handle, len(_TALLY_MAGIC), 0) != _TALLY_MAGIC:
                raise OSError(errno.EEXIST, "a file that is not Strata's has the name", path)
            yield cls(handle)
        finally:
            os.close(handle)

    def add(self, size: int) -> None:
        """Count ``size`` more bytes."""
        os.write(self._handle, bytes(taken(size) // UNIT))

    def read(self) -> int:
        """Return how many bytes are counted; 0 if nobody has counted yet."""
        return (os.fstat(self._handle).st_size - len(_TALLY_MAGIC)) * UNIT

    def reset(self, size: int) -> None:
        """Set the count to ``size`` bytes; the file becomes sparse and takes no room."""
        os.ftruncate(self._handle, len(_TALLY_MAGIC))
        os.ftruncate(self._handle, len(_TALLY_MAGIC) + max(1, taken(size) // UNIT))

    @contextmanager
    def locked(self) -> Iterator[bool]:
        """Hold the lock, without waiting; False if another process holds it."""
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        try:
            yield True
        finally:
            # Closing would not do: a child forked meanwhile has the file open too.
            fcntl.flock(self._handle, fcntl.LOCK_UN)


def taken(size: int) -> int:
    """The disk space that a file of ``size`` bytes takes."""
    return -(-size // UNIT) * UNIT
