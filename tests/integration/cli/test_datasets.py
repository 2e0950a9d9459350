"""``strata datasets``: what it prints, and its exit codes."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dtruntime import DatasetRegistry
from dtruntime.sharding.coverage_digest import Digest
from dtruntime.testing import LocalCoordinator
from tests.support import command_line
from tests.support.command_line import Result
from tests.support.raw_client import RawClient

PAGE = Path(__file__).parents[3] / "docs" / "command-line.md"
SAMPLES = 1000


@pytest.fixture
def registry(
    coordinator: LocalCoordinator, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[DatasetRegistry]:
    """A job with an indexed dataset and one without files."""
    monkeypatch.setenv("STRATA_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "data [1]"
    folder.mkdir()
    for part in range(2):
        rows = np.arange(part * 500, part * 500 + 500)
        pq.write_table(pa.table({"n": rows}), folder / f"part-{part}.parquet", row_group_size=10)
    with DatasetRegistry(coordinator.url, job=job, patience=20) as registry:
        registry.register("images", folder, "parquet", shard_size=10, shuffle=True, owner="me")
        registry.register_dataset(f"only-{job}", 100, 10)
        yield registry


def strata(*arguments: str, **env: str) -> Result:
    return command_line.strata("datasets", *arguments, **env)


def shown(*arguments: str, **env: str) -> str:
    result = strata(*arguments, **env)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


def document(*arguments: str) -> Any:
    return json.loads(shown(*arguments, "--json"))


def assert_documented(name: str, record: dict[str, Any]) -> None:
    (row,) = re.findall(rf"^\| {name} \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", row)) == set(record), name


def test_files_are_registered_from_the_command_line(
    registry: DatasetRegistry, tmp_path: Path
) -> None:
    folder = str(tmp_path / "data [1]")
    place = ["--url", registry._channel.url, "--job", registry.job]
    command = ["register", "again", folder, "--format", "parquet", "--shard-size", "20", *place]
    cache = {"STRATA_CACHE_DIR": str(tmp_path / "cache")}
    report = json.loads(shown(*command, "--json", **cache))
    assert report["dataset"]["total_samples"] == SAMPLES
    assert report["dataset"]["shard_count"] == 50
    assert "again" in shown(*command, **cache)
    other = strata(*command, "--seed", "5", **cache)
    assert other.returncode == 1
    assert "seed: registered 0, given 5" in other.stderr
    missing = strata("register", "x", "/nowhere", "--format", "csv", *place, **cache)
    assert missing.returncode == 1
    assert "/nowhere" in missing.stderr


def test_list_has_a_line_for_each_dataset(registry: DatasetRegistry) -> None:
    url, job = registry._channel.url, registry.job
    heading, images, plain = shown("ls", "--url", url, "--job", job).splitlines()
    assert heading.split()[:5] == ["job", "dataset", "format", "samples", "shards"]
    assert re.search(r"images +parquet +1,000 +100 +\S+ kB +seed 0 +/.*/data \[1\]", images)
    assert re.search(rf"only-{job} +– +100 +10 +\? +seed 0 +no files", plain)
    assert job in shown("ls", COORDINATOR_URL=url)


def test_list_as_json_has_the_documented_fields(registry: DatasetRegistry) -> None:
    report = document("ls", "--coordinator", registry._channel.url, "--job", registry.job)
    assert_documented("datasets", report)
    assert_documented("listed dataset", report["datasets"][0])
    assert_documented("dataset", report["datasets"][0]["dataset"])
    assert report["schema"] == 1
    assert [item["dataset"]["total_samples"] for item in report["datasets"]] == [1000, 100]


def test_empty_coordinator_says_what_to_do_next(own_coordinator: LocalCoordinator) -> None:
    assert f'DatasetRegistry("{own_coordinator.url}").register(' in shown(
        "ls", "--url", own_coordinator.url
    )


def test_show_has_parameters_files_shares_and_columns(registry: DatasetRegistry) -> None:
    url, job = registry._channel.url, registry.job
    with RawClient(url, job) as client:
        workers = client.workers(4)
        workers[1].leave()
        output = shown("show", "images", "--url", url, "--job", job)
    for pattern in (
        rf"^dataset images of job {job}$",
        r"^  path +/.*/data \[1\] *$",
        r"^  shards +100 of about 10 samples",
        r"^  order +shuffled with seed 0",
        r"^  files +2 files, .* kB, fingerprint [0-9a-f]{32}",
        r"^  columns +n: int64",
        r"^  ranks +4, rank 1 absent",
        r"^  per rank +33 to 34 shards, 330 to 340 samples",
        r"^  owner +me",
        r"^ +500 +/.*/part-1\.parquet",
        r"^no epoch has been consumed yet",
    ):
        assert re.search(pattern, output, re.MULTILINE), f"{pattern}\n{output}"


def test_dataset_is_found_by_its_name_alone_when_one_job_has_it(registry: DatasetRegistry) -> None:
    name = f"only-{registry.job}"
    output = shown("show", name, "--url", registry._channel.url)
    assert output.startswith(f"dataset {name} of job {registry.job}\n")


def test_name_that_several_jobs_have_needs_a_job(
    registry: DatasetRegistry, coordinator: LocalCoordinator
) -> None:
    with DatasetRegistry(coordinator.url, job=f"{registry.job}-2") as other:
        other.register_dataset(f"only-{registry.job}", 100, 10)
    result = strata("plan", f"only-{registry.job}", "--url", coordinator.url)
    assert result.returncode == 1
    assert "2 jobs have a dataset" in result.stderr
    assert "--job" in result.stderr


def test_show_as_json_has_the_documented_fields(registry: DatasetRegistry) -> None:
    report = document("show", "images", "--url", registry._channel.url, "--job", registry.job)
    assert_documented("shown dataset", report)
    assert_documented("file", report["files"][0])
    assert_documented("share", report["share"])
    assert [file["samples"] for file in report["files"]] == [500, 500]
    assert report["share"] == {
        "ranks": 1,
        "least_shards": 100,
        "most_shards": 100,
        "least_samples": 1000,
        "most_samples": 1000,
    }


def test_plan_says_what_moves(registry: DatasetRegistry) -> None:
    url, job = registry._channel.url, registry.job
    options = ("--url", url, "--job", job, "--world-size", "4")
    plan = registry.plan("images", join=1, leave=[2], world_size=4)
    output = shown("plan", "images", "--join", "1", "--leave", "2", *options)
    assert f"plan images of job {job}: 4 ranks now, 4 then" in output
    assert re.search(r"joining +rank 4$", output, re.MULTILINE)
    assert re.search(r"leaving +rank 2$", output, re.MULTILINE)
    moved = rf"moves +{plan.shards_moved} of 100 shards \(.*%\): {plan.samples_moved} samples, "
    assert re.search(moved, output)
    report = document("plan", "images", "--leave", "2,3", *options)
    assert_documented("plan", report)
    assert (report["present_before"], report["present_after"]) == (4, 2)
    assert report["leaving"] == [2, 3]
    assert (
        report["shards_moved"] == registry.plan("images", leave=[2, 3], world_size=4).shards_moved
    )


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["show", "nothing"], 1, "'nothing' is not registered"),
        (["show", "nothing", "--job", "default"], 1, "'nothing' is not registered"),
        (["ls", "--job", "no-such-job"], 1, "job 'no-such-job' does not exist"),
        (["plan", "images", "--join", "-1"], 2, "--join"),
        (["plan", "images", "--leave", "1,x"], 2, "'x' is not a whole number"),
        (["show"], 2, "ID"),
        ([], 2, "ACTION"),
        (["ls", "--url", "https://x:1"], 2, "TLS"),
    ],
)
def test_exit_codes(
    coordinator: LocalCoordinator, arguments: list[str], code: int, named: str
) -> None:
    result = strata(*arguments, COORDINATOR_URL=coordinator.url)
    assert result.returncode == code
    assert named in result.stderr
    assert result.stdout == ""


def test_rank_that_cannot_leave_is_an_error(registry: DatasetRegistry) -> None:
    result = strata(
        "plan", "images", "--leave", "5", "--url", registry._channel.url, "--job", registry.job
    )
    assert result.returncode == 1
    assert "only live slots can leave, not [5]" in result.stderr


def test_unreachable_coordinator_is_exit_code_3() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    result = strata("ls", "--url", url)
    assert result.returncode == 3
    assert f"strata doctor --url {url}" in result.stderr


def digest_of(samples: list[int] | np.ndarray) -> bytes:
    digest = Digest(SAMPLES)
    digest.add(np.asarray(samples, np.int64))
    return digest.to_bytes()


def report(client: RawClient, epoch: int, samples: list[int] | np.ndarray, **fields: int) -> None:
    worker = client.register()
    client.call(
        "ReportCoverage",
        dataset_id="images",
        epoch=epoch,
        world_size=1,
        digest=digest_of(samples),
        expected=SAMPLES,
        **worker.identity,
        **fields,
    )
    worker.leave()


def test_coverage_of_epochs_is_shown(registry: DatasetRegistry) -> None:
    everything = np.arange(SAMPLES)
    with RawClient(registry._channel.url, registry.job) as client:
        report(client, 0, everything)
        report(client, 1, everything[:-5], dropped=5)
        report(client, 2, everything[300:], assumed=300)
        report(client, 3, [*everything[:990], *range(10)])
        report(client, 4, everything[:400])
    found = {epoch.epoch: epoch for epoch in registry.coverage("images")}
    assert found.keys() == {0, 1, 2, 3, 4}
    counts = {
        number: (epoch.covered, epoch.missing, epoch.repeated, epoch.assumed, epoch.dropped)
        for number, epoch in found.items()
    }
    assert counts == {
        0: (1000, 0, 0, 0, 0),
        1: (995, 0, 0, 0, 5),
        2: (700, 0, 0, 300, 0),
        3: (990, 10, 10, 0, 0),
        4: (400, 600, 0, 0, 0),
    }
    assert [number for number, epoch in found.items() if epoch.exact] == [0, 1]
    assert [number for number, epoch in found.items() if epoch.complete] == [0, 1, 2, 3]
    assert found[0].suspect == found[2].suspect == ()
    assert found[3].suspect == ((0, 32), (960, 992), (992, 1000))
    assert registry.coverage("images", epoch=3) == [found[3]]
    options = ("--url", registry._channel.url, "--job", registry.job)
    with RawClient(registry._channel.url, registry.job) as client:
        worker = client.register()
        output = shown("show", "images", *options)
        worker.leave()
    for pattern in (
        r"^ +0 +exactly once +1,000 of 1,000 +0 +0 +0 +0 *$",
        r"^ +1 +exactly once +995 of 1,000 +0 +0 +0 +5 *$",
        r"^ +2 +assumed +700 of 1,000 +0 +0 +300 +0 *$",
        r"^ +3 +not exact +990 of 1,000 +10 +10 +0 +0 +0–31, 960–999 *$",
        r"^ +4 +running +400 of 1,000 +600 ",
    ):
        assert re.search(pattern, output, re.MULTILINE), (pattern, output)
    unread = r"^ +4 +left unfinished +400 of 1,000 +600 "
    assert re.search(unread, shown("show", "images", *options), re.MULTILINE)
    epoch = document("show", "images", *options)["coverage"][3]
    assert_documented("epoch", epoch)
    assert epoch["suspect"] == [[0, 32], [960, 992], [992, 1000]]


def test_metadata_cannot_give_orders_to_a_terminal(
    registry: DatasetRegistry, coordinator: LocalCoordinator
) -> None:
    attack = "\x1b]0;owned\x07\x1b[2J\x9b31m"
    registry.register("odd", "/nowhere", "csv", 100, 10, note=attack)
    place = ("--job", registry.job, "--url", coordinator.url)
    for command in (("show", "odd"), ("ls",)):
        for options in ((), ("--json",)):
            printed = shown(*command, *place, *options)
            assert not set(printed) & {"\x1b", "\x07", "\x9b"}, command
    assert r"\x1b]0;owned" in shown("show", "odd", *place)
