"""Clients of object stores by URL: S3 and compatible stores, Google Cloud Storage, Azure.

Credentials, regions and endpoints come from the environment: ``AWS_*`` (an S3-compatible server
is named by ``AWS_ENDPOINT_URL``), ``GOOGLE_*`` and ``AZURE_*``.
"""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..errors import ShardError, StorageError
from ..retry import Backoff
from ..telemetry import EventLog
from .backend import STORE_VARIABLES, is_secret, storage_errors

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

log = EventLog("storage")

SCHEMES = ("s3", "gs", "az")
RETRIES = 8
RETRY_SECONDS = 60
"""How long requests are repeated to a store that throttles or restarts."""
BACKOFF = Backoff(first=0.1, longest=15.0)
"""Between attempts, of obstore and of listings."""
IMPATIENT_SECONDS = 4
"""How long a store may take to answer whether it is there."""
PAGE = 1000
_BROKE_OFF = "list response body"
"""In obstore's message if a response breaks off: it does not repeat such a request."""

_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL", "GOOGLE_ENDPOINT_URL"),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_SIGNATURE = re.compile(
    r"[?&](?:x-(?:amz|goog)-[\w-]+"
    r"|[\w-]*(?:sig|signature|token|secret|password|credential|accesskeyid|accessid))=",
    re.IGNORECASE,
)
"""Marks the query of a URL that grants access."""


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How to reach a store, where that differs from the environment."""

    endpoint: str = ""
    region: str = ""
    path_style: bool | None = None
    """Whether the bucket is in the path of an S3 URL; None: unless the endpoint is Amazon's."""
    anonymous: bool = False
    retries: int = RETRIES
    retry_seconds: float = RETRY_SECONDS
    request_seconds: float = 60.0
    config: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Further settings under obstore's names; they may be credentials."""

    @property
    def secrets(self) -> tuple[str, ...]:
        """The values that must not be shown."""
        return tuple(value for name, value in self.config if is_secret(name, value))


IMPATIENT = StoreOptions(
    retries=0, retry_seconds=IMPATIENT_SECONDS, request_seconds=IMPATIENT_SECONDS
)


@dataclass(frozen=True, slots=True)
class ObjectUrl:
    """The parts of ``scheme://bucket/key``; the key has no slash at either end."""

    scheme: str
    bucket: str
    key: str

    @property
    def base(self) -> str:
        """The URL of the bucket, with a slash at its end."""
        return f"{self.scheme}://{self.bucket}/"

    def __str__(self) -> str:
        return self.base + self.key


def parse_object_url(text: str) -> ObjectUrl:
    """Split an object's URL; ``ShardError`` if it names no bucket or an unknown scheme."""
    scheme, _, rest = text.partition("://")
    bucket, _, key = rest.partition("/")
    if "@" in bucket or _SIGNATURE.search(rest):
        raise ShardError(
            f"a {scheme}:// path carries credentials: give them in the environment instead"
        )
    if scheme.lower() not in SCHEMES:
        raise ShardError(
            f"{shown(text)!r} has the unknown scheme {scheme!r}: use a local path, file://, "
            + ", ".join(f"{name}://" for name in SCHEMES)
        )
    if not bucket:
        raise ShardError(f"{shown(text)!r} names no bucket: write {scheme}://bucket/path")
    return ObjectUrl(scheme.lower(), bucket, key.strip("/"))


def shown(place: str) -> str:
    """A path or URL for messages: without user, password, query and fragment."""
    scheme, separator, rest = place.partition("://")
    if not separator:
        return place
    if ":" in re.split(r"[/?#]", rest, maxsplit=1)[0]:
        rest = rest.rpartition("@")[2]  # a password may have any character in it
    host, slash, path = re.split(r"[?#]", rest, maxsplit=1)[0].partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def store_for(url: ObjectUrl, *, patient: bool = True) -> ObjectStore:
    """Return the client of a URL's bucket, configured by the environment.

    One that is not ``patient`` asks once, and not for long. ``StorageError`` in a process forked
    from one that had used a store: the client's threads do not survive a fork, and every call would
    hang.
    """
    check_process(url)
    with storage_errors("open", url.base, data=True):
        return open_store(url, StoreOptions() if patient else IMPATIENT)


