"""Files in a local folder: durable, whole, and nowhere else."""

import errno
import fcntl
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dtruntime.errors import StorageError, StoragePermissionError
from dtruntime.storage import LocalBackend, local_writer
from dtruntime.storage.backend import PARTIAL
from dtruntime.testing.conformance import noise

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount file systems")


def names(backend: LocalBackend) -> list[str]:
    return sorted(file.name for file in backend.list())


def partials(folder: Path) -> list[Path]:
    return sorted(folder.rglob(f"{PARTIAL}*"))


@pytest.fixture
def backend(tmp_path: Path) -> LocalBackend:
    return LocalBackend(tmp_path / "root")


def store(backend: LocalBackend, how: str, name: str, data: bytes) -> None:
    if how == "stream":
        with backend.writer(name) as writer:
            writer.write(data)
    elif how == "create":
        assert backend.create(name, data)
    else:
        backend.write(name, data)


HOW = pytest.mark.parametrize("how", ["write", "create", "stream"])


@pytest.mark.parametrize("extra", [-4097, -1, 0, 511, 4096])
@pytest.mark.parametrize("blocks", [1, 3])
def test_every_size_around_a_block_is_exact(backend: LocalBackend, blocks: int, extra: int) -> None:
    size = blocks * local_writer.BLOCK + extra
    memory = mmap.mmap(-1, size + 3)
    memory[:] = noise(size + 3)
    with memoryview(memory) as view, view[:size] as aligned, view[3:] as unaligned:
        backend.write("aligned", aligned)
        backend.write("unaligned", unaligned)
        backend.write("pieces", [aligned[:4097], aligned[4097:]])
        with backend.writer("stream") as writer:
            writer.write(aligned[:100_001])
            writer.write(aligned[100_001:])
        for name, expected in (("aligned", aligned), ("unaligned", unaligned)):
            assert backend.read(name) == expected
        assert backend.read("pieces") == backend.read("stream") == aligned


def test_small_and_large_files_have_the_usual_permissions(backend: LocalBackend) -> None:
    umask = os.umask(0o027)
    try:
        backend.write("small", b"x")
        backend.write("large", bytes(2**21))
    finally:
        os.umask(umask)
    for name in ("small", "large"):
        assert os.stat(backend.location(name)).st_mode & 0o777 == 0o640


