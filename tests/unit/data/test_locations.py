"""Paths, folders, globs and URLs, and the files they name."""

from __future__ import annotations

import errno
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from dtruntime.errors import (
    ShardError,
    ShardNotFoundError,
    StorageError,
    StoragePermissionError,
    StorageThrottledError,
)
from dtruntime.storage import FileStat, download, expand, read_range, read_ranges, stream
from dtruntime.storage.backend import message_of, storage_errors
from dtruntime.storage.data_files import _fingerprint, glob_pattern
from dtruntime.storage.object_client import parse_object_url, store_for
from dtruntime.storage.urls import absolute

TREE = [
    "part-1.csv",
    "part-2.csv",
    "part-10.csv",
    "_SUCCESS",
    ".hidden.csv",
    "notes.txt",
    "b/part-1.csv",
    "b/c/part-3.CSV",
    "b/_temporary/part-9.csv",
    "b/.cache/x.csv",
    "a=1/x.csv",
    "a=2/x.csv",
]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in TREE:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path


def names(files: list[FileStat], root: Path) -> list[str]:
    return [os.path.relpath(file.url, root) for file in files]


def test_folder_is_searched_deeply_without_hidden_names(tree: Path) -> None:
    assert names(expand(tree, (".csv",)), tree) == [
        "a=1/x.csv",
        "a=2/x.csv",
        "b/c/part-3.CSV",
        "b/part-1.csv",
        "part-1.csv",
        "part-2.csv",
        "part-10.csv",
    ]
    assert "notes.txt" in names(expand(tree), tree)


PATTERNS = {
    "part-*.csv": ["part-1.csv", "part-2.csv", "part-10.csv"],
    "part-?.csv": ["part-1.csv", "part-2.csv"],
    "part-[!1]*.csv": ["part-2.csv"],
    "**/part-1.csv": ["b/part-1.csv", "part-1.csv"],
    "b/**/*.csv": ["b/part-1.csv"],
    "a=*": ["a=1/x.csv", "a=2/x.csv"],
    "a=[2-9]/*.csv": ["a=2/x.csv"],
    "b/*": ["b/c/part-3.CSV", "b/part-1.csv"],
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_glob_takes_what_it_matches(tree: Path, pattern: str) -> None:
    assert names(expand(tree / pattern, (".csv",)), tree) == PATTERNS[pattern]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_glob_on_objects_means_the_same_as_on_files(tree: Path, pattern: str) -> None:
    visible = [n for n in TREE if not any(part[0] in "._" for part in n.split("/"))]
    by_pattern = {name for name in visible if glob_pattern(pattern).fullmatch(name)}
    assert by_pattern == set(names(expand(tree / pattern), tree))


def test_file_is_taken_whatever_its_name(tree: Path) -> None:
    assert names(expand(tree / "_SUCCESS", (".csv",)), tree) == ["_SUCCESS"]
    assert names(expand(f"file://{tree}/notes.txt"), tree) == ["notes.txt"]


def test_name_with_wildcard_characters_is_taken_literally_when_it_exists(tree: Path) -> None:
    (tree / "odd[1].csv").write_text("x")
    assert names(expand(tree / "odd[1].csv"), tree) == ["odd[1].csv"]


@pytest.mark.parametrize("name", ["train-00001-of-00010", "train.tfrecord-00001-of-00010"])
def test_numbered_parts_without_ending_are_found(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("x")
    (tmp_path / "_SUCCESS").write_text("")
    assert names(expand(tmp_path, (".tfrecord",)), tmp_path) == [name]


def test_link_back_to_a_parent_is_followed_once(tree: Path) -> None:
    (tree / "b" / "loop").symlink_to(tree)
    found = names(expand(tree, (".csv",)), tree)
    assert len(found) == 7


def test_url_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/tmp")
    assert absolute("data/x.csv") == "/tmp/data/x.csv"
    assert absolute("file:///data/a%20b.csv") == "/data/a b.csv"
    assert absolute("S3://bucket//a/b/") == "s3://bucket/a/b"
    with pytest.raises(ShardError, match="unknown scheme 'ftp'"):
        absolute("ftp://host/x")
    with pytest.raises(ShardError, match="names no bucket"):
        absolute("s3:///x")
    with pytest.raises(ShardError, match="names another machine"):
        absolute("file://host/x")


def test_credentials_never_reach_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ShardError) as caught:
        parse_object_url("s3://AKIAXYZ:verysecret@bucket/x")
    assert "verysecret" not in str(caught.value)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "verysecret")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "azuresecret")
    shown = message_of(ValueError("sent verysecret and azuresecret\n\nDebug source:\nmore"))
    assert shown == "sent *** and ***"


