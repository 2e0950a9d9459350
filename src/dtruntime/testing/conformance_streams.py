"""The part of the conformance suite about streams, and about doing things at the same time."""

# ruff: noqa: D102 - a test's name says what it shows
from __future__ import annotations

import mmap
import random
import threading
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import pytest

from .._background import side_by_side
from ..errors import StorageError
from ..storage import StorageBackend


def noise(size: int, seed: int = 0) -> bytes:
    """Bytes that compress to nothing, and differ by seed."""
    return random.Random(seed).randbytes(size)


def names_in(backend: StorageBackend) -> list[str]:
    """The names of all files, sorted."""
    return sorted(file.name for file in backend.list())


_MIB = 2**20
LENT = (
    (0, 4096),
    (0, 8 * _MIB),
    (0, 100),  # from here on the file is not at a page
    (0, 5 * _MIB),
    (4096, 8 * _MIB),
    (0, 8 * _MIB - 100),
    (0, 8 * _MIB),
    (1, 5 * _MIB),
    (0, 0),
    (_MIB, 8 * _MIB),
)
"""Where pieces of memory begin and end, of which every third is not lent but written."""


class StreamConformance:
    """Tests of ``StorageBackend.writer``."""

    large_bytes: ClassVar[int] = 17 * 2**20 + 12_345
    """More than three parts, and not a whole number of anything."""

    def test_stream_is_stored_when_finished(self, backend: StorageBackend) -> None:
        writer = backend.writer("folder/file")
        for piece in (b"one ", b"", bytearray(b"two "), memoryview(b"three")):
            writer.write(piece)
        assert writer.written == 13
        assert not backend.exists("folder/file")
        assert names_in(backend) == []
        writer.finish()
        assert backend.read("folder/file") == b"one two three"

    def test_empty_stream_is_an_empty_file(self, backend: StorageBackend) -> None:
        with backend.writer("file"):
            pass
        assert backend.read("file") == b""

    def test_large_stream_is_stored_in_order(self, backend: StorageBackend) -> None:
        data = memoryview(noise(self.large_bytes))
        with backend.writer("file") as writer:
            for at in range(0, len(data), 777_777):
                writer.write(data[at : at + 777_777])
        assert backend.size("file") == len(data)
        assert backend.read("file") == data

    def test_large_file_is_written_and_read_in_parts(self, backend: StorageBackend) -> None:
        data = noise(self.large_bytes)
        backend.write("file", [data[:1_000_001], data[1_000_001:]])
        buffer = bytearray(len(data) - 11)
        backend.read_into("file", 11, buffer)
        assert buffer == data[11:]
        pieces = [bytearray(size) for size in (1, 4_999_999, 3, 6_000_000)]
        backend.read_into("file", 17, pieces)
        assert b"".join(pieces) == data[17:11_000_020]
        assert backend.read_range("file", 5_000_001, 9_000_001) == data[5_000_001:14_000_002]

    def test_buffer_may_be_changed_once_it_was_written(self, backend: StorageBackend) -> None:
        buffer = bytearray(1_500_000)
        with backend.writer("file") as writer:
            for number in range(12):
                buffer[:] = bytes([number]) * len(buffer)
                writer.write(buffer)
            buffer[:] = b"\xff" * len(buffer)
        data = backend.read("file")
        assert data == b"".join(bytes([number]) * len(buffer) for number in range(12))

    def test_lent_memory_is_stored_in_order_and_comes_back(self, backend: StorageBackend) -> None:
        pages = mmap.mmap(-1, 8 * 2**20)
        pages.write(noise(len(pages)))
        expected, back = b"", list[int]()
        with memoryview(pages) as memory, backend.writer("file") as writer:
            for number, (start, stop) in enumerate(LENT):
                piece = memory[start:stop]
                expected += bytes(piece)
                if number % 3 == 2:
                    writer.write(piece)
                    back.append(number)
                else:
                    writer.lend(piece, partial(back.append, number))
            assert writer.written == len(expected)
            writer.finish()
        assert sorted(back) == list(range(len(LENT))), "each comes back once"
        assert backend.read("file") == expected

    @pytest.mark.parametrize("size", [100, 9 * 2**20])
    def test_lent_memory_comes_back_from_an_aborted_stream(
        self, backend: StorageBackend, size: int
    ) -> None:
        back = []
        writer = backend.writer("file")
        writer.lend(mmap.mmap(-1, size), lambda: back.append(1))
        writer.abort()
        assert back == [1]
        assert names_in(backend) == []

    @pytest.mark.parametrize("size", [0, 100, 9_000_000])
    def test_aborted_stream_leaves_nothing(self, backend: StorageBackend, size: int) -> None:
        backend.write("folder/other", b"x")
        writer = backend.writer("folder/file")
        writer.write(bytes(size))
        writer.abort()
        writer.abort()
        with pytest.raises(StorageError, match="aborted"):
            writer.finish()
        with pytest.raises(StorageError, match="aborted"):
            writer.write(b"more")
        assert names_in(backend) == ["folder/other"]

    def test_stream_whose_block_raises_is_aborted(self, backend: StorageBackend) -> None:
        backend.write("file", b"before")

        def fail() -> None:
            with backend.writer("file") as writer:
                writer.write(noise(6_000_000))
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        assert backend.read("file") == b"before"

    def test_finished_stream_stays(self, backend: StorageBackend) -> None:
        with backend.writer("file") as writer:
            writer.write(b"content")
            writer.finish()
            writer.finish()
            writer.abort()
        with pytest.raises(StorageError, match="finished"):
            writer.write(b"more")
        assert backend.read("file") == b"content"

    def test_streams_may_be_open_side_by_side(self, backend: StorageBackend) -> None:
        writers = [backend.writer(f"file-{number}") for number in range(12)]
        for round_ in range(3):
            for number, writer in enumerate(writers):
                writer.write(bytes([number, round_]) * 10_000)
        for writer in writers:
            writer.finish()
        for number in range(12):
            expected = b"".join(bytes([number, round_]) * 10_000 for round_ in range(3))
            assert backend.read(f"file-{number}") == expected


