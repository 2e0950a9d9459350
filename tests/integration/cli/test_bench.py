"""``strata bench``: what it prints, its exit codes, and that nothing is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from obstore.store import S3Store

from dtruntime import TrainingOrchestrator
from dtruntime.bench.coordinator_throughput import BenchWorkers
from dtruntime.client import Observer
from dtruntime.testing import LocalCoordinator, eventually
from tests.integration.cli.test_datasets import assert_documented
from tests.support import command_line
from tests.support.command_line import Result

STRATA = [sys.executable, "-m", "dtruntime.cli.main", "bench"]
SMALL = ["--size", "2MiB", "--rounds", "2"]
CALLS = ["--seconds", "0.05", "--workers", "3"]
SAVES = [
    "copy in memory",
    "save arrays: first stall",
    "save arrays: stall",
    "save bytes: stall",
    "write raw",
    "save arrays: durable",
    "save bytes: durable",
    "read raw",
    "load arrays",
    "load bytes",
]


def strata(*arguments: object, **env: str) -> Result:
    return command_line.strata("bench", *arguments, **env)


def measured(*arguments: object, **env: str) -> Any:
    """The only part of what ``--json`` prints."""
    result = strata(*arguments, "--json", **env)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    (part,) = json.loads(result.stdout)["sections"]
    return part


def refused(*arguments: object, code: int = 1, **env: str) -> str:
    result = strata(*arguments, **env)
    assert result.returncode == code, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr


def names(part: Any) -> list[str]:
    return [measure["name"] for measure in part["measures"]]


@contextlib.contextmanager
def running(
    *arguments: object, cwd: Path | None = None, **env: str
) -> Iterator[subprocess.Popen[str]]:
    """The command in a process of its own."""
    # Started in the background, a test run ignores SIGINT, and its children would inherit that.
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [*STRATA, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**os.environ, **env},
    )
    signal.signal(signal.SIGINT, ignored)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


ENDS = pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"]
)


# Checkpoints


def test_checkpoints_are_measured_beside_memory_and_disk(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    part = measured("checkpoints", tmp_path, *SMALL)

    assert names(part) == SAVES
    by_name = {measure["name"]: measure for measure in part["measures"]}
    for name, measure in by_name.items():
        assert len(measure["seconds"]) == (1 if "first" in name else 2), name
        assert all(seconds >= 0 for seconds in measure["seconds"]), name
    assert by_name["save arrays: durable"]["limit"] == "write raw"
    assert by_name["save arrays: stall"]["limit"] == "copy in memory"
    assert by_name["load bytes"]["limit"] == "read raw"
    assert by_name["load bytes"]["amounts"] == [2 * 2**20] * 2
    assert by_name["save bytes: stall"]["per_second"] is None
    assert part["facts"]["size_bytes"] == 2 * 2**20
    assert part["facts"]["rounds"] == 2
    assert re.search("direct writes|page cache", part["facts"]["raw_write"])
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_table_has_what_the_json_document_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = strata("checkpoints", *SMALL)

    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0].startswith("machine ")
    assert any(line.startswith("checkpoints .   2.1 MB   2 rounds") for line in lines)
    shown = {name for name in SAVES for line in lines if line.strip().startswith(name)}
    assert shown == set(SAVES)
    time = r"[\d.]+ (µs|ms|s)"
    assert re.search(
        rf"save arrays: durable +{time} +{time} +{time} +\S+ [kMG]B/s +\d+%",
        result.stdout,
    )
    assert list(tmp_path.iterdir()) == []


def test_documented_fields_are_those_of_the_document(tmp_path: Path) -> None:
    result = strata("checkpoints", tmp_path, *SMALL, "--json")
    document = json.loads(result.stdout)

    assert document["schema"] == 1
    assert_documented("benchmark", document)
    assert_documented("machine", document["machine"])
    assert_documented("part", document["sections"][0])
    assert_documented("measure", document["sections"][0]["measures"][0])


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["/nowhere/at/all"], 1, "/nowhere/at/all is not a folder"),
        (["ftp://host/x"], 2, "unknown scheme"),
        (["memory://x"], 2, "name a folder or a bucket"),
        ([".", "--size", "900000000GiB"], 1, "free, and .* are needed: choose a smaller --size"),
        ([".", "--size", "many"], 2, "'many' is not a size"),
        ([".", "--size", "1KiB"], 2, "must be at least 1MiB"),
        ([".", "--rounds", "0"], 2, "must be between 1 and 1000"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(
    arguments: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert re.search(message, refused("checkpoints", *arguments, code=code))
    assert list(tmp_path.iterdir()) == []


@ENDS
def test_ended_measurement_leaves_no_files(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    with running("checkpoints", tmp_path, "--size", "4MiB", "--rounds", "1000") as bench:
        eventually(lambda: list(tmp_path.rglob("manifests/*")), what="the first checkpoint")
        bench.send_signal(number)
        _, errors = bench.communicate(timeout=60)
    assert bench.returncode == code
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "strata-test", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("CANNOT MOUNT A SMALL DISK, so full disks are NOT TESTED")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_disk_without_room_is_told_before_and_meanwhile(small_disk: Path) -> None:
    message = refused("checkpoints", small_disk, "--size", "16MiB")
    assert re.search(r"has .* free, and .* are needed: choose a smaller --size", message)
    assert list(small_disk.iterdir()) == []

    with running("checkpoints", small_disk, "--size", "4MiB", "--rounds", "1000") as bench:
        eventually(lambda: list(small_disk.rglob("manifests/*")), what="the first checkpoint")
        with contextlib.suppress(OSError), (small_disk / "other").open("wb") as other:
            while bench.poll() is None:
                other.write(bytes(2**20))
                other.flush()
        _, errors = bench.communicate(timeout=60)
    assert bench.returncode == 1
    assert re.fullmatch(r"strata: .*the disk is full.*\n", errors)
    assert [path.name for path in small_disk.iterdir()] == ["other"]


def test_bucket_is_measured_and_left_as_it_was(s3: S3Store) -> None:
    obstore.put(s3, "bench/mine", b"kept")
    part = measured("checkpoints", "s3://data/bench", "--size", "20MiB", "--rounds", "1")

    assert names(part) == SAVES
    assert part["place"] == "s3://data/bench"
    assert "parts of 16 MiB" in part["facts"]["raw_write"]
    left = [meta["path"] for page in obstore.list(s3, "bench") for meta in page]
    assert left == ["bench/mine"]


@ENDS
def test_ended_measurement_leaves_no_objects(
    number: signal.Signals, code: int, s3: S3Store
) -> None:
    def objects() -> list[str]:
        return [meta["path"] for page in obstore.list(s3, "ended") for meta in page]

    obstore.put(s3, "ended/mine", b"kept")
    with running("checkpoints", "s3://data/ended", "--size", "1MiB", "--rounds", "1000") as bench:
        eventually(lambda: [name for name in objects() if "/manifests/" in name])
        bench.send_signal(number)
        _, errors = bench.communicate(timeout=60)
    assert bench.returncode == code
    assert "Traceback" not in errors
    assert objects() == ["ended/mine"]


def test_bucket_that_cannot_be_reached_is_named(
    s3: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret-nobody-may-see")
    message = refused("checkpoints", "s3://data/bench", *SMALL)
    assert "cannot reach s3://data/" in message
    assert "nobody-may-see" not in message


# Coordinator


def test_coordinator_of_its_own_is_measured_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = psutil.Process().children()
    part = measured("coordinator", *CALLS, WORLD_SIZE="7", RANK="5")

    assert names(part) == [
        "bare call",
        "health check",
        "connect and register",
        "heartbeat",
        "barrier",
    ]
    for measure in part["measures"]:
        assert len(measure["seconds"]) == part["facts"]["rounds"] == 5
        assert len(measure["call_seconds"]) == sum(measure["amounts"])
        assert all(amount >= 3 and amount % 3 == 0 for amount in measure["amounts"])
        assert measure["call_p50_seconds"] <= measure["call_p99_seconds"]
    assert [m["limit"] for m in part["measures"]] == ["", *["bare call"] * 4]
    assert part["facts"]["coordinator_cores"] >= 0
    assert psutil.Process().children() == before
    assert list(tmp_path.iterdir()) == []


def test_coordinator_at_a_url_gets_one_job_that_everybody_has_left(
    coordinator: LocalCoordinator,
) -> None:
    with Observer(coordinator.url, patience=10) as observer:
        before = set(observer.jobs())
        result = strata("coordinator", "--url", coordinator.url, *CALLS, "--yes")
        (job,) = set(observer.jobs()) - before
        status = observer.status(job)

    assert result.returncode == 0, result.stderr
    assert job.startswith("strata-bench-")
    assert f"job {job} stays at the coordinator" in result.stdout
    assert re.search(r"heartbeat +[\d,]+/s +\d+%", result.stdout)
    assert (status.world_size, status.live_workers, status.dead_workers) == (3, 0, 0)


def test_job_at_a_url_is_only_made_with_consent(
    coordinator: LocalCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Observer(coordinator.url, patience=10) as observer, Path(os.devnull).open() as nobody:
        before = observer.jobs()
        monkeypatch.setattr(sys, "stdin", nobody)
        message = refused("coordinator", "--url", coordinator.url, *CALLS, code=2)
        assert observer.jobs() == before
    assert (
        "until 'strata jobs rm' removes it. Cannot ask, since this is not a terminal: use --yes"
        in message
    )


@pytest.mark.long
def test_coordinator_that_is_not_there_is_named() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    message = refused("coordinator", "--url", url, *CALLS, "--yes", code=3)
    assert f"the coordinator at {url} could not be reached" in message


@ENDS
def test_ended_measurement_leaves_no_process(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    with running("coordinator", "--seconds", "3000", TMPDIR=str(tmp_path)) as bench:
        process = psutil.Process(bench.pid)
        (child,) = eventually(process.children, what="the coordinator")
        eventually(lambda: list(tmp_path.rglob("state.db")), what="its state")
        bench.send_signal(number)
        _, errors = bench.communicate(timeout=60)
    assert bench.returncode == code
    assert "Traceback" not in errors
    assert not child.is_running()
    assert list(tmp_path.iterdir()) == []


def test_interrupted_measurement_leaves_no_workers_at_a_url(
    coordinator: LocalCoordinator,
) -> None:
    with Observer(coordinator.url, patience=10) as observer:
        before = set(observer.jobs())
        url = ["--url", coordinator.url, "--yes"]
        with running("coordinator", *url, "--seconds", "3000", "--workers", "4") as bench:
            (job,) = eventually(lambda: set(observer.jobs()) - before, what="the job")
            eventually(lambda: observer.status(job).live_workers == 4, what="its workers")
            bench.send_signal(signal.SIGINT)
            bench.communicate(timeout=60)
        assert bench.returncode == 130
        status = observer.status(job)
        assert (status.live_workers, status.dead_workers) == (0, 0)


# Data


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for part in range(2):
        table = pa.table({"a": np.arange(500), "b": np.zeros(500, np.float32)})
        pq.write_table(table, folder / f"part-{part}.parquet")
    return folder


def test_data_are_measured_beside_a_scan(data: Path) -> None:
    part = measured("data", data)

    assert names(part) == ["pyarrow scan", "loader, in order", "loader, shuffled"]
    for measure in part["measures"]:
        assert measure["amounts"] == [1000] * 5
        assert 12 <= measure["bytes_each"] < 13, "a bit tells whether a value is there"
    assert (part["facts"]["files"], part["facts"]["columns"]) == (2, 2)
    assert part["facts"]["samples"] == 1000


def test_files_and_columns_can_be_chosen(data: Path) -> None:
    files = sorted(data.iterdir())
    part = measured("data", *files, "--columns", "b")
    assert all(4 <= measure["bytes_each"] < 5 for measure in part["measures"])
    assert part["facts"]["samples"] == 1000
    assert measured("data", files[0])["facts"]["samples"] == 500
    assert "nothing" in refused("data", data, "--columns", "nothing")
    assert refused("data", data / "not-there")
    assert "is not on this machine" in refused("data", "s3://data/x", code=2)


def test_files_are_written_where_none_are_named_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = strata("data", "--size", "1MiB")
    assert result.returncode == 0, result.stderr
    assert re.search(r"loader, shuffled +[\d,]+/s +\S+ [kMG]B/s +\d+%", result.stdout)
    assert list(tmp_path.iterdir()) == []


# All of it


@pytest.mark.long
def test_all_parts_are_measured_without_arguments(tmp_path: Path) -> None:
    with running("--json", cwd=tmp_path, TMPDIR=str(tmp_path)) as bench:
        output, errors = bench.communicate(timeout=110)
    assert bench.returncode == 0, errors
    parts = json.loads(output)["sections"]
    assert [part["name"] for part in parts] == ["checkpoints", "coordinator", "data"]
    assert list(tmp_path.iterdir()) == []


def test_workers_whose_registration_is_interrupted_leave_too(
    coordinator: LocalCoordinator, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    register = TrainingOrchestrator.register_worker

    async def unanswered(member: TrainingOrchestrator) -> str:
        """The coordinator has registered the worker, which does not learn of it."""
        monkeypatch.undo()
        await register(TrainingOrchestrator(member.config))
        raise InterruptedError

    monkeypatch.setattr(TrainingOrchestrator, "register_worker", unanswered)
    with pytest.raises(InterruptedError), BenchWorkers(coordinator.url, job, 1) as crew:
        crew.register()
    with Observer(coordinator.url, patience=10) as observer:
        status = observer.status(job)
    assert (status.live_workers, status.dead_workers) == (0, 0)
