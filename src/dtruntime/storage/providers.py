"""The object stores by name: S3 and what speaks its protocol, Google Cloud Storage, Azure."""

from __future__ import annotations

import re
from typing import Any, TypedDict, Unpack

from .object_store.client import RETRY_SECONDS, StoreOptions
from .object_store.object_backend import PARALLEL_PARTS, PART_BYTES, ObjectBackend, place_of

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
