"""A prefix of a bucket to measure under, and the store without Strata: obstore alone."""

from __future__ import annotations

import secrets

import numpy as np
from numpy.typing import NDArray

from .._background import side_by_side
from ..errors import StorageError
from ..storage import open_backend
from ..storage.error_translation import storage_errors
from ..storage.object_store.client import parse_object_url, store_for
from ..storage.object_store.object_backend import (
    PARALLEL_PARTS,
    PART_BYTES,
    lacks_obstore,
    place_of,
)
from .raw_storage import PREFIX


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
