"""Files in the memory of this process, for tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

from .._buffers import Views, scatter, size_of
from ..errors import StorageNotFoundError
from .backend import Failures, Names, Pieces, Range, StorageBackend, StoredFile, StreamWriter

_Files = dict[str, tuple[bytes, float]]

_shared: dict[str, _Files] = {}
_lock = threading.Lock()


class MemoryBackend(StorageBackend):
    """Files by name, shared by all backends of one ``space`` in this process."""

    kind = "memory"

    def __init__(self, space: str = "default") -> None:
        self.url = f"memory://{space}"
        with _lock:
            self._files = _shared.setdefault(space, {})

    def location(self, name: str = "") -> str:
        """The URL."""
        return f"{self.url}/{name}" if name else self.url

    def _find(self, name: str) -> tuple[bytes, float]:
        try:
            return self._files[name]
        except KeyError:
            raise StorageNotFoundError(
                f"cannot read {self.location(name)}: it does not exist"
            ) from None

    def _read(self, name: str) -> bytes:
        return self._find(name)[0]

    def _read_ranges(self, name: str, ranges: Sequence[Range]) -> Pieces:
        data = self._find(name)[0]
        for offset, length in ranges:
            if offset + length > len(data):
                raise self._too_short(name, len(data), offset, length)
        return [data[offset : offset + length] for offset, length in ranges]

    def _read_into(self, name: str, offset: int, views: Views) -> None:
        (data,) = self._read_ranges(name, [(offset, size_of(views))])
        scatter(memoryview(data), views)

    def _write(self, name: str, views: Views) -> None:
        self._files[name] = b"".join(views), time.time()

    def _create(self, name: str, views: Views) -> bool:
        file = b"".join(views), time.time()
        return self._files.setdefault(name, file) is file

    def _writer(self, name: str) -> StreamWriter:
        return _MemoryWriter(self, name)

    def _delete(self, name: str) -> None:
        self._files.pop(name, None)

    def _delete_many(self, names: Names) -> Failures:
        for name in names:
            self._delete(name)
        return []

    def _stat(self, name: str) -> StoredFile:
        data, modified = self._find(name)
        return StoredFile(name, len(data), modified)

    def _list(self, prefix: str) -> Iterator[StoredFile]:
        under = f"{prefix}/" if prefix else ""
        for name, (data, modified) in list(self._files.items()):
            if name.startswith(under):
                yield StoredFile(name, len(data), modified)


class _MemoryWriter(StreamWriter):
    def __init__(self, backend: MemoryBackend, name: str) -> None:
        super().__init__(name, backend.location(name))
        self._backend = backend
        self._pieces: list[bytes] = []

    def _write(self, view: memoryview) -> None:
        self._pieces.append(bytes(view))

    def _finish(self) -> None:
        self._backend.write(self.name, self._pieces)

    def _abort(self) -> None:
        self._pieces.clear()