class ConcurrencyConformance:
    """Tests of what happens when several threads do something at once."""

    def test_one_of_many_creators_wins(self, backend: StorageBackend) -> None:
        for name in ("round/0", "round/1", "round/2", "round/3"):
            winner = self._race(backend, name)
            assert backend.read(name) == b"%d" % winner * 1000
        assert len(names_in(backend)) == 4

    def _race(self, backend: StorageBackend, name: str) -> int:
        results: dict[int, bool] = {}
        start = threading.Barrier(8)

        def attempt(number: int) -> None:
            start.wait(30)
            results[number] = backend.create(name, b"%d" % number * 1000)

        side_by_side(range(8), attempt, 8)
        (winner,) = [number for number, won in results.items() if won]
        return winner

    def test_writers_and_deleters_do_not_disturb_each_other(self, backend: StorageBackend) -> None:
        def work(number: int) -> None:
            for round_ in range(5):
                name = f"shared/{number % 2}/{number}"
                backend.write(name, noise(10_000, number))
                assert backend.read(name) == noise(10_000, number)
                backend.delete(name)
                assert not backend.exists(name)
                backend.write(f"kept/{number}-{round_}", b"")

        side_by_side(range(8), work, 8)
        assert len(names_in(backend)) == 40

    @pytest.mark.parametrize("how", ["write", "stream"])
    def test_readers_see_old_or_new_but_never_a_mix(
        self, backend: StorageBackend, how: str
    ) -> None:
        size, rounds = 1_200_000, 6
        seen: set[int] = set()
        done = threading.Event()

        def store(number: int) -> None:
            data = bytes([number]) * (size + number)
            if how == "write":
                backend.write("file", [data[:500_000], data[500_000:]])
            else:
                with backend.writer("file") as writer:
                    writer.write(data[:700_000])
                    writer.write(data[700_000:])

        def overwrite() -> None:
            try:
                for number in range(1, rounds):
                    store(number)
            finally:
                done.set()

        def look() -> None:
            while not done.is_set() or not seen:
                data = backend.read("file")
                assert data == data[:1] * (size + data[0])
                buffer = bytearray(size)
                backend.read_into("file", 0, buffer)
                assert buffer.count(buffer[:1]) == size
                pieces = backend.read_ranges("file", [(0, 100), (size // 2, 9), (size - 100, 100)])
                assert len(set(b"".join(pieces))) == 1
                seen.add(data[0])

        store(0)
        tasks: list[Callable[[], None]] = [overwrite, look, look]
        side_by_side(tasks, lambda task: task(), len(tasks))
        assert seen
        assert backend.size("file") == size + rounds - 1
