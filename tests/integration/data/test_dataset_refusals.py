"""Datasets that are not what was registered, are no datasets, or cannot be seen."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dtruntime import DatasetRegistry, ShardError
from dtruntime.client import dataset_registration
from dtruntime.errors import ShardNotFoundError
from dtruntime.testing import LocalCoordinator
from tests.support.data.dataset_files import (
    TOTAL,
    numbers,
    replace_one,
    write_files,
    write_parquet,
)
from tests.support.raw_client import RawClient


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def registry(coordinator: LocalCoordinator, job: str) -> Iterator[DatasetRegistry]:
    with DatasetRegistry(coordinator.url, job=job, patience=20) as registry:
        yield registry


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    return write_files(tmp_path / "data", "parquet")


def is_registered(coordinator: LocalCoordinator, job: str, dataset_id: str) -> bool:
    with RawClient(coordinator.url, job) as client:
        return bool(client.call("GetDataset", dataset_id=dataset_id).found)


def add(folder: Path) -> None:
    write_parquet(numbers(TOTAL, 5), folder / "part-9.parquet")


def remove(folder: Path) -> None:
    (folder / "part-2.parquet").unlink()


@pytest.mark.parametrize("index_is_kept", [True, False])
@pytest.mark.parametrize(
    ("meddle", "named"),
    [
        (replace_one, r"1 changed \(.*part-1\.parquet\)"),
        (add, r"1 added \(.*part-9\.parquet\)"),
        (remove, r"1 removed \(.*part-2\.parquet\)"),
    ],
)
def test_changed_files_are_named_when_registered_again(
    registry: DatasetRegistry,
    parquet: Path,
    meddle: Callable[[Path], None],
    named: str,
    index_is_kept: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not index_is_kept:
        monkeypatch.setattr(dataset_registration, "INDEX_BYTES", 10)
    registry.register("numbers", parquet, "parquet")
    before = registry.describe("numbers")
    meddle(parquet)
    if meddle is replace_one and not index_is_kept:
        named = "the content of some differs"
    with pytest.raises(ShardError, match=f"'numbers'.*{named}"):
        registry.register("numbers", parquet, "parquet")
    assert registry.describe("numbers") == before
    if index_is_kept:
        assert registry.index_of("numbers").fingerprint == before.fingerprint
    else:
        with pytest.raises(ShardError, match=named):
            registry.index_of("numbers")


def test_other_parameters_are_shown_field_by_field(
    registry: DatasetRegistry, parquet: Path, tmp_path: Path
) -> None:
    registry.register("numbers", parquet, "parquet", shard_size=100, owner="me")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"shard_size": 200}, "shard_size: registered 100, given 200"),
        ({"shuffle": True}, "shuffle: registered False, given True"),
        ({"exact": True}, "exact: registered False, given True"),
        ({"seed": 3}, "seed: registered 0, given 3"),
        ({"owner": "you"}, "metadata: registered {'owner': 'me'}, given {'owner': 'you'}"),
        ({"total_samples": 5}, f"total_samples: registered {TOTAL}, given 5"),
    ]
    for changed, named in cases:
        arguments = {"shard_size": 100, "owner": "me", **changed}
        with pytest.raises(ShardError) as caught:
            registry.register("numbers", parquet, "parquet", **arguments)
        assert named in str(caught.value)
    shutil.copytree(parquet, tmp_path / "copy")
    with pytest.raises(ShardError, match="path: registered"):
        registry.register("numbers", tmp_path / "copy", "parquet", shard_size=100, owner="me")


def broken_parquet(folder: Path) -> None:
    write_parquet(numbers(0, 10), folder / "a.parquet")
    (folder / "b.parquet").write_bytes(b"PAR1 this is not it PAR1")


def text_named_parquet(folder: Path) -> None:
    (folder / "a.parquet").write_text("a,b\n1,2\n")


def csv_only(folder: Path) -> None:
    (folder / "a.csv").write_text("a,b\n1,2\n")


def no_samples(folder: Path) -> None:
    write_parquet(numbers(0, 0), folder / "a.parquet")


def other_columns(folder: Path) -> None:
    write_parquet(numbers(0, 10), folder / "a.parquet")
    write_parquet(pa.table({"label": [1]}), folder / "b.parquet")


@pytest.mark.parametrize("given", [None, 10])
@pytest.mark.parametrize(
    ("fill", "named"),
    [
        (broken_parquet, r"b\.parquet"),
        (text_named_parquet, r"a\.parquet"),
        (csv_only, "no file that ends in"),
        (no_samples, "no samples"),
        (other_columns, r"a\.parquet.*b\.parquet.*columns"),
    ],
)
def test_files_that_are_no_dataset_are_refused_and_nothing_is_registered(
    coordinator: LocalCoordinator,
    registry: DatasetRegistry,
    tmp_path: Path,
    fill: Callable[[Path], None],
    named: str,
    given: int | None,
) -> None:
    (tmp_path / "data").mkdir()
    fill(tmp_path / "data")
    with pytest.raises(ShardError, match=named):
        registry.register("numbers", tmp_path / "data", "parquet", given)
    assert not is_registered(coordinator, registry.job, "numbers")


@pytest.mark.parametrize("arguments", [{"shard_size": 0}, {"shard_size": -1}, {"total_samples": 0}])
def test_impossible_sizes_are_refused_and_nothing_is_registered(
    coordinator: LocalCoordinator,
    registry: DatasetRegistry,
    parquet: Path,
    arguments: dict[str, Any],
) -> None:
    with pytest.raises(ShardError, match=r"'numbers'.*must be between 1 and"):
        registry.register("numbers", parquet, "parquet", **arguments)
    assert not is_registered(coordinator, registry.job, "numbers")


def test_count_that_contradicts_the_data_is_refused(
    coordinator: LocalCoordinator, registry: DatasetRegistry, parquet: Path
) -> None:
    with pytest.raises(ShardError, match=f"total_samples is 5000, but .* have {TOTAL} samples"):
        registry.register("numbers", parquet, "parquet", 5000)
    assert not is_registered(coordinator, registry.job, "numbers")


def test_file_whose_name_is_no_text_is_named(
    coordinator: LocalCoordinator, registry: DatasetRegistry, parquet: Path
) -> None:
    odd = os.fsencode(parquet) + b"/part-\xff.parquet"
    os.rename(os.fsencode(parquet / "part-0.parquet"), odd)
    with pytest.raises(ShardError, match=r"part-.*is not valid UTF-8: rename it"):
        registry.register("numbers", parquet, "parquet")
    os.rename(odd, parquet / "line\nbreak.parquet")
    with pytest.raises(ShardError, match=r"line\\nbreak.*cannot be printed"):
        registry.register("numbers", parquet, "parquet")
    assert not is_registered(coordinator, registry.job, "numbers")


@pytest.mark.parametrize("path", ["nowhere", "empty", "hdfs://name/data"])
def test_path_that_cannot_be_seen_needs_a_count(
    coordinator: LocalCoordinator,
    registry: DatasetRegistry,
    tmp_path: Path,
    path: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "empty").mkdir()
    place = path if "://" in path else str(tmp_path / path)
    with pytest.raises(ShardError, match=place):
        registry.register("numbers", place, "parquet")
    assert not is_registered(coordinator, registry.job, "numbers")
    with caplog.at_level(logging.WARNING, "strata"):
        registry.register("numbers", place, "parquet", 100, 50)
    (warning,) = [record for record in caplog.records if vars(record)["event"] == "dataset.unseen"]
    assert warning.fields["path"] == place  # type: ignore[attr-defined]
    assert registry.get_shard("numbers", 0, 0) == [
        f"{place}/shard_0.parquet",
        f"{place}/shard_1.parquet",
    ]
    (first, _) = registry.get_shards("numbers", 0)
    assert (first.start_index, first.end_index, first.row_ranges) == (0, 50, [])
    summary = registry.describe("numbers")
    assert (summary.fingerprint, summary.total_bytes, summary.columns) == ("", 0, ())
    assert registry.plan("numbers", join=1).bytes_moved is None
    with pytest.raises(ShardError, match=place):
        registry.index_of("numbers")


def test_worker_that_cannot_see_the_files_takes_those_that_another_registered(
    registry: DatasetRegistry, parquet: Path
) -> None:
    registry.register("numbers", parquet, "parquet", TOTAL)
    before = registry.describe("numbers")
    parquet.rename(parquet.with_name("elsewhere"))
    registry.register("numbers", parquet, "parquet", TOTAL)
    assert registry.describe("numbers") == before
    with pytest.raises(ShardNotFoundError, match=str(parquet)):
        registry.register("numbers", parquet, "parquet")


def test_files_that_appear_after_registration_are_a_conflict(
    registry: DatasetRegistry, tmp_path: Path
) -> None:
    registry.register("numbers", tmp_path / "data", "parquet", TOTAL)
    write_files(tmp_path / "data", "parquet")
    with pytest.raises(ShardError, match="registered without any having been seen"):
        registry.register("numbers", tmp_path / "data", "parquet", TOTAL)


WITHOUT_ARROW = """
import sys
sys.modules["pyarrow"] = None
from dtruntime import DatasetRegistry, ShardError
registry = DatasetRegistry(sys.argv[1], job=sys.argv[2])
try:
    registry.register("numbers", sys.argv[3], "parquet")
except ShardError as exc:
    print(exc)
registry.register("numbers", sys.argv[3], "parquet", total_samples=10)
print(registry.get_shard("numbers", 0, 0))
"""


def test_without_pyarrow_a_count_is_needed_and_the_package_named(
    coordinator: LocalCoordinator, job: str, parquet: Path
) -> None:
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_ARROW, coordinator.url, job, str(parquet)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    complaint, files = result.stdout.splitlines()
    assert "pyarrow is not installed: pip install pyarrow" in complaint
    assert files == f"['{parquet}/shard_0.parquet']"
