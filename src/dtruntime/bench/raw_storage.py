"""A folder to measure in, and its disk without Strata: writes past the page cache, and reads."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .._background import side_by_side
from ..display import size as readable
from ..errors import StorageError, StorageNotFoundError
from ..storage.error_translation import storage_errors
from ..storage.local_disk.atomic_file import flush
from ..storage.local_disk.direct_io import (
    ALIGNMENT,
    BLOCK,
    LANES,
    DirectRefusedError,
    bounce_blocks,
    reserve,
    set_direct,
    write_block,
    write_buffered,
)

PREFIX = "strata-bench-"
SPARE_BYTES = 32 * 2**20
"""What a file system needs beside the files."""
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class LocalPlace:
    """A new folder within the one that was named; nothing else there is touched."""

    def __init__(self, parent: Path, needed: int) -> None:
        """``StorageError`` when the folder is not there, or has less than ``needed`` bytes."""
        if not parent.is_dir():
            raise StorageNotFoundError(
                f"{parent} is no folder: name one that exists, or a URL of a bucket"
            )
        check_room(parent, needed, "choose a smaller --size, or another place")
        self._folder = parent / f"{PREFIX}{secrets.token_hex(4)}"
        with storage_errors("make", str(self._folder)):
            self._folder.mkdir()
        self.url = self._folder.as_uri()
        self._file = self._folder / "raw"
        try:
            self._direct = self._takes_direct()
        except BaseException:
            self.remove()
            raise

    @property
    def raw_write(self) -> str:
        """How `write` writes."""
        if self._direct:
            return f"direct writes of {BLOCK >> 20} MiB by {LANES} threads, then fsync"
        return "writes through the page cache, then fsync: the file system takes no direct ones"

    @property
    def raw_read(self) -> str:
        """How `read` reads."""
        if self._direct:
            return f"direct reads of {BLOCK >> 20} MiB by {LANES} threads into new memory"
        return "reads through the page cache, from the front to the end, into new memory"

    def write(self, memory: memoryview) -> None:
        """Write memory, which is aligned, to a new file, and wait until it is on the disk."""
        with storage_errors("write", str(self._file)):
            handle = os.open(self._file, _NEW, 0o600)
            try:
                if self._direct:
                    _write_direct(handle, memory)
                else:
                    write_buffered(handle, [memory], 0)
                flush(handle)
            finally:
                os.close(handle)

    def read(self, size: int) -> NDArray[np.uint8]:
        """Read what `write` wrote into new memory."""
        target = _aligned(size)
        with storage_errors("read", str(self._file)):
            handle = os.open(self._file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if self._direct:
                    _read_direct(handle, target.data)
                else:
                    _fill(handle, 0, target.data)
            finally:
                os.close(handle)
        return target

    def delete(self) -> None:
        """Delete what `write` wrote."""
        with storage_errors("delete", str(self._file)):
            self._file.unlink(missing_ok=True)

    def forget(self) -> None:
        """Ask the system to keep nothing of the files in memory."""
        if not hasattr(os, "posix_fadvise"):
            return
        for path in self._folder.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def remove(self) -> None:
        """Remove the folder with everything in it."""
        with storage_errors("remove", str(self._folder)):
            shutil.rmtree(self._folder)

    def _takes_direct(self) -> bool:
        """Write a block, to see whether the file system takes it."""
        self._direct = True
        try:
            self.write(_aligned(ALIGNMENT).data)
        except DirectRefusedError:
            return False
        finally:
            self.delete()
        return True


def check_room(folder: Path, needed: int, remedy: str) -> None:
    """Raise ``StorageError`` when a file system has less than ``needed`` bytes."""
    usage = shutil.disk_usage(folder)
    # Some, such as ramfs, do not tell.
    if usage.total and usage.free < needed + SPARE_BYTES:
        raise StorageError(
            f"{folder} has {readable(usage.free)} free, and {readable(needed + SPARE_BYTES)} are "
            f"needed: {remedy}"
        )


def _aligned(size: int) -> NDArray[np.uint8]:
    """New memory that direct writes and reads can use."""
    memory = np.empty(size + ALIGNMENT, np.uint8)
    skip = -memory.__array_interface__["data"][0] % ALIGNMENT
    return memory[skip : skip + size]


def _write_direct(handle: int, memory: memoryview) -> None:
    bounce = bounce_blocks()  # not used: the memory is aligned
    set_direct(handle, True)
    reserve(handle, 0, memory.nbytes)
    side_by_side(
        range(0, memory.nbytes, BLOCK),
        lambda at: write_block(handle, [memory[at : at + BLOCK]], at, bounce),
        min(LANES, -(-memory.nbytes // BLOCK)),
    )


def _read_direct(handle: int, target: memoryview) -> None:
    set_direct(handle, True)
    side_by_side(
        range(0, target.nbytes, BLOCK),
        lambda at: _fill(handle, at, target[at : at + BLOCK]),
        min(LANES, -(-target.nbytes // BLOCK)),
    )


def _fill(handle: int, at: int, view: memoryview) -> None:
    while view.nbytes:
        got = os.preadv(handle, [view], at)
        if not got:
            raise OSError(f"the file ends at {at} bytes")
        at, view = at + got, view[got:]
