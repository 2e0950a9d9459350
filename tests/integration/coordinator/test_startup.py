"""What can be wrong when a coordinator starts, or with the disk under it, and what it says."""

import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtruntime.cli.main import main
from dtruntime.coordinator.store.integrity import record_digest
from dtruntime.testing import LocalCoordinator
from tests.support.coordinators import TRANSPORTS, StartCoordinator
from tests.support.raw_client import RawClient, Refusal


def strata(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dtruntime.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )


def database(data_dir: Path) -> sqlite3.Connection:
    return sqlite3.connect(data_dir / "state.db", isolation_level=None)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_second_coordinator_on_a_port_says_so_and_fails(
    coordinator: LocalCoordinator, tmp_path: Path, transport: str
) -> None:
    address = coordinator.url.removeprefix("http://")
    data_dir = str(tmp_path / "other")
    result = strata("coordinator", address, "--data-dir", data_dir, "--transport", transport)
    assert result.returncode not in (0, 2)
    assert f"cannot listen on {address}" in result.stderr
    assert "another" in result.stderr
    assert "Traceback" not in result.stderr
    with RawClient(coordinator.url) as client:
        assert client.call("GetServerInfo").term == 1, "the first one goes on"


def test_second_coordinator_on_a_data_directory_says_who_has_it_and_fails(
    coordinator: LocalCoordinator,
) -> None:
    data_dir = str(coordinator.data_dir)
    result = strata("coordinator", "127.0.0.1:0", "--data-dir", data_dir)
    assert result.returncode == 1
    assert f"{data_dir} is in use by another coordinator" in result.stderr
    assert str(coordinator.pid) in result.stderr
    assert "Traceback" not in result.stderr


def test_damaged_record_is_named_and_salvage_goes_on_without_it(
    own_coordinator: LocalCoordinator, capsys: pytest.CaptureFixture[str]
) -> None:
    data_dir = str(own_coordinator.data_dir)
    with RawClient(own_coordinator.url) as client:
        worker = client.register()
        for step in (1, 2):
            worker.commit(f"c-{step}", step).result()
        own_coordinator.stop()
        with database(own_coordinator.data_dir) as db:
            damaged = db.execute("UPDATE records SET value = x'FF00' WHERE key = 'c-2'")
            assert damaged.rowcount == 1
        db.close()
        result = strata("coordinator", "127.0.0.1:0", "--data-dir", data_dir)
        assert result.returncode == 1
        assert "is damaged: checkpoint default/c-2: " in result.stderr
        assert f"strata state restore --salvage --data-dir {data_dir}" in result.stderr
        assert "Traceback" not in result.stderr
        assert main(["state", "check", "--data-dir", data_dir]) == 1
        assert "damaged: checkpoint default/c-2: " in capsys.readouterr().out
        assert main(["state", "restore", "--salvage", "--data-dir", data_dir]) == 0
        own_coordinator.start()
        assert [c.checkpoint_id for c in client.call("ListCheckpoints").checkpoints] == ["c-1"]
        assert worker.heartbeat().live_workers == 1
    own_coordinator.stop()
    db = database(own_coordinator.data_dir)
    kept = dict(db.execute("SELECT key, value FROM quarantine").fetchall())
    db.close()
    assert kept == {"c-2": b"\xff\x00"}


RECORD_WITHOUT_SENSE = {
    "dataset": '{"dataset_id": "d", "path": "", "format": "", "total_samples": 5, '
    '"shard_size": 0, "shuffle": false, "seed": 0}',
    "worker": '{"worker_id": "w", "rank": -1, "incarnation": 9, "session": "", '
    '"membership": "live", "registered_at": 0.0}',
}


