"""How much a cache holds, known to all processes without listing it."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

UNIT = 4096
"""Sizes are counted in blocks of the file system."""
_TALLY_MAGIC = b"STRATA-TALLY\n"
_TALLY_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class Tally:
    """A file whose length is the number of units that a cache takes.

    Appending is atomic, so processes add to it without a lock. The one that recounts holds the
    file's lock, which the system takes back from a process that dies.
    """

    def __init__(self, handle: int) -> None:
        self._handle = handle

    @classmethod
    @contextmanager
    def opened(cls, path: str) -> Iterator[Tally]:
        """Open the file, which is made when it is missing; ``OSError`` when it is not a tally."""
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
        os.write(self._handle, bytes(_units(size)))

    def read(self) -> int:
        """Return how many bytes are counted; 0 when nobody has counted yet."""
        return (os.fstat(self._handle).st_size - len(_TALLY_MAGIC)) * UNIT

    def reset(self, size: int) -> None:
        """Count ``size`` bytes and no others; the file becomes sparse and takes no room."""
        os.ftruncate(self._handle, len(_TALLY_MAGIC))
        os.ftruncate(self._handle, len(_TALLY_MAGIC) + max(1, _units(size)))

    @contextmanager
    def locked(self) -> Iterator[bool]:
        """Hold the lock, without waiting; False when another one holds it."""
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
    """How much of the disk a file of ``size`` bytes takes."""
    return _units(size) * UNIT


def _units(size: int) -> int:
    return -(-size // UNIT)
