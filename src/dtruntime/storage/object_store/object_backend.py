"""Objects in a bucket, by obstore: what S3, Google Cloud Storage and Azure have in common.

obstore retries by itself, with back-off and jitter: refused and cut connections, timeouts, 5xx and
429, each part of an upload for itself, and a download from where it broke off. Nothing here
retries again, except for a listing that breaks off (`object_listing`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any

from ..._buffers import Blocks
from ...errors import ConfigError, ShardError, StorageError, install_command
from ..backend import Failures, Names, Pieces, Range, StorageBackend, StoredFile, StreamWriter
from ..buffers import Views, blocks_of, size_of
from ..error_translation import storage_errors
from ..lanes import side_by_side
from ..names import check_prefix
from ..object_listing import Listing
from ..object_reads import Fetcher
from .client import ObjectUrl, StoreOptions, check_process, open_store, parse_object_url
from .object_stream import ObjectStreamWriter, Upload

if TYPE_CHECKING:
    from obstore.store import ObjectStore

PART_BYTES = 16 * 2**20
PARALLEL_PARTS = 4
MAX_PARTS = 10_000
MAX_KEY_BYTES = 1024
DELETED_AT_ONCE = 1000
_DELETE_LANES = 8
_WRITER = "stratawriter"
"""Metadata of an object that was created: tells a repeated request from a competitor's."""


def lacks_obstore(url: str) -> ConfigError:
    """The error of a place that cannot be reached without the package."""
    return ConfigError(f"{url} needs the package obstore: {install_command('obstore')}")


