"""A folder to measure in, and its disk without Strata: writes past the page cache, and reads."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .._background import side_by_side
from ..display import size as readable
from ..errors import ConfigError, StorageError, StorageNotFoundError
from ..storage import LocalBackend, open_backend
from ..storage.backend import storage_errors
from ..storage.local_writer import (
    ALIGNMENT,
    BLOCK,
    LANES,
    DirectRefusedError,
    bounce_blocks,
    flush,
    reserve,
    set_direct,
    write_block,
    write_buffered,
)
from ..storage.object_backend import PARALLEL_PARTS, PART_BYTES, lacks_obstore, place_of
from ..storage.object_client import parse_object_url, store_for
from ..storage.urls import is_remote

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


class ObjectPlace:
    """A new prefix under the URL that was named; nothing else there is touched."""

    def __init__(self, url: str) -> None:
        """``StorageError`` when the bucket does not answer."""
        parent = place_of(url)
        self.url = f"{str(parent).rstrip('/')}/{PREFIX}{secrets.token_hex(4)}"
        self._key = f"{parse_object_url(self.url).key}/raw"
        try:
            with storage_errors("reach", parent.base):
                self._reach()
        except ImportError as exc:
            raise lacks_obstore(url) from exc

    @property
    def raw_write(self) -> str:
        """How `write` writes."""
        return f"an upload in parts of {PART_BYTES >> 20} MiB, {PARALLEL_PARTS} at a time"

    @property
    def raw_read(self) -> str:
        """How `read` reads."""
        return f"ranges of {PART_BYTES >> 20} MiB, {PARALLEL_PARTS} at a time, into new memory"

    def write(self, memory: memoryview) -> None:
        """Store memory as an object."""
        import obstore

        with storage_errors("write", self._raw):
            obstore.put(
                self._store,
                self._key,
                memory,
                use_multipart=memory.nbytes > PART_BYTES,
                chunk_size=PART_BYTES,
                max_concurrency=PARALLEL_PARTS,
            )

    def read(self, size: int) -> NDArray[np.uint8]:
        """Fetch what `write` stored into new memory."""
        import obstore

        target = np.empty(size, np.uint8)

        def fetch(at: int) -> None:
            end = min(at + PART_BYTES, size)
            part = obstore.get_range(self._store, self._key, start=at, end=end)
            target[at:end] = np.frombuffer(memoryview(part), np.uint8)

        with storage_errors("read", self._raw):
            side_by_side(range(0, size, PART_BYTES), fetch, PARALLEL_PARTS)
        return target

    def delete(self) -> None:
        """Delete what `write` stored."""
        import obstore

        with storage_errors("delete", self._raw):
            obstore.delete(self._store, self._key)

    def forget(self) -> None:
        """What a store keeps in memory is its own affair."""

    def remove(self) -> None:
        """Delete every object under the prefix."""
        with open_backend(self.url) as backend:
            failures = backend.delete_many([file.name for file in backend.list()])
        if failures:
            raise StorageError(
                f"{len(failures)} objects under {self.url} could not be deleted, delete them by "
                f"hand: {failures[0][1]}"
            )

    @property
    def _raw(self) -> str:
        return f"{self.url}/raw"

    def _reach(self) -> None:
        """Ask once and not for long, so that a wrong URL or key is told at once."""
        import obstore

        place = parse_object_url(self.url)
        obstore.list_with_delimiter(store_for(place, patient=False), place.key)
        self._store = store_for(place)


class RawPlace(Protocol):
    """A place for checkpoints, and how fast it is without Strata."""

    url: str

    @property
    def raw_write(self) -> str:
        """How `write` writes."""

    @property
    def raw_read(self) -> str:
        """How `read` reads."""

    def write(self, memory: memoryview) -> None:
        """Write one file, durably."""

    def read(self, size: int) -> NDArray[np.uint8]:
        """Read it."""

    def delete(self) -> None:
        """Delete it."""

    def forget(self) -> None:
        """Let the next read come from the disk."""

    def remove(self) -> None:
        """Remove everything that was written."""


@contextmanager
def new_place(named: str, needed: int) -> Iterator[RawPlace]:
    """Make a place under a folder or URL for ``needed`` bytes, and remove it at the end.

    ``ConfigError`` when nothing can be stored there, ``StorageError`` when it does not answer.
    """
    place = _open(named, needed)
    try:
        yield place
    finally:
        place.remove()


def _open(named: str, needed: int) -> RawPlace:
    if named.lower().startswith("memory:"):
        raise ConfigError(f"{named} is memory of this process: name a folder or a bucket")
    backend = open_backend(named)
    if isinstance(backend, LocalBackend) and not is_remote(named):
        return LocalPlace(Path(backend.root), needed)
    return ObjectPlace(named)
