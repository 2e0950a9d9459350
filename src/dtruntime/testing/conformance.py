"""What a storage backend has to pass: every promise of ``StorageBackend``, as tests.

Subclass :class:`StorageConformance` in a test module and give it a ``backend``::

    class TestMyBackend(StorageConformance):
        @pytest.fixture
        def backend(self, tmp_path):
            return MyBackend(tmp_path)

Call ``pytest.register_assert_rewrite("dtruntime.testing.conformance")`` in a ``conftest.py`` to see
the values in failed assertions.
"""

# ruff: noqa: D102 - a test's name says what it shows
from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

from ..errors import StorageError, StorageNotFoundError
from ..storage import StorageBackend
from .conformance_streams import ConcurrencyConformance, StreamConformance, noise

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


class StorageConformance(StreamConformance, ConcurrencyConformance):
    """Tests of a backend that is empty at the beginning of each."""

    odd_names: ClassVar[list[str]] = ODD_NAMES

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
        found = {file.name: file for file in backend.list()}
        assert {name: file.size for name, file in found.items()} == {"old": 5, "new": 0}
        assert found["old"].modified > 1.6e9
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