@HOW
@pytest.mark.parametrize("size", [10, 5 * 2**20])
def test_content_is_on_disk_before_the_name_and_the_name_before_the_return(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch, how: str, size: int
) -> None:
    done: list[tuple[str, str]] = []

    def record(name: str, describe: Any) -> None:
        real = getattr(os, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            what = describe(*args)
            result = real(*args, **kwargs)
            done.append((name, what))
            return result

        monkeypatch.setattr(os, name, wrapper)

    def path_of(handle: int, *_: Any) -> str:
        path = os.readlink(f"/proc/self/fd/{handle}")
        return "partial" if PARTIAL in path else os.path.relpath(path, backend.root)

    record("fsync", path_of)
    record("mkdir", lambda path, *_: os.path.basename(path))
    record("replace", lambda source, target: target)
    record("link", lambda source, target: target)
    store(backend, how, "a/b/file", bytes(size))

    publish = "link" if how == "create" else "replace"
    assert done == [
        ("mkdir", "root"),
        ("fsync", ".."),
        ("mkdir", "a"),
        ("fsync", "."),
        ("mkdir", "b"),
        ("fsync", "a"),
        ("fsync", "partial"),
        (publish, "file"),
        ("fsync", "a/b"),
    ]
    done.clear()
    LocalBackend(backend.root).write("a/b/other", b"")
    assert done[:2] == [("fsync", "."), ("fsync", "a")], "another process may have made the folders"


@HOW
def test_names_do_not_lead_through_symbolic_links(
    backend: LocalBackend, tmp_path: Path, how: str
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    backend.write("inside", b"x")
    Path(backend.location("folder")).symlink_to(outside)
    Path(backend.location("file")).symlink_to(outside / "secret")

    with pytest.raises(StorageError, match="symbolic link"):
        store(backend, how, "folder/new", b"data")
    for name in ("folder/secret", "file"):
        for call in (backend.read, backend.size, backend.exists):
            with pytest.raises(StorageError, match="symbolic link"):
                call(name)
    with pytest.raises(StorageError, match="symbolic link"):
        backend.delete("folder/secret")
    with pytest.raises(StorageError, match="symbolic link"):
        list(backend.list("folder"))
    assert names(backend) == ["inside"]
    assert sorted(os.listdir(outside)) == ["secret"]

    backend.write("file", b"a file of its own")
    assert backend.read("file") == b"a file of its own"
    assert (outside / "secret").read_bytes() == b"secret"


@HOW
def test_root_may_be_a_symbolic_link(tmp_path: Path, how: str) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    store(LocalBackend(tmp_path / "link"), how, "a/b", b"x")
    assert (tmp_path / "real/a/b").read_bytes() == b"x"


@HOW
def test_file_where_a_folder_should_be_is_named(backend: LocalBackend, how: str) -> None:
    backend.write("taken", b"x")
    backend.write("folder/file", b"y")
    with pytest.raises(StorageError, match=r"taken/below: a file .* where a folder should be"):
        store(backend, how, "taken/below", b"data")
    if how != "create":
        with pytest.raises(StorageError, match=r"folder: a folder is where the file should be"):
            store(backend, how, "folder", b"data")
    assert names(backend) == ["folder/file", "taken"]
    assert not partials(Path(backend.root))


def test_root_that_is_a_file_is_an_error_and_not_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "root").write_bytes(b"")
    backend = LocalBackend(tmp_path / "root")
    with pytest.raises(StorageError, match="where a folder should be"):
        backend.write("file", b"x")
    with pytest.raises(StorageError, match="where a folder should be"):
        names(backend)


def test_file_beside_many_failures_of_a_delete_goes(backend: LocalBackend) -> None:
    backend.write("a/file", b"x")
    backend.write("b/folder/file", b"x")
    ((name, error),) = backend.delete_many(["b/folder", "a/file", "missing"])
    assert name == "b/folder"
    assert "b/folder" in str(error)
    assert names(backend) == ["b/folder/file"]


def test_folder_that_becomes_empty_is_removed_but_never_the_root(backend: LocalBackend) -> None:
    backend.write("a/b/c/one", b"x")
    backend.write("a/two", b"x")
    backend.delete("a/b/c/one")
    assert os.listdir(backend.location("a")) == ["two"]
    backend.delete("a/two")
    assert os.listdir(backend.root) == []


def test_only_old_remains_of_dead_writers_are_swept(backend: LocalBackend) -> None:
    backend.write("folder/kept", b"x")
    folder = Path(backend.location("folder"))
    old = [folder / f"{PARTIAL}0", folder / f"{PARTIAL}locked", folder / ".strata-partia"]
    for path in old:
        path.write_bytes(b"remains")
        os.utime(path, (1, 1))
    os.utime(folder / "kept", (1, 1))
    (folder / f"{PARTIAL}fresh").write_bytes(b"being written")
    (folder / f"{PARTIAL}folder").mkdir()
    with open(old[1], "rb") as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        assert backend.sweep() == 1
        assert LocalBackend(backend.root).sweep() == 0
    left = {".strata-partia", "kept", f"{PARTIAL}folder", f"{PARTIAL}fresh", f"{PARTIAL}locked"}
    assert set(os.listdir(folder)) == left
    assert names(backend) == ["folder/.strata-partia", "folder/kept"]

    LocalBackend(backend.root).write("folder/next", b"x")
    assert not old[1].exists(), "who writes into a folder sweeps it"
    assert backend.sweep(0) == 1


def test_living_stream_is_never_swept(backend: LocalBackend) -> None:
    with backend.writer("folder/file") as writer:
        writer.write(b"x")
        (partial,) = partials(Path(backend.root))
        os.utime(partial, (1, 1))
        assert backend.sweep(0) == 0
    assert backend.read("folder/file") == b"x"


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Any]:
    """Mount a file system: its type and options; gives its folder."""
    places: list[Path] = []

    def mount(kind: str, options: str) -> Path:
        place = tmp_path / f"mounted-{len(places)}"
        place.mkdir()
        subprocess.run(["mount", "-t", kind, "-o", options, kind, str(place)], check=True)
        places.append(place)
        return place

    yield mount
    for place in places:
        subprocess.run(["umount", str(place)], check=True)