@pytest.mark.parametrize("kind", RECORD_WITHOUT_SENSE)
def test_record_that_makes_no_sense_is_left_out_by_salvage(
    own_coordinator: LocalCoordinator, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    data_dir = str(own_coordinator.data_dir)
    with RawClient(own_coordinator.url) as client:
        worker = client.register()
        own_coordinator.stop()
        db = database(own_coordinator.data_dir)
        value = RECORD_WITHOUT_SENSE[kind].encode()
        row = kind, "default", "7", value, record_digest(kind, "default", "7", value)
        db.execute("INSERT INTO records VALUES (?, ?, ?, ?, ?)", row)
        db.close()
        assert main(["state", "check", "--data-dir", data_dir]) == 1
        assert f"{kind} default/7: " in capsys.readouterr().out
        assert main(["state", "restore", "--salvage", "--data-dir", data_dir]) == 0
        own_coordinator.start()
        assert worker.heartbeat().live_workers == 1
        assert client.register().rank == 1


@pytest.mark.long
def test_damaged_journal_does_not_keep_the_coordinator_down(
    own_coordinator: LocalCoordinator,
) -> None:
    with RawClient(own_coordinator.url) as client:
        worker = client.register()
        own_coordinator.stop()
        db = database(own_coordinator.data_dir)
        assert db.execute("UPDATE journal SET fields = x'00'").rowcount > 0
        db.close()
        own_coordinator.start()
        assert worker.heartbeat().live_workers == 1
        assert client.register().rank == 1
        assert "journal.entry_damaged" in [event.kind for event in client.events()]
    assert "state.journal_damaged" in own_coordinator.log


def test_state_of_a_newer_version_is_refused(own_coordinator: LocalCoordinator) -> None:
    own_coordinator.stop()
    db = database(own_coordinator.data_dir)
    db.execute("PRAGMA user_version = 999")
    db.close()
    result = strata("coordinator", "127.0.0.1:0", "--data-dir", str(own_coordinator.data_dir))
    assert result.returncode == 1
    assert "written by a newer Strata" in result.stderr
    assert "schema 999" in result.stderr
    assert "Traceback" not in result.stderr


def test_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state.db").write_bytes(b"this is not a database" * 1000)
    result = strata("coordinator", "127.0.0.1:0", "--data-dir", str(tmp_path))
    assert result.returncode == 1
    assert str(tmp_path / "state.db") in result.stderr
    assert "Traceback" not in result.stderr


def test_data_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = strata("coordinator", "127.0.0.1:0", "--data-dir", str(tmp_path / "file" / "data"))
    assert result.returncode == 1
    assert str(tmp_path / "file") in result.stderr
    assert "Traceback" not in result.stderr


def test_bad_address_is_wrong_usage(tmp_path: Path) -> None:
    result = strata("coordinator", "nowhere", "--data-dir", str(tmp_path))
    assert result.returncode == 2
    assert "HOST:PORT" in result.stderr


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True
    )
    if os.geteuid() != 0 or mounted.returncode != 0:
        pytest.skip(f"a full disk needs root to mount a tmpfs: {mounted.stderr.decode()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_full_disk_stops_the_coordinator_instead_of_letting_it_forget(
    small_disk: Path, start_coordinator: StartCoordinator, tmp_path: Path
) -> None:
    coordinator = start_coordinator(data_dir=small_disk, log_path=tmp_path / "log")
    acknowledged: list[str] = []
    with RawClient(coordinator.url) as client:
        worker = client.register()
        metadata = {f"key-{n}": "x" * 4000 for n in range(32)}

        def fill_the_disk() -> None:
            for step in range(1000):
                worker.commit(f"c-{step}", step, metadata=metadata).result()
                acknowledged.append(f"c-{step}")

        with pytest.raises(Refusal, match="disk is full") as caught:
            fill_the_disk()
    assert acknowledged
    assert caught.value.code.name == "UNAVAILABLE"
    assert coordinator.wait() == 1
    assert "coordinator.cannot_store" in coordinator.log
    assert "Traceback" not in coordinator.log
    (small_disk / "coordinator.log").unlink(missing_ok=True)
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    coordinator.start()
    with RawClient(coordinator.url) as client:
        stored = [c.checkpoint_id for c in client.call("ListCheckpoints").checkpoints]
        assert stored[: len(acknowledged)] == acknowledged
