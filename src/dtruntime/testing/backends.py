"""Storage backends that wrap another one: to record its calls, or to inject faults."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

from .._buffers import Views, cut, size_of
from ..errors import StorageError, StorageThrottledError
from ..storage import StorageBackend, StoredFile, StreamWriter
from ..storage.backend import Failures, Names, Pieces, Range


class WrappedBackend(StorageBackend):
    """Passes everything on to another backend; subclasses override what they change."""

    def __init__(self, inner: StorageBackend) -> None:
        self.inner = inner
        self.url = inner.url
        self.kind = inner.kind  # type: ignore[misc]

    def around(self, operation: str, name: str, size: int = 0) -> AbstractContextManager[Any]:
        """A block around each operation; arguments as in `Call`. Override it to act on all."""
        return nullcontext()

    def location(self, name: str = "") -> str:
        """The inner backend's."""
        return self.inner.location(name)

    def close(self) -> None:
        """Close the inner backend."""
        self.inner.close()

    def _read(self, name: str) -> bytes:
        with self.around("read", name):
            return self.inner.read(name)

    def _read_ranges(self, name: str, ranges: Sequence[Range]) -> Pieces:
        with self.around("read_ranges", name, sum(length for _, length in ranges)):
            return self.inner.read_ranges(name, ranges)

    def _read_into(self, name: str, offset: int, views: Views) -> None:
        with self.around("read_into", name, size_of(views)):
            self.inner.read_into(name, offset, views)

    def _write(self, name: str, views: Views) -> None:
        with self.around("write", name, size_of(views)):
            self.inner.write(name, views)

    def _create(self, name: str, views: Views) -> bool:
        with self.around("create", name, size_of(views)):
            return self.inner.create(name, views)

    def _writer(self, name: str) -> StreamWriter:
        with self.around("writer", name):
            return WrappedWriter(self.inner.writer(name), self)

    def _delete(self, name: str) -> None:
        with self.around("delete", name):
            self.inner.delete(name)

    def _delete_many(self, names: Names) -> Failures:
        with self.around("delete_many", "", len(names)):
            return self.inner.delete_many(names)

    def _stat(self, name: str) -> StoredFile:
        with self.around("stat", name):
            return self.inner.stat(name)

    def _list(self, prefix: str) -> Iterator[StoredFile]:
        with self.around("list", prefix):
            return self.inner.list(prefix)

    def _sweep(self, older_than: float) -> int:
        with self.around("sweep", ""):
            return self.inner.sweep(older_than)


class WrappedWriter(StreamWriter):
    """Passes everything on to another writer."""

    def __init__(self, inner: StreamWriter, backend: WrappedBackend | None = None) -> None:
        """``backend.around`` is a block around each operation, if a backend is given."""
        super().__init__(inner.name, inner.location)
        self.inner = inner
        self._around = backend.around if backend else lambda *_: nullcontext()

    def _write(self, view: memoryview) -> None:
        with self._around("writer.write", self.name, view.nbytes):
            self.inner.write(view)

    def _finish(self) -> None:
        with self._around("writer.finish", self.name):
            self.inner.finish()

    def _abort(self) -> None:
        with self._around("writer.abort", self.name):
            self.inner.abort()


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a backend."""

    operation: str
    """``read``, ``read_ranges``, ``read_into``, ``write``, ``create``, ``writer``,
    ``writer.write``, ``writer.finish``, ``writer.abort``, ``delete``, ``delete_many``, ``stat``,
    ``list`` or ``sweep``. ``read_range`` counts as ``read_ranges``; ``exists`` and ``size`` as
    ``stat``."""
    name: str
    """The file; the prefix of a listing; empty for several files."""
    size: int = 0
    """How many bytes were requested or given; for ``delete_many``, how many files."""


Calls: TypeAlias = list[Call]


class RecordingBackend(WrappedBackend):
    """Records each call, in order, before passing it on."""

    def __init__(self, inner: StorageBackend) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._calls: Calls = []

    @property
    def calls(self) -> Calls:
        """The calls so far."""
        with self._lock:
            return self._calls.copy()

    @property
    def counts(self) -> Counter[str]:
        """How often each operation was called."""
        return Counter(call.operation for call in self.calls)

    def reset(self) -> None:
        """Forget the calls so far."""
        with self._lock:
            self._calls.clear()

    def record(self, operation: str, name: str, size: int = 0) -> None:
        """Record one call."""
        with self._lock:
            self._calls.append(Call(operation, name, size))

    def around(self, operation: str, name: str, size: int = 0) -> AbstractContextManager[Any]:
        """Record the call."""
        self.record(operation, name, size)
        return nullcontext()


@dataclass(frozen=True, slots=True)
class FaultRates:
    """How likely each fault is, per operation, between 0 and 1."""

    throttle: float = 0.0
    """``StorageThrottledError``; the operation did not happen."""
    disconnect: float = 0.0
    """``StorageError``; the operation did not happen."""
    lost_reply: float = 0.0
    """``StorageError``, although the operation did happen."""
    partial_write: float = 0.0
    """``StorageError`` after some bytes of a write, none of which are visible."""
    torn_write: float = 0.0
    """``StorageError`` after some bytes of a write, which stay visible under its name: no backend
    should do this, but a broken disk or file system does."""
    latency: float = 0.0
    """The operation takes ``latency_seconds`` longer."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is a probability, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Fault:
    """One injected fault."""

    kind: str
    """A field of :class:`FaultRates`."""
    operation: str
    """As in :class:`Call`."""
    name: str
    number: int
    """The number of this operation on this name, from 1 on."""


