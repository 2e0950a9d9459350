"""A disk or a bucket without Strata: one file written durably, and read again."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .._background import side_by_side
from .._buffers import BlockPool
from ..display import size as readable
from ..errors import ConfigError, StorageError, StorageNotFoundError
from ..storage import LocalBackend, local_writer, open_backend
from ..storage.backend import storage_errors
from ..storage.local_writer import ALIGNMENT, BLOCK, LANES, flush
from ..storage.object_backend import PARALLEL_PARTS, PART_BYTES, lacks_obstore, place_of
from ..storage.object_client import parse_object_url, store_for
from ..storage.urls import is_remote

if TYPE_CHECKING:
    from obstore.store import ObjectStore

PREFIX = "strata-bench-"
SPARE_BYTES = 32 * 2**20
"""Space that a file system needs beside the files."""
Bytes: TypeAlias = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class RawPlace:
    """A new folder or prefix, and one raw file in it; nothing else there is touched."""

    url: str
    raw_write: str
    """How `write` writes, in words."""
    raw_read: str
    write: Callable[[memoryview], None]
    """Writes aligned memory to the file, durably."""
    read: Callable[[int], Bytes]
    """Reads so many bytes of the file into new memory."""
    delete: Callable[[], None]
    """Deletes the file."""
    forget: Callable[[], None] = lambda: None
    """Drops all files of the place from the page cache, where it has one."""


@contextmanager
def new_place(named: str, needed: int) -> Iterator[RawPlace]:
    """Make a place under a folder or URL for ``needed`` bytes, and remove it at the end.

    ``ConfigError`` when nothing can be stored there, ``StorageError`` when it does not answer.
    """
    if named.lower().startswith("memory:"):
        raise ConfigError(f"{named} is memory of this process: name a folder or a bucket")
    backend = open_backend(named)
    if isinstance(backend, LocalBackend) and not is_remote(named):
        with _new_folder(Path(backend.root), needed) as folder:
            yield _local_place(folder)
    else:
        place = _object_place(named)
        try:
            yield place
        finally:
            _remove_objects(place.url)


@contextmanager
def _new_folder(parent: Path, needed: int) -> Iterator[Path]:
    if not parent.is_dir():
        raise StorageNotFoundError(
            f"{parent} is not a folder: name an existing one, or the URL of a bucket"
        )
    check_room(parent, needed, "choose a smaller --size, or another place")
    folder = parent / f"{PREFIX}{secrets.token_hex(4)}"
    with storage_errors("make", str(folder)):
        folder.mkdir()
    try:
        yield folder
    finally:
        with storage_errors("remove", str(folder)):
            shutil.rmtree(folder)


def _local_place(folder: Path) -> RawPlace:
    file, direct = folder / "raw", True

    def write(memory: memoryview) -> None:
        with storage_errors("write", str(file)):
            write_file(file, memory, direct=direct)

    def read(size: int) -> Bytes:
        target = _aligned(size)
        with storage_errors("read", str(file)):
            read_file(file, target.data, direct=direct)
        return target

    def delete() -> None:
        with storage_errors("delete", str(file)):
            file.unlink(missing_ok=True)

    try:
        write(_aligned(ALIGNMENT).data)
    except local_writer.DirectRefusedError:
        direct = False
    delete()
    blocks = f"of {BLOCK >> 20} MiB by {LANES} threads"
    writes, reads = f"direct writes {blocks}, then fsync", f"direct reads {blocks} into new memory"
    if not direct:
        writes = "writes through the page cache, then fsync: no direct writes here"
        reads = "sequential reads through the page cache into new memory"
    url = folder.as_uri()
    return RawPlace(url, writes, reads, write, read, delete, lambda: drop_cached(folder))


def _object_place(named: str) -> RawPlace:
    parent = place_of(named)
    url = f"{str(parent).rstrip('/')}/{PREFIX}{secrets.token_hex(4)}"
    place = parse_object_url(url)
    key, name = f"{place.key}/raw", f"{url}/raw"
    try:
        import obstore

        with storage_errors("reach", parent.base):
            # Once and not for long, so that a wrong URL or key fails at once.
            obstore.list_with_delimiter(store_for(place, patient=False), place.key)
            store = store_for(place)
    except ImportError as exc:
        raise lacks_obstore(named) from exc

    def write(memory: memoryview) -> None:
        with storage_errors("write", name):
            upload(store, key, memory)

    def read(size: int) -> Bytes:
        with storage_errors("read", name):
            return download(store, key, size, PARALLEL_PARTS)

    def delete() -> None:
        with storage_errors("delete", name):
            obstore.delete(store, key)

    parts = f"of {PART_BYTES >> 20} MiB, {PARALLEL_PARTS} at a time"
    writes, reads = f"an upload in parts {parts}", f"ranges {parts}, into new memory"
    return RawPlace(url, writes, reads, write, read, delete)


def _remove_objects(url: str) -> None:
    with open_backend(url) as backend:
        failures = backend.delete_many([file.name for file in backend.list()])
    if failures:
        raise StorageError(
            f"{len(failures)} objects under {url} could not be deleted, delete them by hand: "
            f"{failures[0][1]}"
        )


def write_file(path: Path, memory: memoryview, *, direct: bool) -> None:
    """Write aligned memory to a new file, in blocks by several threads if ``direct``, and fsync."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        local_writer.write_views(handle, [memory], BlockPool(BLOCK, 2 * LANES), direct=direct)
        flush(handle)
    finally:
        os.close(handle)


