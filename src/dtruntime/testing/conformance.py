"""A test suite for storage backends: every promise of ``StorageBackend``.

Subclass :class:`StorageConformance` in a test module and give it a ``backend``::

    class TestMyBackend(StorageConformance):
        @pytest.fixture
        def backend(self, tmp_path):
            return MyBackend(tmp_path)

Call ``pytest.register_assert_rewrite("dtruntime.testing.conformance")`` in a ``conftest.py`` to see
the values in failed assertions.
"""

from __future__ import annotations

import mmap
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest

from .._background import side_by_side
from ..errors import StorageError, StorageNotFoundError
from ..storage import StorageBackend

# ruff: noqa: D102 - a test's name says what it shows


def noise(size: int, seed: int = 0) -> bytes:
    """Random bytes, by seed."""
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
"""Bounds of pieces of memory; every third is written, the others are lent."""

BAD_NAMES = [
    *("", "/", "/a", "a/", "a//b", ".", "..", "a/../b", "./a", "a/."),
    *("a\\b", "a\0b", "a\nb", "a\x7fb", "x" * 256, "/".join(["y" * 200] * 5)),
    *("\ud800", ".strata-partial-1", "a/.strata-partial-0123456789abcdef"),
]
ODD_NAMES = [
    *("plain", "a/b/c/d/e/f", ".hidden", "dots...", "with space", " leading", "trailing "),
    *("ünïcode/文件/🎉.bin", "percent%41%2F", "a#b?c=d&e", "~tilde*star", "quote'\"<>|", "a+b:c@d"),
    *("[brackets]{braces}", "caret^`", "e\u0301-not-composed", "x" * 255, "a=1/b=2,c;d!$()"),
]


