"""Reading files wherever they lie; each read notices a file that is not the one indexed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, BinaryIO, Protocol

from .._background import ThreadPool
from ..errors import ShardError
from .data_files import FileStat, local_stat
from .object_client import changed, data_errors, parse_object_url, store_for

if TYPE_CHECKING:
    from obstore import GetOptions

PART = 16 * 2**20
"""Longer ranges of an object are fetched in parts of this size, side by side."""
PARALLEL_PARTS = 8
CHUNK = 8 * 2**20


class ByteSource(Protocol):
    """What readers get bytes from: this module, or a cache in front of it."""

    def read_range(self, file: FileStat, offset: int, length: int) -> bytes:
        """Return ``length`` bytes of a file from ``offset`` on."""

    def read_ranges(self, file: FileStat, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of each ``(offset, length)``."""

    def stream(self, file: FileStat) -> Iterator[bytes]:
        """Yield a file's bytes from first to last."""


def read_range(file: FileStat, offset: int, length: int) -> bytes:
    """Return ``length`` bytes of a file from ``offset`` on.

    ``ShardError`` when the file is shorter, or is not the one that ``file`` describes.
    """
    check_range(file, offset, length)
    if length == 0:
        return b""
    if file.is_local:
        with open_local(file) as source:
            return _read_exactly(source, offset, length, file.url)
    return read_ranges(file, [(offset, length)])[0]


def check_range(file: FileStat, offset: int, length: int) -> None:
    """Raise ``ShardError`` when a file is too short to have a range."""
    if length and offset + length > file.size:
        raise ShardError(
            f"{file.url} has {file.size} bytes, and {length} at {offset} were asked for: "
            "index the dataset again"
        )


def read_ranges(file: FileStat, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    """Return the bytes of each ``(offset, length)``, of an object side by side."""
    if file.is_local:
        return [read_range(file, offset, length) for offset, length in ranges]
    parts = [list(_parts(*span)) for span in ranges]
    fetched = iter(_fetch_all(file, [part for span in parts for part in span]))
    return [b"".join(next(fetched) for _ in span) for span in parts]


def stream(file: FileStat, chunk: int = CHUNK) -> Iterator[bytes]:
    """Yield a file's bytes from first to last; an object's next chunk is fetched meanwhile."""
    if file.is_local:
        with open_local(file) as source, data_errors("read", file.url):
            while data := source.read(chunk):
                yield data
        return
    yield from read_ahead(file, chunk, _fetch)


def read_ahead(
    file: FileStat, chunk: int, read: Callable[[FileStat, int, int], bytes]
) -> Iterator[bytes]:
    """Yield a file in chunks; while one is used, the next is read by another thread."""
    offsets = range(0, file.size, chunk)
    with ThreadPool(1, thread_name_prefix="strata-read-ahead") as ahead:
        pending = None
        for offset in offsets:
            length = min(chunk, file.size - offset)
            following = ahead.submit(read, file, offset, length)
            if pending is not None:
                yield pending.result()
            pending = following
        if pending is not None:
            yield pending.result()


def download(file: FileStat, destination: str | os.PathLike[str]) -> None:
    """Copy a file to a local path, which appears only when it is complete."""
    target = os.path.abspath(os.fspath(destination))
    with data_errors("write", target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=os.path.dirname(target), prefix=".download-")
        try:
            with os.fdopen(handle, "wb") as sink:
                for data in stream(file):
                    sink.write(data)
            os.replace(partial, target)
        except BaseException:
            os.unlink(partial)
            raise


def open_local(file: FileStat) -> BinaryIO:
    """Open a local file; ``ShardError`` when it is not the one that ``file`` describes."""
    with data_errors("read", file.url):
        source = open(file.url, "rb", buffering=0)  # noqa: SIM115 - the caller closes it
    if local_stat(file.url, os.fstat(source.fileno())).fingerprint != file.fingerprint:
        source.close()
        raise changed(file.url)
    return source


def check_unchanged(file: FileStat) -> None:
    """Raise ``ShardError`` when a local file is not the one that ``file`` describes."""
    with data_errors("read", file.url):
        now = local_stat(file.url)
    if now.fingerprint != file.fingerprint:
        raise changed(file.url)


def _read_exactly(source: BinaryIO, offset: int, length: int, name: str) -> bytes:
    with data_errors("read", name):
        data = os.pread(source.fileno(), length, offset)
        while len(data) < length:
            more = os.pread(source.fileno(), length - len(data), offset + len(data))
            if not more:
                raise changed(name)
            data += more
    return data


def _parts(offset: int, length: int) -> Iterator[tuple[int, int]]:
    end = offset + length
    return ((at, min(PART, end - at)) for at in range(offset, end, PART))


def _fetch_all(file: FileStat, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    if len(ranges) < 2:
        return [_fetch(file, *part) for part in ranges]
    workers = min(PARALLEL_PARTS, len(ranges))
    with ThreadPool(workers, thread_name_prefix="strata-fetch") as pool:
        return list(pool.map(lambda part: _fetch(file, *part), ranges))


def _fetch(file: FileStat, offset: int, length: int) -> bytes:
    """Fetch one range of an object, on the condition that it is the object that was indexed."""
    import obstore

    url = parse_object_url(file.url)
    options: GetOptions = {"range": (offset, offset + length)}
    if file.fingerprint.startswith('"'):
        options["if_match"] = file.fingerprint
    store = store_for(url)
    with data_errors("read", file.url):
        data = bytes(obstore.get(store, url.key, options=options).bytes())
    if len(data) != length:
        raise changed(file.url)
    return data
