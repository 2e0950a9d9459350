"""Backends that fail on purpose do it as they say, and the same way every time."""

import itertools
from pathlib import Path

import pytest

from dtruntime._background import side_by_side
from dtruntime.errors import StorageError, StorageThrottledError
from dtruntime.storage import LocalBackend, MemoryBackend, StorageBackend
from dtruntime.testing import (
    Call,
    Fault,
    FaultRates,
    FaultyBackend,
    RecordingBackend,
    StorageConformance,
    WrappedWriter,
)

_spaces = itertools.count()


@pytest.fixture
def memory() -> MemoryBackend:
    return MemoryBackend(f"faults-{next(_spaces)}")


class TestRecording(StorageConformance):
    @pytest.fixture
    def backend(self, memory: MemoryBackend) -> RecordingBackend:
        return RecordingBackend(memory)


class TestFaultyWithoutFaults(StorageConformance):
    @pytest.fixture
    def backend(self, memory: MemoryBackend) -> FaultyBackend:
        return FaultyBackend(memory, rates=FaultRates())


def stream(backend: StorageBackend, name: str, data: bytes) -> None:
    with backend.writer(name) as writer:
        writer.write(data)


def every_operation(backend: StorageBackend, name: str) -> list[str]:
    """Do everything once; the kinds of the errors, "" where there was none."""
    outcomes = []
    for operation in (
        lambda: backend.write(name, b"0123456789" * 100),
        lambda: backend.read(name),
        lambda: backend.read_range(name, 1, 5),
        lambda: backend.read_into(name, 0, bytearray(10)),
        lambda: backend.create(f"{name}-created", b"abc"),
        lambda: stream(backend, f"{name}-streamed", b"abc"),
        lambda: list(backend.list()),
        lambda: backend.size(name),
        lambda: backend.delete(name),
        lambda: backend.delete_many([name, f"{name}-created"]),
    ):
        try:
            operation()
            outcomes.append("")
        except StorageError as exc:
            outcomes.append(type(exc).__name__)
    return outcomes


def test_same_seed_makes_the_same_faults_whatever_other_threads_do(memory: MemoryBackend) -> None:
    rates = FaultRates(throttle=0.1, disconnect=0.1, lost_reply=0.1, partial_write=0.2)

    def run(seed: int, lanes: int) -> tuple[set[Fault], dict[str, list[str]]]:
        backend = FaultyBackend(MemoryBackend(f"seeded-{next(_spaces)}"), seed, rates)
        found: dict[str, list[str]] = {}

        def work(number: int) -> None:
            try:
                for round_ in range(6):
                    backend.write(f"file-{number}", b"x" * round_)
            except StorageError as exc:
                found[f"file-{number}"] = [type(exc).__name__]

        side_by_side(range(20), work, lanes)
        return set(backend.faults), found

    alone = run(3, 1)
    assert alone[0]
    assert run(3, 8) == alone
    assert run(4, 1) != alone


@pytest.mark.parametrize(
    ("rates", "error"),
    [
        (FaultRates(throttle=1), "StorageThrottledError"),
        (FaultRates(disconnect=1), "StorageError"),
    ],
)
def test_every_operation_fails_and_nothing_happens(
    memory: MemoryBackend, rates: FaultRates, error: str
) -> None:
    memory.write("file", b"before")
    assert set(every_operation(FaultyBackend(memory, 0, rates), "file")[:-1]) == {error}
    assert {f.name: memory.read(f.name) for f in memory.list()} == {"file": b"before"}


def test_lost_reply_comes_after_the_effect(memory: MemoryBackend) -> None:
    backend = FaultyBackend(memory, 0, FaultRates(lost_reply=1), only=lambda op, _: op == "create")
    with pytest.raises(StorageError, match="answer was lost"):
        backend.create("file", b"data")
    assert memory.read("file") == b"data"
    everywhere = FaultyBackend(memory, 0, FaultRates(lost_reply=1))
    memory.write("other", b"")
    seen = []
    with pytest.raises(StorageError, match="answer was lost"):
        seen.extend(everywhere.list())


def test_partial_write_leaves_nothing_to_see(tmp_path: Path) -> None:
    local = LocalBackend(tmp_path)
    local.write("file", b"before")
    backend = FaultyBackend(local, 0, FaultRates(partial_write=1))
    for attempt in (backend.write, backend.create, lambda n, d: stream(backend, n, d)):
        with pytest.raises(StorageError, match="broken off"):
            attempt("file", b"after" * 1000)
        with pytest.raises(StorageError, match="broken off"):
            attempt("new", b"after" * 1000)
    assert [file.name for file in local.list()] == ["file"]
    assert local.read("file") == b"before"
    assert len(backend.faults) == 6


@pytest.mark.parametrize("how", ["write", "stream"])
def test_torn_write_leaves_the_beginning(memory: MemoryBackend, how: str) -> None:
    backend = FaultyBackend(memory, 1, FaultRates(torn_write=1))
    data = bytes(range(256)) * 10
    with pytest.raises(StorageError, match="broken off"):
        backend.write("file", data) if how == "write" else stream(backend, "file", data)
    torn = memory.read("file")
    assert len(torn) < len(data)
    assert data.startswith(torn)


def test_faults_are_limited_to_what_is_wanted(memory: MemoryBackend) -> None:
    backend = FaultyBackend(
        memory, 0, FaultRates(throttle=1), only=lambda op, name: name == "bad", limit=2
    )
    backend.write("good", b"")
    for _ in range(2):
        with pytest.raises(StorageThrottledError, match="bad"):
            backend.write("bad", b"")
    backend.write("bad", b"")
    assert [fault.number for fault in backend.faults] == [1, 2]
    disarmed = FaultyBackend(memory, 0, FaultRates(throttle=1))
    disarmed.armed = False
    assert set(every_operation(disarmed, "bad")) == {""}


def test_one_failed_delete_does_not_stop_the_others(memory: MemoryBackend) -> None:
    for name in "abc":
        memory.write(name, b"")
    backend = FaultyBackend(memory, 0, FaultRates(disconnect=1), only=lambda _, name: name == "b")
    assert [name for name, _ in backend.delete_many("abc")] == ["b"]
    assert [file.name for file in memory.list()] == ["b"]


def test_rate_that_is_no_probability_is_refused() -> None:
    with pytest.raises(ValueError, match="throttle is a probability"):
        FaultRates(throttle=1.5)


def test_requests_are_counted_and_told(memory: MemoryBackend) -> None:
    backend = RecordingBackend(memory)
    assert set(every_operation(backend, "file")) == {""}
    assert backend.calls[0] == Call("write", "file", 1000)
    assert Call("read_ranges", "file", 5) in backend.calls
    assert Call("writer.write", "file-streamed", 3) in backend.calls
    assert backend.counts["writer.finish"] == backend.counts["delete_many"] == 1
    backend.reset()
    assert backend.calls == []


def test_writer_can_be_wrapped_without_a_backend(memory: MemoryBackend) -> None:
    with WrappedWriter(memory.writer("file")) as writer:
        writer.write(b"content")
    assert memory.read("file") == b"content"
