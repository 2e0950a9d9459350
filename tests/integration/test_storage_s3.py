"""A real S3 server keeps every promise of a storage backend."""

import itertools
from collections.abc import Iterator

import pytest

from dtruntime.storage import S3Backend
from dtruntime.testing.conformance import StorageConformance

_places = itertools.count()


class TestS3(StorageConformance):
    @pytest.fixture
    def backend(
        self, s3_server: dict[str, str], monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[S3Backend]:
        for name, value in s3_server.items():
            monkeypatch.setenv(name, value)
        with S3Backend("backend", prefix=f"place/{next(_places)}", part_bytes=5 * 2**20) as backend:
            yield backend
