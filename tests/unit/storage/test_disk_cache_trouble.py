"""The disk cache on disks that are full, read-only or gone: reading goes on, after one warning."""

from __future__ import annotations

import logging
import os
import random
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtruntime.storage import DiskCache, FileStat, disk_cache
from dtruntime.storage.disk_cache import LAYOUT
from tests.support.servers.object_store import Bucket

CONTENT = random.Random(7).randbytes(2_000_000)
PIECE = 100_000


@pytest.fixture
def file(bucket: Bucket) -> FileStat:
    return bucket.put("train.bin", CONTENT)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "strata-test", str(folder)]
    try:
        result = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("NO mount COMMAND, so a full disk is NOT TESTED")
    if result.returncode:
        pytest.skip(
            f"CANNOT MOUNT A SMALL DISK (run as root), so it is NOT TESTED: {result.stderr}"
        )
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def always_trying(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "REST_SECONDS", 0.0)


def read_all(cache: DiskCache, file: FileStat) -> bytes:
    return b"".join(cache.read_range(file, at, PIECE) for at in range(0, len(CONTENT), PIECE))


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    found = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert {record.event for record in found} <= {"cache.unusable"}  # type: ignore[attr-defined]
    return [record.fields for record in found]  # type: ignore[attr-defined]


def assert_one_warning(caplog: pytest.LogCaptureFixture, folder: Path, reason: str) -> None:
    (fields,) = warnings_of(caplog)
    assert fields["folder"] == str(folder)
    assert reason in fields["reason"]
    assert "cache_dir" in fields["remedy"]


@pytest.mark.usefixtures("always_trying")
def test_full_disk_costs_one_warning_and_what_is_kept_stays_usable(
    bucket: Bucket, file: FileStat, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(500_000))
    kept = DiskCache(small_disk)
    assert read_all(kept, file) == CONTENT
    assert_one_warning(caplog, small_disk, "No space left")
    assert not list((small_disk / LAYOUT).glob("??/*.partial"))
    bucket.fetched.clear()
    assert read_all(kept, file) == CONTENT
    assert 1 <= kept.usage().hits < 10
    assert len(bucket.fetched) == 20 - kept.usage().hits
    before = kept.usage().entries
    ballast.unlink()
    read_all(kept, file)
    assert kept.usage().entries > before, "it is used again when there is room"
    assert len(warnings_of(caplog)) == 1


def test_read_only_disk_still_gives_what_it_has(
    bucket: Bucket, file: FileStat, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    DiskCache(small_disk).read_range(file, 0, PIECE)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    bucket.fetched.clear()
    kept = DiskCache(small_disk)
    for _ in range(2):
        assert read_all(kept, file) == CONTENT
    assert kept.usage().hits == 2
    assert len(bucket.fetched) == 38
    assert_one_warning(caplog, small_disk, "Read-only file system")


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_write_that_fails_half_way_leaves_nothing(
    file: FileStat, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "cache"
    kept = DiskCache(folder)
    with largest_file(PIECE // 2):
        assert read_all(kept, file) == CONTENT
    assert_one_warning(caplog, folder, "File too large")
    assert not list((folder / LAYOUT).glob("??/*"))


def test_rest_after_a_failure_is_bounded(
    file: FileStat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = DiskCache(tmp_path / "cache")
    with largest_file(PIECE // 2):
        kept.read_range(file, 0, PIECE)
    kept.read_range(file, 0, PIECE)
    assert kept.usage().entries == 0, "it rests"
    later = time.monotonic() + disk_cache.REST_SECONDS
    monkeypatch.setattr(disk_cache, "time", SimpleNamespace(monotonic=lambda: later))
    kept.read_range(file, 0, PIECE)
    assert kept.usage().entries == 1


@pytest.mark.usefixtures("always_trying")
def test_folder_that_vanishes_is_not_made_again(
    file: FileStat, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "disk" / "cache"
    kept = DiskCache(folder)
    assert read_all(kept, file) == CONTENT
    shutil.rmtree(folder)
    for _ in range(2):
        assert read_all(kept, file) == CONTENT
    assert not folder.exists(), "it may have been a disk that was unmounted"
    assert_one_warning(caplog, folder, "No such file or directory")
    assert kept.usage().entries == 0
    kept.clear()


@pytest.mark.usefixtures("always_trying")
def test_entries_deleted_by_hand_are_fetched_again(
    file: FileStat, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "cache"
    kept = DiskCache(folder)
    read_all(kept, file)
    shutil.rmtree(folder / LAYOUT)
    for _ in range(2):
        assert read_all(kept, file) == CONTENT
    assert kept.usage().hits == 20
    assert warnings_of(caplog) == []


def test_folder_that_is_a_file_costs_one_warning(
    file: FileStat, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "occupied").write_bytes(b"mine")
    folder = tmp_path / "occupied"
    kept = DiskCache(folder)
    for _ in range(2):
        assert read_all(kept, file) == CONTENT
    assert_one_warning(caplog, folder, "Not a directory")
    assert kept.usage().entries == 0
    assert folder.read_bytes() == b"mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not hold for root")
def test_folder_without_permission_costs_one_warning(
    file: FileStat, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o500)
    assert read_all(DiskCache(folder), file) == CONTENT
    assert_one_warning(caplog, folder, "Permission denied")
