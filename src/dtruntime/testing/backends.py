"""Wrappers around storage backends: what was asked of them, and faults on purpose."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from .._buffers import Views, size_of
from ..storage import StorageBackend, StoredFile, StreamWriter
from ..storage.backend import Failures, Names, Pieces, Range


class WrappedBackend(StorageBackend):
    """Passes everything on to another backend; subclasses change what they want."""

    def __init__(self, inner: StorageBackend) -> None:
        self.inner = inner
        self.url = inner.url
        self.kind = inner.kind  # type: ignore[misc]

    def location(self, name: str = "") -> str:
        """The inner backend's."""
        return self.inner.location(name)

    def close(self) -> None:
        """Close the inner backend."""
        self.inner.close()

    def _read(self, name: str) -> bytes:
        return self.inner.read(name)

    def _read_ranges(self, name: str, ranges: Sequence[Range]) -> Pieces:
        return self.inner.read_ranges(name, ranges)

    def _read_into(self, name: str, offset: int, views: Views) -> None:
        self.inner.read_into(name, offset, views)

    def _write(self, name: str, views: Views) -> None:
        self.inner.write(name, views)

    def _create(self, name: str, views: Views) -> bool:
        return self.inner.create(name, views)

    def _writer(self, name: str) -> StreamWriter:
        return WrappedWriter(self.inner.writer(name))

    def _delete(self, name: str) -> None:
        self.inner.delete(name)

    def _delete_many(self, names: Names) -> Failures:
        return self.inner.delete_many(names)

    def _stat(self, name: str) -> StoredFile:
        return self.inner.stat(name)

    def _list(self, prefix: str) -> Iterator[StoredFile]:
        return self.inner.list(prefix)

    def _sweep(self, older_than: float) -> int:
        return self.inner.sweep(older_than)


class WrappedWriter(StreamWriter):
    """Passes everything on to another writer."""

    def __init__(self, inner: StreamWriter) -> None:
        super().__init__(inner.name, inner.location)
        self.inner = inner

    def _write(self, view: memoryview) -> None:
        self.inner.write(view)

    def _finish(self) -> None:
        self.inner.finish()

    def _abort(self) -> None:
        self.inner.abort()


@dataclass(frozen=True, slots=True)
class Call:
    """One thing that was asked of a backend."""

    operation: str
    """``read``, ``read_ranges``, ``read_into``, ``write``, ``create``, ``writer``,
    ``writer.write``, ``writer.finish``, ``writer.abort``, ``delete``, ``delete_many``, ``stat``,
    ``list`` or ``sweep``. ``read_range`` counts as ``read_ranges``; ``exists`` and ``size`` as
    ``stat``."""
    name: str
    """The file; the prefix of a listing; empty for several files."""
    size: int = 0
    """How many bytes were asked for or given."""


Calls: TypeAlias = list[Call]


class RecordingBackend(WrappedBackend):
    """Keeps what was asked for, in order, before it is passed on."""

    def __init__(self, inner: StorageBackend) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._calls: Calls = []

    @property
    def calls(self) -> Calls:
        """What was asked for so far."""
        with self._lock:
            return self._calls.copy()

    @property
    def counts(self) -> Counter[str]:
        """How often each operation was asked for."""
        return Counter(call.operation for call in self.calls)

    def reset(self) -> None:
        """Forget what was asked for."""
        with self._lock:
            self._calls.clear()

    def record(self, operation: str, name: str, size: int = 0) -> None:
        """Add one."""
        with self._lock:
            self._calls.append(Call(operation, name, size))

    def _read(self, name: str) -> bytes:
        self.record("read", name)
        return super()._read(name)

    def _read_ranges(self, name: str, ranges: Sequence[Range]) -> Pieces:
        self.record("read_ranges", name, sum(length for _, length in ranges))
        return super()._read_ranges(name, ranges)

    def _read_into(self, name: str, offset: int, views: Views) -> None:
        self.record("read_into", name, size_of(views))
        super()._read_into(name, offset, views)

    def _write(self, name: str, views: Views) -> None:
        self.record("write", name, size_of(views))
        super()._write(name, views)

    def _create(self, name: str, views: Views) -> bool:
        self.record("create", name, size_of(views))
        return super()._create(name, views)

    def _writer(self, name: str) -> StreamWriter:
        self.record("writer", name)
        return _RecordingWriter(self.inner.writer(name), self)

    def _delete(self, name: str) -> None:
        self.record("delete", name)
        super()._delete(name)

    def _delete_many(self, names: Names) -> Failures:
        self.record("delete_many", "", len(names))
        return super()._delete_many(names)

    def _stat(self, name: str) -> StoredFile:
        self.record("stat", name)
        return super()._stat(name)

    def _list(self, prefix: str) -> Iterator[StoredFile]:
        self.record("list", prefix)
        return super()._list(prefix)

    def _sweep(self, older_than: float) -> int:
        self.record("sweep", "")
        return super()._sweep(older_than)


class _RecordingWriter(WrappedWriter):
    def __init__(self, inner: StreamWriter, backend: RecordingBackend) -> None:
        super().__init__(inner)
        self._backend = backend

    def _write(self, view: memoryview) -> None:
        self._backend.record("writer.write", self.name, view.nbytes)
        super()._write(view)

    def _finish(self) -> None:
        self._backend.record("writer.finish", self.name)
        super()._finish()

    def _abort(self) -> None:
        self._backend.record("writer.abort", self.name)
        super()._abort()