class StorageConformance:
    """Tests of a backend, which is empty at the beginning of each."""

    odd_names: ClassVar[list[str]] = ODD_NAMES
    large_bytes: ClassVar[int] = 17 * 2**20 + 12_345
    """More than three parts, and not a whole number of anything."""

    @pytest.fixture
    def backend(self) -> Iterator[StorageBackend]:
        """Return an empty backend; override this."""
        raise NotImplementedError("override the fixture `backend`")

    @pytest.mark.parametrize(
        "data",
        [b"", b"x", bytearray(b"abc"), memoryview(b"0123456789")[3:7], noise(3 * 2**20 + 5)],
        ids=["empty", "one byte", "bytearray", "part of a view", "megabytes"],
    )
    def test_what_was_written_is_read(self, backend: StorageBackend, data: bytes) -> None:
        backend.write("folder/file", data)
        assert backend.read("folder/file") == data
        assert backend.size("folder/file") == len(data)

    def test_pieces_are_stored_one_after_the_other(self, backend: StorageBackend) -> None:
        numbers = np.arange(300_000, dtype=np.float64).reshape(3, -1)
        pieces: list[Any] = [
            b"head",
            b"",
            numbers,
            np.zeros((0, 4)),
            memoryview(noise(70_001))[1:],
            b".",
        ]
        backend.write("file", pieces)
        assert backend.read("file") == b"".join(bytes(piece) for piece in pieces)

    def test_a_sequence_without_bytes_is_an_empty_file(self, backend: StorageBackend) -> None:
        backend.write("none", [])
        backend.write("empty", [b"", b""])
        assert (backend.read("none"), backend.size("empty")) == (b"", 0)

    def test_what_is_not_memory_is_refused(self, backend: StorageBackend) -> None:
        for data in ("text", 5, None, ["text"], {1, 2}, np.zeros((4, 4))[:, ::2]):
            with pytest.raises(TypeError):
                backend.write("file", data)  # type: ignore[arg-type]
            with pytest.raises(TypeError):
                backend.create("file", data)  # type: ignore[arg-type]
        assert not backend.exists("file")

    def test_write_replaces_what_was_there(self, backend: StorageBackend) -> None:
        for data in (b"first", noise(2**20), b"", b"last"):
            backend.write("file", data)
            assert backend.read("file") == data
        assert [file.name for file in backend.list()] == ["file"]

    @pytest.mark.parametrize("name", BAD_NAMES)
    def test_bad_name_is_refused_by_every_method(self, backend: StorageBackend, name: str) -> None:
        for call in (
            lambda: backend.read(name),
            lambda: backend.read_range(name, 0, 1),
            lambda: backend.read_ranges(name, [(0, 1)]),
            lambda: backend.read_into(name, 0, bytearray(1)),
            lambda: backend.write(name, b""),
            lambda: backend.create(name, b""),
            lambda: backend.writer(name),
            lambda: backend.delete(name),
            lambda: backend.delete_many(["good", name]),
            lambda: backend.exists(name),
            lambda: backend.size(name),
        ):
            with pytest.raises(ValueError, match="cannot be a name"):
                call()
        assert list(backend.list()) == []

    def test_odd_names_are_kept_as_they_are(self, backend: StorageBackend) -> None:
        for name in self.odd_names:
            backend.write(name, name.encode())
        assert sorted(file.name for file in backend.list()) == sorted(self.odd_names)
        for name in self.odd_names:
            assert backend.read(name) == name.encode()
        assert backend.delete_many(self.odd_names) == []
        assert list(backend.list()) == []

    def test_missing_file_is_not_found(self, backend: StorageBackend) -> None:
        backend.write("folder/other", b"x")
        for name in ("folder/file", "file", "folder", "folder/other/below"):
            for call in (
                lambda name=name: backend.read(name),
                lambda name=name: backend.read_range(name, 0, 1),
                lambda name=name: backend.read_range(name, 0, 0),
                lambda name=name: backend.read_ranges(name, [(0, 1), (5, 2)]),
                lambda name=name: backend.read_into(name, 0, bytearray(1)),
                lambda name=name: backend.size(name),
            ):
                with pytest.raises(StorageNotFoundError) as caught:
                    call()
                assert isinstance(caught.value, FileNotFoundError)
                assert name in str(caught.value)
            assert not backend.exists(name)

    def test_ranges_are_read_exactly(self, backend: StorageBackend) -> None:
        data = noise(200_000)
        backend.write("file", data)
        spans = [(0, 1), (199_999, 1), (5, 100), (105, 7), (50_000, 90_000), (0, 200_000), (5, 0)]
        assert backend.read_ranges("file", spans) == [data[a : a + n] for a, n in spans]
        assert backend.read_range("file", 17, 4000) == data[17:4017]
        assert backend.read_ranges("file", []) == []

    def test_range_without_bytes_is_empty(self, backend: StorageBackend) -> None:
        backend.write("file", b"abc")
        backend.write("empty", b"")
        assert [backend.read_range("file", at, 0) for at in (0, 2, 3)] == [b"", b"", b""]
        assert backend.read_range("empty", 0, 0) == b""
        backend.read_into("file", 1, bytearray())

    @pytest.mark.parametrize(("offset", "length"), [(0, 4), (2, 2), (3, 1), (4, 0), (99, 5)])
    def test_range_beyond_the_end_is_an_error(
        self, backend: StorageBackend, offset: int, length: int
    ) -> None:
        backend.write("file", b"abc")
        with pytest.raises(StorageError, match="file"):
            backend.read_range("file", offset, length)
        with pytest.raises(StorageError, match="file"):
            backend.read_ranges("file", [(0, 1), (offset, length)])
        with pytest.raises(StorageError, match="file"):
            backend.read_into("file", offset, bytearray(length))

    def test_negative_range_is_a_value_error(self, backend: StorageBackend) -> None:
        backend.write("file", b"abc")
        for offset, length in ((-1, 1), (0, -1)):
            with pytest.raises(ValueError, match="negative"):
                backend.read_range("file", offset, length)
        with pytest.raises(ValueError, match="negative"):
            backend.read_into("file", -1, bytearray(1))

    def test_memory_of_an_array_is_filled(self, backend: StorageBackend) -> None:
        numbers = np.arange(1_000_000, dtype=np.int32)
        backend.write("file", [b"head", numbers])
        target = np.zeros((1000, 1000), dtype=np.int32)
        backend.read_into("file", 4, target)
        assert np.array_equal(target.ravel(), numbers)
        with pytest.raises(TypeError, match="read-only"):
            backend.read_into("file", 0, b"1234")

    def test_several_buffers_are_filled_one_after_the_other(self, backend: StorageBackend) -> None:
        data = noise(300_000)
        backend.write("file", data)
        whole, many = bytearray(100_000), [bytearray(3) for _ in range(2000)]
        backend.read_into("file", 7, [whole, bytearray(), *many])
        assert whole == data[7:100_007]
        assert b"".join(many) == data[100_007:106_007]
        with pytest.raises(StorageError, match="file"):
            backend.read_into("file", 0, [bytearray(299_999), bytearray(2)])
        with pytest.raises(TypeError, match="read-only"):
            backend.read_into("file", 0, [bytearray(1), b"1"])

    def test_create_keeps_what_was_there(self, backend: StorageBackend) -> None:
        assert backend.create("folder/file", [b"fi", b"rst"])
        assert not backend.create("folder/file", b"second")
        assert backend.read("folder/file") == b"first"
        backend.delete("folder/file")
        assert backend.create("folder/file", b"")
        assert not backend.create("folder/file", noise(2**20))
        assert backend.read("folder/file") == b""

    def test_delete_may_be_repeated(self, backend: StorageBackend) -> None:
        backend.write("a/b/c", b"x")
        backend.write("a/d", b"y")
        for _ in range(2):
            backend.delete("a/b/c")
            assert [file.name for file in backend.list()] == ["a/d"]
        backend.delete("never/there")
        backend.write("a/b/c", b"again")
        assert backend.read("a/b/c") == b"again"

    def test_many_are_deleted_whether_there_or_not(self, backend: StorageBackend) -> None:
        names = [f"folder-{number % 3}/{number}" for number in range(30)]
        for name in names:
            backend.write(name, b"x")
        assert backend.delete_many([*names[5:], "missing", "folder-1/missing"]) == []
        assert sorted(file.name for file in backend.list()) == sorted(names[:5])
        assert backend.delete_many([]) == []

    def test_listing_tells_sizes_and_times(self, backend: StorageBackend) -> None:
        backend.write("old", b"12345")
        backend.write("new", b"")
        files = {file.name: file for file in backend.list()}
        assert {name: file.size for name, file in files.items()} == {"old": 5, "new": 0}
        assert files["old"].modified > 1.6e9
        assert (backend.stat("old").name, backend.stat("old").size) == ("old", 5)

    def test_prefix_counts_in_whole_parts(self, backend: StorageBackend) -> None:
        for name in ("a/b/c", "a/b/d/e", "a/bc", "a/b.x", "ab", "b/a/b/c"):
            backend.write(name, b"")
        for prefix in ("a/b", "a/b/"):
            assert sorted(file.name for file in backend.list(prefix)) == ["a/b/c", "a/b/d/e"]
        assert list(backend.list("a/b/c")) == []
        assert list(backend.list("nothing")) == []
        assert len(list(backend.list())) == 6
        for prefix in ("/", "/a", "a//", "..", "a/.."):
            with pytest.raises(ValueError, match="cannot be a name"):
                list(backend.list(prefix))

    def test_location_names_the_file(self, backend: StorageBackend) -> None:
        assert backend.location("a/b").endswith("a/b")
        assert backend.url in repr(backend)

    # Streams

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

    # Concurrency

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