@as_root
@HOW
@pytest.mark.parametrize("size", [7 * 2**20, 30 * 2**20])
def test_full_disk_is_an_error_and_leaves_what_was_there(mounted: Any, how: str, size: int) -> None:
    place = mounted("tmpfs", "size=6m")
    backend = LocalBackend(place)
    backend.write("old", b"kept")
    with pytest.raises(StorageError, match=r"new: the disk is full: make room") as caught:
        store(backend, how, "new", bytes(size))
    assert caught.value.errno == errno.ENOSPC
    assert names(backend) == ["old"]
    assert not partials(place)
    store(backend, how, "fits", bytes(5 * 2**20))
    assert backend.size("fits") == 5 * 2**20


@as_root
@HOW
def test_read_only_file_system_is_named(mounted: Any, how: str) -> None:
    backend = LocalBackend(mounted("tmpfs", "ro"))
    with pytest.raises(StorageError, match="file system is read-only"):
        store(backend, how, "file", b"x")
    assert names(backend) == []


@as_root
@HOW
def test_file_system_without_direct_writes_is_written_through_the_cache(
    mounted: Any, how: str
) -> None:
    backend = LocalBackend(mounted("ramfs", "mode=700"))
    for name in ("one", "two"):
        store(backend, how, name, noise(9_000_001))
        assert backend.read(name) == noise(9_000_001)


def test_lent_memory_comes_back_when_the_disk_is_full(mounted: Any) -> None:
    backend = LocalBackend(mounted("tmpfs", "size=6m"))
    size, lent, back = 5 * 2**20, [], []

    def fill() -> None:
        with backend.writer("file") as writer:
            for number in range(4):
                lent.append(number)
                writer.lend(mmap.mmap(-1, size), partial(back.append, number))

    with pytest.raises(StorageError, match="disk is full"):
        fill()
    assert sorted(back) == lent
    assert names(backend) == []


@HOW
def test_system_without_direct_writes_is_written_through_the_cache(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(local_writer, "_O_DIRECT", 0)  # as on macOS
    store(backend, how, "file", noise(9_000_001))
    assert backend.read("file") == noise(9_000_001)


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not hold for root")
def test_folder_without_permission_is_named(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir(mode=0o500)
    with pytest.raises(StoragePermissionError, match="not permitted"):
        LocalBackend(tmp_path / "root").write("file", b"x")


def test_forked_child_and_its_parent_do_not_share_memory(tmp_path: Path) -> None:
    code = """
import os, sys
from dtruntime.storage import LocalBackend
backend = LocalBackend(sys.argv[1])
backend.write("parent", b"p" * 5_000_001)
child = os.fork()
who = b"p" if child else b"c"
for round_ in range(5):
    backend.write(who.decode(), who * 9_000_001)
    with backend.writer("stream-" + who.decode()) as writer:
        writer.write(who * 9_000_001)
    for name in (who.decode(), "stream-" + who.decode()):
        assert backend.read(name) == who * 9_000_001, name
if child:
    assert os.waitpid(child, 0)[1] == 0
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")


def test_write_that_outlives_the_main_thread_is_finished(tmp_path: Path) -> None:
    code = """
import sys, threading
from dtruntime.storage import LocalBackend
backend = LocalBackend(sys.argv[1])
def work():
    threading.main_thread().join()
    backend.write("file", bytes(20_000_000))
    with backend.writer("stream") as writer:
        writer.write(bytes(20_000_000))
    backend.read_into("file", 0, bytearray(20_000_000))
    print("done")
threading.Thread(target=work).start()
"""
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert (result.stdout, result.stderr) == ("done\n", "")
    assert names(LocalBackend(tmp_path)) == ["file", "stream"]


def test_file_that_is_being_written_takes_at_most_twice_its_content(tmp_path: Path) -> None:
    writer = LocalBackend(tmp_path)._writer("large")
    written = 12 * 2**20
    writer.write(bytes(written))
    (partial,) = tmp_path.glob(".strata-partial-*")
    assert partial.stat().st_blocks * 512 <= 2 * written
    writer.abort()