@pytest.mark.parametrize("tag", ['"0x1F"', "0x1F"], ids=["looked up", "listed by Azure"])
def test_fingerprint_of_an_object_does_not_depend_on_how_it_was_found(tag: str) -> None:
    now = datetime.now(UTC)
    meta = {"path": "x", "last_modified": now, "size": 1, "e_tag": tag, "version": None}
    assert _fingerprint(meta) == '"0x1F"'  # type: ignore[arg-type]


def test_store_that_cannot_be_configured_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    with pytest.raises(StorageError, match=r"cannot open az://box/: .*Account must be specified"):
        expand("az://box/x.csv")


def test_missing_path_names_what_is_nearby(tree: Path) -> None:
    with pytest.raises(ShardNotFoundError, match=r"no file or folder .*part-3\.csv.* part-1\.csv"):
        expand(tree / "b" / "part-3.csv")
    with pytest.raises(ShardNotFoundError, match=r"no file matches .*check the pattern under"):
        expand(tree / "*.parquet")
    (tree / "empty").mkdir()
    with pytest.raises(ShardNotFoundError, match="has no files in it"):
        expand(tree / "empty")


def test_dangling_link_is_named(tree: Path) -> None:
    (tree / "gone.csv").symlink_to("/nowhere/x.csv")
    with pytest.raises(ShardNotFoundError, match=r"cannot read .*gone\.csv: it does not exist"):
        expand(tree, (".csv",))


def test_ranges_streams_and_downloads_give_the_same_bytes(tmp_path: Path) -> None:
    content = os.urandom(300_000)
    (tmp_path / "x.bin").write_bytes(content)
    file = expand(tmp_path / "x.bin")[0]
    assert file.is_local
    assert read_range(file, 1000, 5000) == content[1000:6000]
    assert read_range(file, 0, 0) == b""
    assert read_ranges(file, [(0, 3), (7, 2)]) == [content[:3], content[7:9]]
    assert b"".join(stream(file, 7001)) == content
    download(file, tmp_path / "new" / "y.bin")
    assert (tmp_path / "new" / "y.bin").read_bytes() == content
    assert os.listdir(tmp_path / "new") == ["y.bin"]
    with pytest.raises(ShardError, match="has 300000 bytes, and 10 at 299995 were asked for"):
        read_range(file, 299_995, 10)


def test_changed_file_is_noticed_by_every_read(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"before")
    file = expand(tmp_path / "x.bin")[0]
    (tmp_path / "x.bin").write_bytes(b"behind!")
    for read in (lambda: read_range(file, 0, 3), lambda: list(stream(file))):
        with pytest.raises(ShardError, match="has changed since it was indexed"):
            read()
    with pytest.raises(ShardError, match="has changed"):
        download(file, tmp_path / "copy.bin")
    assert not (tmp_path / "copy.bin").exists()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_store_used_before_a_fork_is_a_clear_error_in_the_child() -> None:
    url = parse_object_url("s3://bucket/key")
    store_for(url)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            store_for(url)
        except StorageError as exc:
            os.write(writing, str(exc).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    assert "multiprocessing_context='forkserver'" in os.read(reading, 10_000).decode()
    os.close(reading)


class StoreAnswerError(Exception):
    """Stands for obstore's errors, which are told by their module and text."""

    __module__ = "obstore.exceptions"


@pytest.mark.parametrize(
    ("error", "kind", "remedy"),
    [
        (StoreAnswerError("status code: 403 Forbidden"), StoragePermissionError, "use credentials"),
        (StoreAnswerError("status code: 503 SlowDown"), StorageThrottledError, "fewer requests"),
        (StoreAnswerError("connection refused"), StorageError, "connection refused"),
        (OSError(errno.EIO, "I/O error"), StorageError, "the disk fails"),
        (PermissionError(errno.EACCES, "no", "/d/x"), ShardError, "/d/x: this user has no"),
        (FileNotFoundError("gone"), ShardNotFoundError, "cannot read s3://b/x: it does not exist"),
    ],
)
def test_errors_of_data_name_the_file_and_the_remedy(
    error: Exception, kind: type[Exception], remedy: str
) -> None:
    with pytest.raises(kind, match=remedy) as caught, storage_errors("read", "s3://b/x", data=True):
        raise error
    assert type(caught.value) is kind
    assert caught.value.__cause__ is error