def read_file(path: Path, target: memoryview, *, direct: bool = False) -> None:
    """Fill memory from a file; it has to be aligned if ``direct``."""
    block, lanes = (BLOCK, LANES) if direct else (max(1, target.nbytes), 1)
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def fill(at: int) -> None:
        view = target[at : at + block]
        while view.nbytes:
            got = os.preadv(handle, [view], at)
            if not got:
                raise OSError(f"the file ends at {at} bytes")
            at, view = at + got, view[got:]

    try:
        if direct:
            local_writer.set_direct(handle, True)
        side_by_side(range(0, target.nbytes, block), fill, lanes)
    finally:
        os.close(handle)


def drop_cached(folder: Path) -> None:
    """Ask the system to drop all files of a folder from the page cache."""
    for path in folder.rglob("*") if hasattr(os, "posix_fadvise") else ():
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def check_room(folder: Path, needed: int, remedy: str) -> None:
    """Raise ``StorageError`` when a file system has less than ``needed`` bytes."""
    usage = shutil.disk_usage(folder)
    # Some, such as ramfs, do not say.
    if usage.total and usage.free < needed + SPARE_BYTES:
        raise StorageError(
            f"{folder} has {readable(usage.free)} free, and {readable(needed + SPARE_BYTES)} are "
            f"needed: {remedy}"
        )


def _aligned(size: int) -> Bytes:
    """New memory that direct writes and reads can use."""
    memory = np.empty(size + ALIGNMENT, np.uint8)
    skip = -memory.__array_interface__["data"][0] % ALIGNMENT
    return memory[skip : skip + size]


def upload(store: ObjectStore, key: str, memory: memoryview) -> None:
    """Store an object in parts of the size and number that Strata uses."""
    import obstore

    obstore.put(
        store,
        key,
        memory,
        use_multipart=memory.nbytes > PART_BYTES,
        chunk_size=PART_BYTES,
        max_concurrency=PARALLEL_PARTS,
    )


def download(store: ObjectStore, key: str, size: int, lanes: int) -> Bytes:
    """Fetch an object into new memory, in ranges of Strata's part size."""
    import obstore

    target = np.empty(size, np.uint8)

    def fetch(at: int) -> None:
        end = min(at + PART_BYTES, size)
        part = obstore.get_range(store, key, start=at, end=end)
        target[at:end] = np.frombuffer(memoryview(part), np.uint8)

    side_by_side(range(0, size, PART_BYTES), fetch, lanes)
    return target
