"""Folders and memory keep every promise of a storage backend."""

import itertools
from pathlib import Path

import pytest

from dtruntime.storage import LocalBackend, MemoryBackend, open_backend
from dtruntime.testing.conformance import StorageConformance

_spaces = itertools.count()


class TestLocal(StorageConformance):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> LocalBackend:
        return LocalBackend(tmp_path / "made" / "when needed")


class TestLocalThroughThePageCache(StorageConformance):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> LocalBackend:
        return LocalBackend(tmp_path, direct=False)


class TestMemory(StorageConformance):
    @pytest.fixture
    def backend(self) -> MemoryBackend:
        backend = open_backend(f"memory://conformance-{next(_spaces)}")
        assert isinstance(backend, MemoryBackend)
        return backend
