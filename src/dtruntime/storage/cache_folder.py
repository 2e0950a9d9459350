"""The folder of a disk cache: where entries lie in it, and which of them have to go.

``FOLDER/strata-shards-v1/`` has everything: ``tally``, and entries under ``00/`` to ``ff/``. What
has another name, or does not begin as an entry does, is neither counted nor touched.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter

from ..telemetry import EventLog
from .cache_entries import delete_entry, read_entry, write_entry
from .cache_tally import Tally, taken

log = EventLog("storage.disk_cache")

LAYOUT = "strata-shards-v1"
PARTIAL_SECONDS = 600
"""A partial entry that has not grown for so long is of a process that died."""
RECOUNT_SHARE = 20
"""A process that has written this part of the limit recounts, whatever the tally says."""
ROOM_SHARE = 10
"""Eviction makes room for this part of the limit, so that not every write has to evict."""

_SHELF = re.compile(r"[0-9a-f]{2}")
_NAME = re.compile(r"[0-9a-f]{64}\.range(\.[0-9a-f]{16}\.partial)?")


@dataclass(frozen=True, slots=True)
class Found:
    """A file with the name of an entry."""

    path: str
    size: int
    """How much of the disk it takes."""
    used: float
    """When it was last read or written, in seconds of the wall clock."""
    partial: bool

    @property
    def may_go(self) -> bool:
        """Whether no process is writing it."""
        return not self.partial or time.time() - self.used > PARTIAL_SECONDS


class CacheFolder:
    """Entries by key. Its methods raise ``OSError`` when the folder cannot be used."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._root = os.path.join(folder, LAYOUT)
        self._made = False
        self._written = 0

    def load(self, key: bytes, length: int) -> bytes | None:
        """Return what is kept under a key; None when there is nothing, or nothing whole."""
        return read_entry(self._path(key), key, length)

    def store(self, key: bytes, data: bytes) -> None:
        """Keep data under a key; there has to be room."""
        path = self._path(key)
        with suppress(FileExistsError):
            os.mkdir(os.path.dirname(path), 0o700)
        write_entry(path, key, data)

    def make_room(self, size: int, limit: int) -> bool:
        """Take ``size`` of ``limit`` bytes, evicting if need be.

        False when there is no room, or when another process is just making some.
        """
        self._make()
        with Tally.opened(os.path.join(self._root, "tally")) as tally:
            known = tally.read()
            tally.add(size)
            self._written += size
            due = not known or self._written > limit // RECOUNT_SHARE
            if not due and tally.read() <= limit:
                return True
            with tally.locked() as mine:
                return mine and self._recount(tally, size, limit)

    def scan(self) -> Iterator[Found]:
        """Find every file with the name of an entry."""
        for shelf in _scandir(self._root):
            if _SHELF.fullmatch(shelf.name) and shelf.is_dir(follow_symlinks=False):
                for file in _scandir(shelf.path):
                    name = _NAME.fullmatch(file.name)
                    if name and file.is_file(follow_symlinks=False):
                        with suppress(FileNotFoundError):
                            info = file.stat(follow_symlinks=False)
                            size = taken(info.st_size)
                            yield Found(file.path, size, info.st_mtime, bool(name[1]))

    def _recount(self, tally: Tally, size: int, limit: int) -> bool:
        before = tally.read()
        total = self._evict(size, limit)
        fits = total + size <= limit
        # What others wrote during the scan may not have been seen by it.
        tally.reset(total + fits * size + tally.read() - before)
        self._written = 0
        return fits

    def _evict(self, size: int, limit: int) -> int:
        """Delete remains of dead processes, then least recently used entries; return the rest."""
        found = list(self.scan())
        remains = [file for file in found if file.partial and file.may_go]
        total = sum(file.size for file in found) - _deleted(remains)
        if total + size <= limit:
            return total
        enough = limit - max(size, limit // ROOM_SHARE)
        entries = sorted((f for f in found if not f.partial), key=attrgetter("used"))
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


def _deleted(files: list[Found]) -> int:
    for file in files:
        delete_entry(file.path)
    return sum(file.size for file in files)


def _scandir(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