Faults: TypeAlias = list[Fault]

_WRITES = frozenset({"write", "create", "writer.finish"})
_UNSAFE = {"partial_write", "torn_write"}
_SAFE = {"sweep", "writer.abort"}


class FaultyBackend(WrappedBackend):
    """Injects faults at random, but the same ones for the same seed.

    Whether the n-th operation of a kind on a name fails depends only on the seed, the kind, the
    name and n, not on what other threads do. ``only(operation, name)`` restricts faults to the
    calls for which it is true, ``limit`` bounds their number. Set ``armed`` to False to let
    everything pass.
    """

    def __init__(
        self,
        inner: StorageBackend,
        seed: int = 0,
        rates: FaultRates | None = None,
        *,
        latency_seconds: float = 0.01,
        only: Callable[[str, str], bool] | None = None,
        limit: int | None = None,
    ) -> None:
        super().__init__(inner)
        self.seed = seed
        self.rates = rates or FaultRates(throttle=0.1, disconnect=0.1)
        self.armed = True
        self._latency_seconds = latency_seconds
        self._only = only
        self._left = limit
        self._lock = threading.Lock()
        self._numbers: Counter[tuple[str, str]] = Counter()
        self._faults: Faults = []

    @property
    def faults(self) -> Faults:
        """The faults so far, in order."""
        with self._lock:
            return self._faults.copy()

    def draw(self, operation: str, name: str) -> tuple[str, float]:
        """Decide which fault the next operation gets, "" for none, and a number from 0 to 1."""
        with self._lock:
            self._numbers[operation, name] += 1
            number = self._numbers[operation, name]
            source = random.Random(f"{self.seed}/{operation}/{name}/{number}")
            kind, share = self._kind(source.random(), operation), source.random()
            if not kind or not self.armed or self._left == 0:
                return "", share
            if self._only is not None and not self._only(operation, name):
                return "", share
            if self._left is not None:
                self._left -= 1
            self._faults.append(Fault(kind, operation, name, number))
        return kind, share

    def _kind(self, chance: float, operation: str) -> str:
        for kind in FaultRates.__slots__:
            if kind in _UNSAFE and operation not in _WRITES:
                continue
            chance -= getattr(self.rates, kind)
            if chance < 0:
                return kind
        return ""

    @contextmanager
    def around(self, operation: str, name: str, size: int = 0) -> Iterator[tuple[str, float]]:
        """Inject faults before and after an operation; yields those that happen during a write."""
        if operation in _SAFE:
            yield "", 0.0
            return
        kind, share = self.draw(operation, name)
        what = f"{operation} of {self.location(name)}"
        if kind == "throttle":
            raise StorageThrottledError(f"cannot {what}: 503 Slow Down, on purpose")
        if kind == "disconnect":
            raise StorageError(f"cannot {what}: the connection was reset, on purpose")
        if kind == "latency":
            time.sleep(self._latency_seconds)
        yield kind, share
        if kind == "lost_reply":
            raise StorageError(f"cannot {what}: the answer was lost, on purpose")

    def _write(self, name: str, views: Views) -> None:
        with self.around("write", name) as (kind, share):
            self._break_off(kind, share, name, views)
            self.inner.write(name, views)

    def _create(self, name: str, views: Views) -> bool:
        with self.around("create", name) as (kind, share):
            self._break_off(kind, share, name, views)
            return self.inner.create(name, views)

    def _break_off(self, kind: str, share: float, name: str, views: Views) -> None:
        if kind not in _UNSAFE:
            return
        some = cut(views, 0, int(share * size_of(views)))
        if kind == "torn_write":
            self.inner.write(name, some)
        else:
            writer = self.inner.writer(name)
            for view in some:
                writer.write(view)
            writer.abort()
        raise StorageError(
            f"cannot write {self.location(name)}: broken off after {size_of(some)} bytes, "
            "on purpose"
        )

    def _writer(self, name: str) -> StreamWriter:
        with self.around("writer", name):
            return _FaultyWriter(self.inner.writer(name), self)

    def _delete_many(self, names: Names) -> Failures:
        failures: Failures = []
        for name in names:
            try:
                self._delete(name)
            except StorageError as exc:
                failures.append((name, exc))
        return failures

    def _list(self, prefix: str) -> Iterator[StoredFile]:
        """Fails at the beginning, or, when the reply is lost, after some of the files."""
        with self.around("list", prefix) as (kind, share):
            files = list(self.inner.list(prefix))
            yield from files[: int(share * len(files))] if kind == "lost_reply" else files


class _FaultyWriter(WrappedWriter):
    def __init__(self, inner: StreamWriter, backend: FaultyBackend) -> None:
        super().__init__(inner, backend)
        self._backend = backend
        self._content = bytearray()

    def _write(self, view: memoryview) -> None:
        super()._write(view)
        if self._backend.rates.torn_write:
            self._content += view

    def _finish(self) -> None:
        with self._backend.around("writer.finish", self.name) as (kind, share):
            if kind in _UNSAFE:
                if kind == "torn_write":
                    torn = self._content[: int(share * len(self._content))]
                    self._backend.inner.write(self.name, torn)
                raise StorageError(f"cannot write {self.location}: broken off, on purpose")
            self.inner.finish()
