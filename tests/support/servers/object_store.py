"""A bucket behind the real client, kept in a folder: what S3 is to the code under test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import obstore
import pytest
from obstore.store import LocalStore

from dtruntime.storage import FileStat, data_files, expand
from dtruntime.storage import object_client as client


class Bucket:
    """Objects, and the ranges of them that were fetched."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._store = LocalStore(folder)
        self.fetched: list[tuple[int, int]] = []

    def put(self, name: str, content: bytes) -> FileStat:
        """Write an object; the state that it is in then."""
        obstore.put(self._store, name, content)
        return expand(f"s3://bucket/{name}")[0]

    @contextmanager
    def reachable(self) -> Iterator[Bucket]:
        """Every bucket is this one."""
        fetch = data_files._fetch

        def spy(file: FileStat, offset: int, length: int) -> bytes:
            self.fetched.append((offset, length))
            return fetch(file, offset, length)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(client, "_open_store", lambda *_: self._store)
            patch.setattr(data_files, "_fetch", spy)
            yield self