def check_process(url: ObjectUrl) -> None:
    """Raise ``StorageError`` in a process that cannot use stores, as in `store_for`."""
    if _first_user() != os.getpid():
        raise StorageError(
            f"{url.base} cannot be reached from this process: it was forked from process "
            f"{_first_user()}, which had used object stores, and their threads do not survive a "
            "fork. Start it with the 'forkserver' or 'spawn' method (DataLoader: "
            "multiprocessing_context='forkserver')"
        )


@functools.cache
def _first_user() -> int:
    """The process that the clients' threads run in."""
    return os.getpid()


def open_store(url: ObjectUrl, options: StoreOptions) -> ObjectStore:
    """Return the client of a bucket; raises obstore's errors."""
    settings = tuple(
        sorted(item for item in os.environ.items() if item[0].upper().startswith(STORE_VARIABLES))
    )
    return _open_store(url.scheme, url.bucket, settings, options)


@functools.lru_cache(maxsize=64)
def _open_store(
    scheme: str, bucket: str, settings: tuple[tuple[str, str], ...], options: StoreOptions
) -> ObjectStore:
    from obstore.store import AzureStore, GCSStore, S3Store

    environment = dict(settings)
    named = (environment[name] for name in _ENDPOINTS[scheme] if environment.get(name))
    endpoint = options.endpoint or next(named, "")
    client: ClientConfig = {"timeout": timedelta(seconds=options.request_seconds)}
    if endpoint.lower().startswith("http://"):
        client["allow_http"] = True
    arguments: dict[str, Any] = {
        **dict(options.config),
        "client_options": client,
        "retry_config": _retry_config(options),
    }
    if options.anonymous:
        arguments["skip_signature"] = True
    if scheme == "gs":
        if options.endpoint:
            arguments["base_url"] = endpoint
        return GCSStore(bucket, **arguments)
    if options.endpoint:
        arguments["endpoint"] = endpoint
    if scheme == "az":
        return AzureStore(bucket, **arguments)
    if options.region:
        arguments["region"] = options.region
    if options.path_style is not None:
        arguments["virtual_hosted_style_request"] = not options.path_style
    elif endpoint and "amazonaws.com" not in endpoint:
        arguments["virtual_hosted_style_request"] = False
    return S3Store(bucket, **arguments)


def _retry_config(options: StoreOptions) -> RetryConfig:
    return {
        "max_retries": options.retries,
        "retry_timeout": timedelta(seconds=options.retry_seconds),
        "backoff": {
            "init_backoff": timedelta(seconds=BACKOFF.first),
            "max_backoff": timedelta(seconds=BACKOFF.longest),
            "base": BACKOFF.factor,
        },
    }


def list_pages(
    store: ObjectStore, under: str, retry_seconds: float
) -> Iterator[Sequence[ObjectMeta]]:
    """Yield the objects under a prefix by the page, each once. Raises obstore's errors.

    A response that breaks off is resumed from the last name; ``retry_seconds`` is how long that may
    go on without any progress.
    """
    import obstore

    def request() -> Iterator[Sequence[ObjectMeta]]:
        return iter(obstore.list(store, under or None, offset=last or None, chunk_size=PAGE))

    last, in_order = "", True
    pages, delays, deadline = request(), BACKOFF.delays(), 0.0
    while True:
        try:
            page = next(pages, None)
        except obstore.exceptions.BaseError as exc:
            delay, now = next(delays), time.monotonic()
            deadline = deadline or now + retry_seconds
            # If names do not come in order, what follows the last one is not the rest.
            can_resume = in_order and _BROKE_OFF in str(exc)
            if now + delay > deadline or not can_resume:
                raise
            log.info("storage.listing_broke_off", under=under, after=last)
            time.sleep(delay)
            pages = request()
            continue
        if page is None:
            return
        for meta in page:
            in_order = in_order and last < meta["path"]
            last = meta["path"]
        delays, deadline = BACKOFF.delays(), 0.0
        yield page
