"""Fixtures for what is read from object stores."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.servers.object_store import Bucket


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[Bucket]:
    with Bucket(tmp_path / "bucket").reachable() as bucket:
        yield bucket
