"""Objects in a bucket, by obstore: what S3, Google Cloud Storage and Azure have in common.

obstore retries by itself, with back-off and jitter: refused and cut connections, timeouts, 5xx and
429, each part of an upload for itself, and a download from where it broke off. Nothing here
retries again, except for a listing that breaks off (`object_listing`).
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, Unpack

from .._background import side_by_side
from .._buffers import BlockPool, Views, blocks_of, copy, size_of
from ..errors import ConfigError, ShardError, StorageError, install_command
from .backend import (
    Failures,
    Names,
    Pieces,
    Range,
    StorageBackend,
    StoredFile,
    StreamWriter,
    check_prefix,
    storage_errors,
)
from .object_client import (
    RETRY_SECONDS,
    Listing,
    ObjectUrl,
    StoreOptions,
    check_process,
    open_store,
    parse_object_url,
)
from .object_stream import MultipartUpload, ObjectStreamWriter

if TYPE_CHECKING:
    from obstore import GetResult
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
        self._part_memory = BlockPool(part_bytes, parallel_parts)
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

    def _fetcher(self, name: str) -> ObjectFetcher:
        return ObjectFetcher(
            self._client(), self._key(name), self._part_bytes, self._parallel_parts
        )

    def _upload(self, name: str) -> MultipartUpload:
        return MultipartUpload(self._client(), self._key(name), self._parallel_parts, self._errors)

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


NEAR_BYTES = 256 * 2**10
"""Ranges with gaps up to this size are fetched together."""
_VERSION_ATTEMPTS = 5
_CHUNK = 256 * 2**10

_Target: TypeAlias = tuple[int, Views]
"""An offset, and the memory for the bytes from there on."""


class ObjectFetcher:
    """Fetches ranges of one object side by side. Methods raise obstore's errors."""

    def __init__(self, store: ObjectStore, key: str, part_bytes: int, lanes: int) -> None:
        self._store = store
        self._key = key
        self._part_bytes = part_bytes
        self._lanes = lanes

    def ranges(self, spans: Sequence[tuple[int, int]]) -> list[bytes] | None:
        """Return the bytes of each offset and length; None as in :meth:`fill`."""
        wanted = merged((offset, offset + length) for offset, length in spans if length)
        memory = {start: memoryview(bytearray(end - start)) for start, end in wanted}
        if not self._fill_all((start, [view]) for start, view in memory.items()):
            return None
        starts = sorted(memory)
        found = []
        for offset, length in spans:
            start = max((s for s in starts if s <= offset), default=0) if length else 0
            at = offset - start
            found.append(bytes(memory[start][at : at + length]) if length else b"")
        return found

    def fill(self, offset: int, views: Views) -> bool:
        """Fetch bytes into memory; False when the object is too short, or changes all the time."""
        return self._fill_all([(offset, views)])

    def _fill_all(self, targets: Iterable[_Target]) -> bool:
        parts = [part for target in targets for part in self._parts(target)]
        for _ in range(_VERSION_ATTEMPTS):
            versions: set[object] = set()
            short: list[int] = []

            def fetch(part: _Target) -> None:
                result = self._get(part)
                if result is None or not _copy(result, part):
                    short.append(part[0])  # noqa: B023
                else:
                    versions.add((result.meta["e_tag"], result.meta["last_modified"]))  # noqa: B023

            side_by_side(parts, fetch, max(1, min(self._lanes, len(parts))))
            if len(versions) < 2:
                return not short
        return False

    def _parts(self, target: _Target) -> Iterable[_Target]:
        offset, views = target
        blocks = blocks_of(views, self._part_bytes)
        return zip(count(offset, self._part_bytes), blocks, strict=False)

    def _get(self, part: _Target) -> GetResult | None:
        import obstore

        offset, views = part
        try:
            return obstore.get(
                self._store, self._key, options={"range": (offset, offset + size_of(views))}
            )
        except obstore.exceptions.BaseError as exc:
            if "status code: 416" in str(exc):  # the range begins where the object has ended
                return None
            raise


def merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join stretches, given by start and end, that overlap or lie near each other."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if found and start - found[-1][1] <= NEAR_BYTES:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def _copy(result: GetResult, part: _Target) -> bool:
    """Copy what arrives; False when it is less than was asked for."""
    views = part[1]
    if result.range[1] - result.range[0] != size_of(views):
        return False
    left = deque(views)
    for chunk in result.stream(min_chunk_size=_CHUNK):
        data = memoryview(chunk)
        while left and data.nbytes:
            target = left.popleft()
            size = min(target.nbytes, data.nbytes)
            copy(data[:size], target[:size])
            data = data[size:]
            if size < target.nbytes:
                left.appendleft(target[size:])
    return not left


REQUEST_SECONDS = 60.0
_RETRIES = 1000


class Tuning(TypedDict, total=False):
    """What all object backends take, by keyword."""

    endpoint: str
    """The URL of a compatible server."""
    anonymous: bool
    """Send no credentials."""
    part_bytes: int
    parallel_parts: int
    retry_seconds: float
    """No request is repeated once this time has passed since its first attempt."""
    request_seconds: float
    """How long one attempt may take."""
    config: dict[str, str]
    """Further settings and credentials by obstore's names, such as ``access_key_id``."""


class S3Backend(ObjectBackend):
    """Objects in a bucket of S3, or of a server that speaks its protocol.

    Credentials come from the environment (``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``,
    ``AWS_SESSION_TOKEN``), a web identity token, the container or the machine's role.
    """

    kind = "s3"

    def __init__(
        self,
        bucket: str,
        region: str = "",
        *,
        prefix: str = "",
        path_style: bool | None = None,
        **tuning: Unpack[Tuning],
    ) -> None:
        """``path_style``: the bucket is in the path of URLs; None: unless it is Amazon's."""
        if not re.fullmatch(r"[a-z0-9-]*", region):
            raise ValueError(f"{region!r} is no region: a prefix is given as prefix={region!r}")
        own = {"region": region, "path_style": path_style}
        super().__init__(f"s3://{bucket}/{prefix}", *_options(tuning, own))


class GcsBackend(ObjectBackend):
    """Objects in a bucket of Google Cloud Storage.

    Credentials come from ``GOOGLE_APPLICATION_CREDENTIALS`` or ``GOOGLE_SERVICE_ACCOUNT``, the
    default credentials of ``gcloud``, or the machine's service account.
    """

    kind = "gcs"

    def __init__(self, bucket: str, *, prefix: str = "", **tuning: Unpack[Tuning]) -> None:
        super().__init__(f"gs://{bucket}/{prefix}", *_options(tuning, {}))


class AzureBackend(ObjectBackend):
    """Objects in a container of Azure Blob Storage.

    The account and its credentials come from ``AZURE_STORAGE_ACCOUNT_NAME`` and
    ``AZURE_STORAGE_ACCOUNT_KEY``, a SAS token, a service principal or a managed identity.
    """

    kind = "azure"

    def __init__(
        self, container: str, *, prefix: str = "", account: str = "", **tuning: Unpack[Tuning]
    ) -> None:
        if account:
            tuning["config"] = {"account_name": account, **tuning.get("config", {})}
        super().__init__(f"az://{container}/{prefix}", *_options(tuning, {}))


def open_objects(url: str, **options: Any) -> ObjectBackend:
    """Return the backend of an object store's URL."""
    place = place_of(url)
    kinds: dict[str, type[Any]] = {"s3": S3Backend, "gs": GcsBackend, "az": AzureBackend}
    backend: ObjectBackend = kinds[place.scheme](place.bucket, prefix=place.key, **options)
    return backend


def _options(tuning: Tuning, own: dict[str, Any]) -> tuple[StoreOptions, int, int]:
    options = StoreOptions(
        endpoint=tuning.get("endpoint", ""),
        anonymous=tuning.get("anonymous", False),
        retries=_RETRIES,
        retry_seconds=tuning.get("retry_seconds", RETRY_SECONDS),
        request_seconds=tuning.get("request_seconds", REQUEST_SECONDS),
        config=tuple(sorted(tuning.get("config", {}).items())),
        **own,
    )
    parts = tuning.get("part_bytes", PART_BYTES), tuning.get("parallel_parts", PARALLEL_PARTS)
    return options, *parts
