"""Objects in a bucket, by obstore: what S3, Google Cloud Storage and Azure have in common.

obstore retries by itself, with back-off and jitter: refused and cut connections, timeouts, 5xx and
429, each part of an upload separately, and a download from where it broke off. Nothing here retries
again, except for a listing that breaks off (`object_client.list_pages`).
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
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
    ObjectUrl,
    StoreOptions,
    check_process,
    list_pages,
    open_store,
    parse_object_url,
)
from .object_stream import ObjectStreamWriter

if TYPE_CHECKING:
    from obstore import GetResult
    from obstore.store import ObjectStore
    from typing_extensions import Buffer

PART_BYTES = 16 * 2**20
PARALLEL_PARTS = 4
MAX_PARTS = 10_000
MAX_KEY_BYTES = 1024
DELETED_AT_ONCE = 1000
NEAR_BYTES = 256 * 2**10
"""Ranges with gaps up to this size are fetched together."""
REQUEST_SECONDS = 60.0
_RETRIES = 1000
_DELETE_LANES = 8
_VERSION_ATTEMPTS = 5
_CHUNK = 256 * 2**10
_WRITER = "stratawriter"
"""Metadata of an object that was created: tells a repeated request from a competitor's."""

_Target: TypeAlias = tuple[int, Views]
"""An offset, and the memory for the bytes from there on."""


def lacks_obstore(url: str) -> ConfigError:
    """The error for a place that cannot be reached without the package."""
    return ConfigError(f"{url} needs the package obstore: {install_command('obstore')}")


class ObjectBackend(StorageBackend):
    """Files as objects under a prefix in a bucket.

    ``part_bytes`` and ``parallel_parts`` bound the memory of an upload or download; larger objects
    are sent and fetched in parts of that size, that many at a time.
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
        try:
            with self._errors("open", ""):
                self._store = open_store(self._place, options)
        except ImportError as exc:
            raise lacks_obstore(self.url) from exc
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
        spans = merged((offset, offset + length) for offset, length in ranges if length)
        starts = [start for start, _ in spans]
        memory = [memoryview(bytearray(end - start)) for start, end in spans]
        self._fetch(name, [(at, [view]) for at, view in zip(starts, memory, strict=True)], last)
        pieces = []
        for offset, length in ranges:
            number = bisect_right(starts, offset) - 1
            at = offset - starts[number] if length else 0
            pieces.append(bytes(memory[number][at : at + length]) if length else b"")
        return pieces

    def _read_into(self, name: str, offset: int, views: Views) -> None:
        if views:
            self._fetch(name, [(offset, views)], (offset, size_of(views)))
        else:
            self._check_end(name, offset, 0)

    def _write(self, name: str, views: Views) -> None:
        size = size_of(views)
        part = max(self._part_bytes, -(-size // MAX_PARTS))
        pieces = (view for block in blocks_of(views, part) for view in block)
        with self._errors("write", name):
            self._upload(name, pieces, multipart=size > part, part_bytes=part)

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
                existing = obstore.get(self._client(), key, options={"head": True})
                return existing.attributes.get(_WRITER) == token
        return True

    def _writer(self, name: str) -> StreamWriter:
        return ObjectStreamWriter(
            name,
            self.location(name),
            partial(self._upload, name),
            partial(self._errors, "write", name),
            self._part_memory,
            MAX_PARTS,
        )

    def _upload(
        self, name: str, pieces: Iterable[Buffer], *, multipart: bool, part_bytes: int
    ) -> None:
        import obstore

        obstore.put(
            self._client(),
            self._key(name),
            _never_empty(pieces),
            use_multipart=multipart,
            chunk_size=part_bytes,
            max_concurrency=self._parallel_parts,
        )

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
        """All in one request; each in its own if that fails, to know which."""
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
        pages = list_pages(self._client(), under, self._retry_seconds)
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

    def _client(self) -> ObjectStore:
        check_process(self._place)
        return self._store

    def _errors(self, doing: str, name: str) -> AbstractContextManager[None]:
        return storage_errors(doing, self.location(name), self._secrets)

    def _fetch(self, name: str, targets: Sequence[_Target], last: Range) -> None:
        """Fetch bytes into memory side by side, all from one version of the object.

        ``last`` is the range that ends last, for the error if the object is too short.
        """
        parts = [part for target in targets for part in self._parts(target)]
        lanes = max(1, min(self._parallel_parts, len(parts)))
        versions: set[object] = set()
        for _ in range(_VERSION_ATTEMPTS):
            with self._errors("read", name):
                fetch = partial(_fetch_part, self._client(), self._key(name))
                versions = set(side_by_side(parts, fetch, lanes))
            if len(versions - {None}) < 2:
                break
        if None in versions or len(versions) > 1:
            self._check_end(name, *last)
            raise StorageError(
                f"cannot read {self.location(name)}: it keeps being replaced while it is read"
            )

    def _parts(self, target: _Target) -> Iterable[_Target]:
        offset, views = target
        blocks = blocks_of(views, self._part_bytes)
        return zip(count(offset, self._part_bytes), blocks, strict=False)

    def _check_end(self, name: str, offset: int, length: int) -> None:
        size = self.size(name)
        if offset + length > size:
            raise self._too_short(name, size, offset, length)


def place_of(url: str) -> ObjectUrl:
    """Split the URL of a bucket and a prefix; ``ConfigError`` if objects cannot lie there."""
    try:
        place = parse_object_url(url)
        check_prefix(place.key)
    except (ShardError, ValueError) as exc:
        raise ConfigError(str(exc)) from exc
    return place


def merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join spans, given by start and end, that overlap or lie near each other."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if joined and start - joined[-1][1] <= NEAR_BYTES:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def _fetch_part(store: ObjectStore, key: str, part: _Target) -> object:
    """Fetch bytes into memory; returns the version of the object, None if it is too short."""
    import obstore

    offset, views = part
    try:
        span = offset, offset + size_of(views)
        result = obstore.get(store, key, options={"range": span})
    except obstore.exceptions.BaseError as exc:
        if "status code: 416" in str(exc):  # the range begins past the end of the object
            return None
        raise
    if not _copy(result, views):
        return None
    return result.meta["e_tag"], result.meta["last_modified"]


def _copy(result: GetResult, views: Views) -> bool:
    """Copy what arrives; False if it is less than was asked for."""
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


def _never_empty(pieces: Iterable[Buffer]) -> Iterator[Buffer]:
    """The pieces, or an empty one if there are none."""
    count = 0
    for piece in pieces:
        count += 1
        yield piece
        del piece  # memory that was lent must not be kept while this waits for more
    if not count:
        yield b""


class Tuning(TypedDict, total=False):
    """Keyword arguments of all object backends."""

    endpoint: str
    """The URL of a compatible server."""
    anonymous: bool
    """Send no credentials."""
    part_bytes: int
    parallel_parts: int
    retry_seconds: float
    """How long after its first attempt a request may be repeated."""
    request_seconds: float
    """How long one attempt may take."""
    config: dict[str, str]
    """Further settings and credentials under obstore's names, such as ``access_key_id``."""


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
        """``path_style``: URLs have the bucket in their path; None: unless they are Amazon's."""
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
