"""Paths and URLs of storage, and the backends behind them."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from ..config import StorageConfig
from ..errors import ConfigError, ShardError
from .backend import StorageBackend
from .local_backend import LocalBackend
from .memory_backend import MemoryBackend
from .object_backend import (
    AzureBackend,
    GcsBackend,
    S3Backend,
    Tuning,
    lacks_obstore,
    place_of,
)
from .object_client import SCHEMES, parse_object_url, shown

_SCHEME_OF = {"s3": "s3", "gcs": "gs", "azure": "az"}
_KINDS: dict[str, Callable[..., StorageBackend]] = {
    "file": LocalBackend,
    "memory": MemoryBackend,
    "s3": S3Backend,
    "gs": GcsBackend,
    "az": AzureBackend,
}
_SLIP = re.compile(
    r"(s3a?|gs|gcs|az|azure|abfss?|file|memory|hdfs|https?)(?::(?!//)/?|//)", re.IGNORECASE
)
"""A scheme that is not followed by ``://``."""


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` lies in an object store."""
    scheme, separator, _ = os.fspath(path).partition("://")
    return bool(separator) and scheme.lower() != "file"


def absolute(path: str | os.PathLike[str]) -> str:
    """The same place in a spelling that does not depend on the working directory."""
    text = os.fspath(path)
    if is_remote(text):
        return str(parse_object_url(text))
    if text.lower().startswith("file://"):
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost"):
            raise ShardError(f"{shown(text)!r} names another machine: write file:///absolute/path")
        text = url2pathname(parts.path)
    return os.path.abspath(os.path.expanduser(text))


def open_backend(place: str | os.PathLike[str], **options: Any) -> StorageBackend:
    """Return the backend for a path or URL; nothing is touched before it is used.

    ``s3://bucket/prefix``, ``gs://``, ``az://container/prefix``, ``file:///folder``,
    ``memory://name`` or a local path. ``options`` are those of the backend's class.
    ``ConfigError`` if there can be no such place.
    """
    text = os.fspath(place)
    scheme = _scheme_of(text)
    if scheme == "memory":
        return MemoryBackend(text.partition("://")[2].strip("/") or "default", **options)
    if scheme == "file":
        return LocalBackend(_local_path(text), **options)
    location = place_of(text)
    return _KINDS[scheme](location.bucket, prefix=location.key, **options)


def backend_options(place: str) -> set[str]:
    """The names of the options that a place's backend takes; nothing is opened.

    ``ConfigError`` if there can be no such place, or it needs a package that is not installed.
    """
    scheme = _scheme_of(place)
    if scheme == "file":
        _local_path(place)
    elif scheme in SCHEMES:
        place_of(place)
        if find_spec("obstore") is None:
            raise lacks_obstore(shown(place))
    _, *rest = inspect.signature(_KINDS[scheme]).parameters.values()
    names = {one.name for one in rest if one.kind is not one.VAR_KEYWORD and one.name != "prefix"}
    takes_more = any(one.kind is one.VAR_KEYWORD for one in rest)
    return names | set(Tuning.__annotations__) if takes_more else names


def resolve_url(
    path: str | os.PathLike[str], backend: str | None, config: StorageConfig | None = None
) -> str:
    """Combine a path and the name of a backend into a place for :func:`open_backend`.

    A URL stands for itself. A plain path is a local folder for ``local``, and the prefix in the
    configured bucket for ``s3``, ``gcs`` and ``azure``; None takes the configured backend.
    """
    config = config or StorageConfig()
    text, chosen = os.fspath(path), backend or config.backend
    if chosen != "local" and chosen not in _SCHEME_OF:
        raise ConfigError(f"backend must be local, {', '.join(_SCHEME_OF)}, not {chosen!r}")
    if "://" in text:
        _check_agreement(text, backend)
        return text
    _check_spelling(text)
    if chosen == "local":
        return text
    bucket = config.bucket.partition("://")[2] or config.bucket
    if not bucket:
        raise ConfigError(
            f"backend {chosen!r} with the path {text!r} needs a bucket: set CHECKPOINT_BUCKET or "
            f"[storage] bucket, or write {_SCHEME_OF[chosen]}://bucket/path"
        )
    prefix = os.path.normpath(text).strip("/")
    return f"{_SCHEME_OF[chosen]}://{bucket.strip('/')}/{'' if prefix == '.' else prefix}"


def with_region(url: str, options: dict[str, Any], config: StorageConfig) -> dict[str, Any]:
    """Add the configured region to the options of a place in S3 that have none."""
    is_s3 = url.partition("://")[0].lower() == "s3"
    return {"region": config.region, **options} if is_s3 and config.region else options


def _scheme_of(text: str) -> str:
    """The scheme of a path or URL: one of `_KINDS`."""
    scheme, separator, _ = text.partition("://")
    if not separator:
        _check_spelling(text)
        return "file"
    if scheme.lower() not in _KINDS:
        known = ", ".join(f"{name}://" for name in (*SCHEMES, "file", "memory"))
        raise ConfigError(f"{shown(text)!r} has the unknown scheme {scheme!r}: use a path, {known}")
    return scheme.lower()


def _check_spelling(path: str) -> None:
    """Refuse a path that was meant to be a URL."""
    slip = _SLIP.match(path)
    if slip is not None:
        raise ConfigError(
            f"a place that begins with {slip[0]!r} looks like a URL but is none: write "
            f"{slip[1]}://... as text (pathlib drops a slash), or ./{slip[0]}... for a folder"
        )


def _check_agreement(url: str, backend: str | None) -> None:
    scheme = url.partition("://")[0].lower()
    if backend in _SCHEME_OF and scheme != _SCHEME_OF[backend]:
        raise ConfigError(
            f"{shown(url)!r} is not in backend {backend!r}: leave the backend out, or write "
            f"a {_SCHEME_OF[backend]}:// URL"
        )


def _local_path(text: str) -> str:
    if not text:
        raise ConfigError("the path of a storage folder is empty: name a folder or a URL")
    try:
        return absolute(text)
    except ShardError as exc:
        raise ConfigError(str(exc)) from exc
