"""Disks that are full or read-only, stores that refuse, throttle and go away, company, copies."""

import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtruntime.checkpoint.manager import CheckpointManager
from dtruntime.errors import StorageError, StoragePermissionError, StorageThrottledError
from dtruntime.storage.backend import PARTIAL
from dtruntime.testing import TcpProxy, eventually
from tests.support.kill_rounds import Savers, let_partial_files_age
from tests.support.programs.checkpoint_savers import KEEP, content, load, same
from tests.support.servers.http_faults import HttpFaults
from tests.support.servers.s3_server import SECRET

MEGABYTE = 2**20


@pytest.fixture(scope="module")
def savers() -> Iterator[Savers]:
    with Savers() as started:
        yield started


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 10 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=10m", "strata-test", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("THERE IS NO mount HERE, so full disks are NOT TESTED")
    if done.returncode:
        pytest.skip(f"CANNOT MOUNT A SMALL DISK, so full disks are NOT TESTED: {done.stderr}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def free(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def noise(step: int, size: int = 2 * MEGABYTE) -> bytes:
    return np.random.default_rng(step).bytes(size)


def test_full_disk_fails_the_save_and_loses_nothing(small_disk: Path) -> None:
    with CheckpointManager(small_disk, keep_count=2) as manager:
        for step in (1, 2):
            manager.save(noise(step), step).wait()
        filler = small_disk / "somebody else's"
        filler.write_bytes(bytes(free(small_disk) - MEGABYTE))
        before = free(small_disk)
        for step in (3, 4):
            with pytest.raises(StorageError, match="the disk is full: make room"):
                manager.save(noise(step), step).wait()
            assert free(small_disk) == before, "nothing of it is left"
        assert [manager.load_bytes(step) for step in manager.steps()] == [noise(1), noise(2)]
        filler.unlink()
        manager.save(noise(5), 5).wait()
        assert manager.steps() == [2, 5]
        assert manager.load_bytes() == noise(5)


def test_disk_filled_by_dead_writers_is_cleared_before_the_first_save(small_disk: Path) -> None:
    with CheckpointManager(small_disk) as manager:
        manager.save(noise(1), 1).wait()
    left = small_disk / "packs" / "000000000009-s0123456789ab-left.pack"
    left.write_bytes(bytes(4 * MEGABYTE))
    partial = small_disk / "packs" / ".strata-partial-0123456789abcdef"
    partial.write_bytes(bytes(3 * MEGABYTE))
    let_partial_files_age(small_disk)
    with CheckpointManager(small_disk) as manager:
        manager.save(noise(2, 6 * MEGABYTE), 2).wait()
        assert manager.steps() == [1, 2]
        assert manager.load_bytes(1) == noise(1)
    assert not left.exists()
    assert not partial.exists()


def test_partial_files_of_killed_processes_go_with_the_next_save(
    savers: Savers, tmp_path: Path
) -> None:
    seen = 0
    for operation in range(3, 30, 3):
        arguments = {"url": str(tmp_path), "mode": "full", "step": operation, "saves": 1000}
        saver = savers.start("save_on", operation=operation, **arguments)
        assert saver.wait() == -signal.SIGKILL, saver.said
        left = [path for path in tmp_path.rglob(f"{PARTIAL}*") if path.is_file()]
        seen += len(left)
        assert len(left) <= 2, "of the process that was killed last, and of no other"
    assert seen, "no process was killed in the middle of a write"
    saver = savers.start("save_on", url=str(tmp_path), mode="full", step=100, saves=1)
    assert saver.wait() == 0, saver.said
    assert not list(tmp_path.rglob(f"{PARTIAL}*"))


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder that every user can reach."""
    with tempfile.TemporaryDirectory(prefix="strata-test-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


def test_folder_that_may_only_be_read_loads_and_refuses_saves(
    savers: Savers, public_folder: Path
) -> None:
    place = public_folder / "ckpt"
    with CheckpointManager(place) as manager:
        manager.save(content("full", 1), 1).wait()
    for path in [place, *place.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = sorted(place.rglob("*"))
    try:
        reader = savers.start("look_as_nobody", url=str(place), mode="full", step=1)
        assert reader.wait() == 0, reader.said
        assert reader.said[0] == "right"
        assert "StoragePermissionError" in reader.said[1]
        assert "change the permissions" in reader.said[1]
        assert reader.said[2] == "found [1]"
        assert sorted(place.rglob("*")) == before
    finally:
        for path in [place, *place.rglob("*")]:
            path.chmod(0o755)


@pytest.mark.parametrize("mode", ["full", "incremental"])
def test_two_processes_may_save_to_one_folder(savers: Savers, tmp_path: Path, mode: str) -> None:
    url = str(tmp_path)
    running = [
        savers.start("save_on", url=url, mode=mode, step=first, saves=12) for first in (100, 500)
    ]
    for saver in running:
        code = saver.wait()
        # An increment may come to nothing because the other one clears away what it refers to.
        refused = any("was removed while a checkpoint" in line for line in saver.said)
        assert code == 0 or (mode == "incremental" and refused), saver.said
    with CheckpointManager(tmp_path) as manager:
        assert len(manager.steps()) in (KEEP[mode], KEEP[mode] + 1)
        for step in manager.steps():
            assert same(load(manager, mode, step), content(mode, step))
        assert set(manager.steps()) & {running[0].committed, running[1].committed}
    with CheckpointManager(tmp_path, keep_count=KEEP[mode]) as manager:
        manager.save(content(mode, 900), 900).wait()
        manager.wait()
        assert len(manager.steps()) == KEEP[mode]
        assert same(load(manager, mode), content(mode, 900))


@pytest.mark.parametrize("left_out", ["", "locks", "latest.json"])
def test_copied_folder_is_a_place_like_any_other(tmp_path: Path, left_out: str) -> None:
    with CheckpointManager(tmp_path / "first", incremental=True) as manager:
        for step in (1, 2, 3):
            manager.save(content("incremental", step), step).wait()
        shutil.copytree(tmp_path / "first", tmp_path / "copy")
    left = tmp_path / "copy" / left_out
    if left_out:
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    for path in tmp_path.rglob("*.pack"):
        os.utime(path, (0, 0))
    shutil.rmtree(tmp_path / "first")
    with CheckpointManager(tmp_path / "copy", incremental=True, keep_count=3) as manager:
        assert manager.steps() == [1, 2, 3]
        assert manager.save(content("incremental", 4), 4).wait().written_bytes < 100_000
        for step in manager.steps():
            assert same(manager.load_state(step), content("incremental", step))
        assert manager.steps() == [2, 3, 4]


Connect = Callable[..., CheckpointManager]


@pytest.fixture
def connect(s3_server: dict[str, str], monkeypatch: pytest.MonkeyPatch, job: str) -> Connect:
    """A manager of the test's own prefix; the environment has the credentials."""
    for name, value in s3_server.items():
        monkeypatch.setenv(name, value)
    return lambda **options: CheckpointManager(f"s3://ready/trouble/{job}", **options)


@pytest.fixture
def faults(s3_server: dict[str, str]) -> Iterator[HttpFaults]:
    with HttpFaults(s3_server["AWS_ENDPOINT_URL"]) as proxy:
        yield proxy


@pytest.fixture
def proxy(s3_server: dict[str, str]) -> Iterator[TcpProxy]:
    with TcpProxy(s3_server["AWS_ENDPOINT_URL"]) as started:
        yield started


def test_wrong_credentials_are_named_and_no_place_looks_empty(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect() as manager:
        manager.save(noise(1), 1).wait()
    with monkeypatch.context() as patch:
        patch.setenv("AWS_SECRET_ACCESS_KEY", "expired")
        with connect() as manager:
            for ask in (manager.steps, manager.load_bytes, manager.load_latest):
                with pytest.raises(StoragePermissionError, match="credentials"):
                    ask()
            with pytest.raises(StoragePermissionError, match="s3://ready") as caught:
                manager.save(noise(2), 2).wait()
            assert "expired" not in str(caught.value)
    with connect() as manager:
        assert manager.steps() == [1]
        manager.save(noise(2), 2).wait()
        assert manager.load_bytes() == noise(2)
        assert SECRET not in repr(manager.checkpoints())


def test_credentials_that_expire_during_a_save_are_named_and_nothing_is_lost(
    connect: Connect, faults: HttpFaults
) -> None:
    """As S3 says it: with status 400, which is no other error's remedy."""
    faults.body = b"<Error><Code>ExpiredToken</Code><Message>It has expired.</Message></Error>"
    with connect(endpoint=faults.url) as manager:
        manager.save(noise(1), 1).wait(60)
        faults.fail("partNumber=2", 400, 10_000)
        with pytest.raises(StoragePermissionError, match="have expired") as caught:
            manager.save(noise(2, 40 * MEGABYTE), 2).wait(60)
        assert SECRET not in str(caught.value)
        faults.fail("list-type", 400, 10_000)
        with pytest.raises(StoragePermissionError, match="have expired"):
            manager.steps()
        faults.fail("", None, 0)
        assert manager.steps() == [1]
        manager.save(noise(3), 3).wait(60)
        assert [manager.load_bytes(step) for step in manager.steps()] == [noise(1), noise(3)]


@pytest.mark.parametrize("action", [503, "cut", "lose"])
def test_save_rides_through_a_store_that_fails_for_a_while(
    connect: Connect, faults: HttpFaults, action: Any
) -> None:
    with connect(endpoint=faults.url, retry_seconds=30) as manager:
        manager.save(noise(1), 1).wait(60)
        faults.fail("", action, 3)
        manager.save(noise(2), 2).wait(60)
        assert faults.faults == 3
        assert [manager.load_bytes(step) for step in manager.steps()] == [noise(1), noise(2)]


@pytest.mark.parametrize("pattern", ["packs", "manifests/", "PUT|POST", ""])
def test_store_that_throttles_for_long_fails_the_save_and_the_next_one_works(
    connect: Connect, faults: HttpFaults, pattern: str
) -> None:
    with connect(endpoint=faults.url, retry_seconds=0.3) as manager:
        manager.save(noise(1), 1).wait(60)
        faults.fail(pattern, 503, 10_000)
        with pytest.raises(StorageThrottledError, match="overloaded"):
            manager.save(noise(2), 2).wait(60)
        faults.fail("", None, 0)
        assert manager.steps() == [1]
        manager.save(noise(3), 3).wait(60)
        assert [manager.load_bytes(step) for step in manager.steps()] == [noise(1), noise(3)]
        packs = [file.name for file in manager.engine.store.backend.list("packs")]
        assert len(packs) == 2, "what the failed save left was collected"


def test_store_that_goes_away_during_a_save_and_comes_back(
    connect: Connect, faults: HttpFaults
) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def hold(line: str, number: int) -> None:
        if "partNumber=" in line:
            reached.set()
            go_on.wait(60)

    with (
        TcpProxy(faults.url) as proxy,
        connect(endpoint=proxy.url, retry_seconds=60) as manager,
    ):
        manager.save(noise(1), 1).wait(60)
        faults.rule = hold
        handle = manager.save(noise(2, 40 * MEGABYTE), 2)
        assert reached.wait(60), "a part of it is on its way"
        before = proxy.accepted
        proxy.refuse()
        assert not handle.done
        go_on.set()
        proxy.accept()
        handle.wait(90)
        assert proxy.accepted > before
        assert manager.load_bytes() == noise(2, 40 * MEGABYTE)


def test_store_that_stays_away_fails_the_save_and_nothing_hangs(
    connect: Connect, proxy: TcpProxy
) -> None:
    impatient = {"endpoint": proxy.url, "retry_seconds": 0.3, "request_seconds": 1}
    with connect() as patient, connect(**impatient) as manager:
        patient.save(noise(1), 1).wait(60)
        for leave, return_ in ((proxy.refuse, proxy.accept), (_fall_silent(proxy), proxy.heal)):
            leave()
            with pytest.raises(StorageError, match="s3://ready/trouble"):
                manager.save(noise(2), 2).wait(60)
            with pytest.raises(StorageError):
                manager.steps()
            return_()
        eventually(lambda: _can_save(manager, 3), what="a save that works again")
        assert [patient.load_bytes(step) for step in patient.steps()] == [noise(1), noise(3)]


def _can_save(manager: CheckpointManager, step: int) -> bool:
    """Whether a save works; one that does not let the store take a second may be unlucky."""
    try:
        manager.save(noise(step), step).wait(60)
    except StorageError:
        return False
    return True


def _fall_silent(proxy: TcpProxy) -> Callable[[], object]:
    return lambda: proxy.go_silent(new_connections=True)