class ObjectBackend(StorageBackend):
    """Files as objects under a prefix in a bucket.

    ``part_bytes`` and ``parallel_parts`` bound the memory of an upload or download; larger objects
    are sent and fetched in parts of that size, so many at a time.
    """

    def __init__(
        self, url: str, options: StoreOptions, part_bytes: int, parallel_parts: int
    ) -> None:
        if part_bytes < 5 * 2**20:
            raise ValueError(f"part_bytes must be at least 5 MiB, not {part_bytes}")
        if parallel_parts < 1:
            raise ValueError(f"parallel_parts must be at least 1, not {parallel_parts}")
        self._place = place_of(url)
        self._under = f"{self._place.key}/" if self._place.key else ""
        self.url = str(self._place).rstrip("/")
        self._secrets = options.secrets
        self._retry_seconds = options.retry_seconds
        self._store = self._open(options)
        self._part_bytes = part_bytes
        self._part_memory = Blocks(part_bytes, parallel_parts)
        self._parallel_parts = parallel_parts

    def location(self, name: str = "") -> str:
        """The URL of an object."""
        return f"{self.url}/{name}" if name else self.url

    def close(self) -> None:
        """Release memory; the backend can still be used."""
        self._part_memory.clear()

    def _read(self, name: str) -> bytes:
        import obstore

        with self._errors("read", name):
            return bytes(obstore.get(self._client(), self._key(name)).bytes())

    def _read_ranges(self, name: str, ranges: Sequence[Range]) -> Pieces:
        last = max(ranges, key=sum)
        if not all(length for _, length in ranges):
            self._check_end(name, *last)
        with self._errors("read", name):
            found = self._fetcher(name).ranges(ranges)
        if found is None:
            self._check_end(name, *last)
            raise self._being_replaced(name)
        return found

    def _read_into(self, name: str, offset: int, views: Views) -> None:
        if not views:
            self._check_end(name, offset, 0)
            return
        with self._errors("read", name):
            complete = self._fetcher(name).fill(offset, views)
        if not complete:
            self._check_end(name, offset, size_of(views))
            raise self._being_replaced(name)

    def _write(self, name: str, views: Views) -> None:
        size = size_of(views)
        part = max(self._part_bytes, -(-size // MAX_PARTS))
        pieces = (view for block in blocks_of(views, part) for view in block)
        with self._errors("write", name):
            self._upload(name).put(pieces, multipart=size > part, part_bytes=part)

    def _create(self, name: str, views: Views) -> bool:
        import obstore

        token = os.urandom(16).hex()
        key = self._key(name)
        with self._errors("create", name):
            try:
                obstore.put(
                    self._client(), key, iter(views or [memoryview(b"")]),
                    mode="create", attributes={_WRITER: token},
                )  # fmt: skip
            except obstore.exceptions.AlreadyExistsError:
                # The answer to a request that was repeated may be about its first attempt.
                found = obstore.get(self._client(), key, options={"head": True})
                return found.attributes.get(_WRITER) == token
        return True

    def _writer(self, name: str) -> StreamWriter:
        upload = self._upload(name)
        return ObjectStreamWriter(name, self.location(name), upload, self._part_memory, MAX_PARTS)

    def _delete(self, name: str) -> None:
        import obstore

        with self._errors("delete", name), suppress(FileNotFoundError):
            obstore.delete(self._client(), self._key(name))

    def _delete_many(self, names: Names) -> Failures:
        failures: Failures = []
        for start in range(0, len(names), DELETED_AT_ONCE):
            failures += self._delete_some(names[start : start + DELETED_AT_ONCE])
        return failures

    def _delete_some(self, names: Names) -> Failures:
        """All in one request; each in its own when that fails, to know which."""
        import obstore

        with suppress(OSError, obstore.exceptions.BaseError):
            obstore.delete(self._client(), [self._key(name) for name in names])
            return []
        failures: Failures = []

        def delete(name: str) -> None:
            try:
                self._delete(name)
            except StorageError as exc:
                failures.append((name, exc))

        side_by_side(names, delete, min(_DELETE_LANES, len(names)))
        return failures

    def _stat(self, name: str) -> StoredFile:
        import obstore

        with self._errors("look at", name):
            return self._file(obstore.head(self._client(), self._key(name)))

    def _list(self, prefix: str) -> Iterator[StoredFile]:
        # The slash keeps an object that has the prefix as its whole name apart.
        under = (self._under + prefix).rstrip("/")
        pages = Listing(self._client(), under, self._retry_seconds).pages()
        while True:
            with self._errors("list", prefix):
                page = next(pages, None)
            if page is None:
                return
            for meta in page:
                if meta["path"].startswith(f"{under}/" if under else ""):
                    yield self._file(meta)

    def _file(self, meta: Any) -> StoredFile:
        name = meta["path"][len(self._under) :]
        return StoredFile(name, meta["size"], meta["last_modified"].timestamp())

    def _key(self, name: str) -> str:
        key = self._under + name
        if len(key.encode()) > MAX_KEY_BYTES:
            raise ValueError(f"{key[:100]!r}... is longer than {MAX_KEY_BYTES} bytes as a key")
        return key

    def _open(self, options: StoreOptions) -> ObjectStore:
        try:
            with self._errors("open", ""):
                return open_store(self._place, options)
        except ImportError as exc:
            raise lacks_obstore(self.url) from exc

    def _client(self) -> ObjectStore:
        check_process(self._place)
        return self._store

    def _errors(self, doing: str, name: str) -> AbstractContextManager[None]:
        return storage_errors(doing, self.location(name), self._secrets)

    def _fetcher(self, name: str) -> Fetcher:
        return Fetcher(self._client(), self._key(name), self._part_bytes, self._parallel_parts)

    def _upload(self, name: str) -> Upload:
        return Upload(self._client(), self._key(name), self._parallel_parts, self._errors)

    def _check_end(self, name: str, offset: int, length: int) -> None:
        size = self.size(name)
        if offset + length > size:
            raise self._too_short(name, size, offset, length)

    def _being_replaced(self, name: str) -> StorageError:
        return StorageError(
            f"cannot read {self.location(name)}: it is replaced again and again while it is read"
        )


def place_of(url: str) -> ObjectUrl:
    """Split the URL of a bucket and a prefix; ``ConfigError`` when objects cannot lie there."""
    try:
        place = parse_object_url(url)
        check_prefix(place.key)
    except (ShardError, ValueError) as exc:
        raise ConfigError(str(exc)) from exc
    return place
