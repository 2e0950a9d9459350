"""`get_shard` on real files: whole files, over all ranks every row exactly once."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq
import pytest

from dtruntime import DatasetRegistry
from dtruntime.testing import LocalCoordinator
from tests.support.data.dataset_files import WRITERS, numbers
from tests.support.raw_client import RawClient


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def registry(coordinator: LocalCoordinator, job: str) -> Iterator[DatasetRegistry]:
    with DatasetRegistry(coordinator.url, job=job, patience=20) as registry:
        yield registry


def write(folder: Path, rows: list[int], format: str = "parquet") -> Path:
    folder.mkdir()
    start = 0
    for part, count in enumerate(rows):
        WRITERS[format](numbers(start, count), folder / f"part-{part:03}.{format}")
        start += count
    return folder


def read(paths: list[str]) -> list[int]:
    """Every row of every file, as a user reads what `get_shard` returned."""
    found: list[int] = []
    for path in paths:
        table = pq.read_table(path) if path.endswith("parquet") else arrow_csv.read_csv(path)
        found += table["number"].to_pylist()
    return found


@pytest.mark.parametrize("format", ["parquet", "csv"])
@pytest.mark.parametrize(
    ("rows", "ranks"),
    [
        ([1000] * 4, 4),
        ([2500, 10, 1, 4000], 2),
        ([300, 200, 100], 5),
        ([random.Random(7).randint(1, 900) for _ in range(17)], 6),
    ],
)
def test_files_of_all_ranks_hold_every_row_once(
    registry: DatasetRegistry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows: list[int],
    ranks: int,
    format: str,
) -> None:
    folder = write(tmp_path / "data", rows, format)
    registry.register("numbers", folder, format, shard_size=250, shuffle=True, seed=5)
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    with DatasetRegistry(registry._channel.url, job=registry.job) as worker:
        for epoch in (0, 1):
            parts = [worker.get_shard("numbers", rank, epoch) for rank in range(ranks)]
            counted = Counter(number for part in parts for number in read(part))
            assert counted == Counter(range(sum(rows)))
            loads = [len(read(part)) for part in parts]
            assert max(loads) - min(loads) <= max(rows)


def test_every_caller_gets_the_same_files(registry: DatasetRegistry, tmp_path: Path) -> None:
    folder = write(tmp_path / "data", [100, 70, 40, 40, 30, 20])
    registry.register("numbers", folder, "parquet", shard_size=10, shuffle=True, seed=3)
    with RawClient(registry._channel.url, registry.job) as client:
        workers = client.workers(3, world_size=3)
        by_rank = [registry.get_shard("numbers", rank, 4) for rank in range(3)]
        for rank, worker in enumerate(workers):
            reply = client.call(
                "ListFiles", dataset_id="numbers", worker_id=worker.worker_id, epoch=4
            )
            assert list(reply.file_paths) == by_rank[rank]
            assert sum(reply.row_counts) == len(read(by_rank[rank])) == 100
            assert (reply.file_count, reply.worker_count) == (6, 3)
        orders = {tuple(registry.get_shard("numbers", 2, epoch)) for epoch in range(20)}
        assert len(orders) > 1
        assert len({frozenset(order) for order in orders}) == 1


def test_files_of_a_lost_rank_go_to_the_others(registry: DatasetRegistry, tmp_path: Path) -> None:
    rows = [100, 70, 40, 40, 30, 20]
    registry.register("numbers", write(tmp_path / "data", rows), "parquet", shard_size=10)
    with RawClient(registry._channel.url, registry.job) as client:
        workers = client.workers(3)
        before = [registry.get_shard("numbers", rank, 0) for rank in range(3)]
        workers[1].leave()
        after = [registry.get_shard("numbers", rank, 0) for rank in (0, 2)]
        assert sorted(path for part in after for path in part) == sorted(
            path for part in before for path in part
        )
        assert set(before[0]) <= set(after[0])
        assert set(before[2]) <= set(after[1])
        with pytest.raises(LookupError, match=r"rank 1 .* is not present"):
            registry.get_shard("numbers", 1, 0)
        client.workers(1)
        assert [registry.get_shard("numbers", rank, 0) for rank in range(3)] == before


def test_rank_without_files_is_told_of_the_loader(
    registry: DatasetRegistry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry.register("numbers", write(tmp_path / "data", [1000, 1000]), "parquet", shard_size=100)
    monkeypatch.setenv("WORLD_SIZE", "3")
    with (
        caplog.at_level(logging.WARNING, "strata"),
        DatasetRegistry(registry._channel.url, job=registry.job) as worker,
    ):
        parts = [worker.get_shard("numbers", rank, epoch) for epoch in (0, 1) for rank in range(3)]
    assert [len(part) for part in parts] == [1, 1, 0] * 2
    (warning,) = [r for r in caplog.records if r.event == "dataset.rank_without_files"]  # type: ignore[attr-defined]
    fields = warning.fields  # type: ignore[attr-defined]
    assert (fields["rank"], fields["files"], fields["ranks"]) == (2, 2, 3)
    assert "loader()" in fields["remedy"]


def test_a_client_without_this_package_reads_every_row_once_by_shards(
    registry: DatasetRegistry, tmp_path: Path
) -> None:
    rows = [1000] * 4
    registry.register("numbers", write(tmp_path / "data", rows), "parquet", shard_size=250)
    seen: list[int] = []
    with RawClient(registry._channel.url, registry.job) as client:
        for worker in client.workers(4, world_size=4):
            asked = {"dataset_id": "numbers", "worker_id": worker.worker_id}
            for index in range(client.call("GetDataShard", **asked).shard_count):
                shard = client.call("GetDataShard", **asked, index=index)
                parts = zip(shard.file_paths, shard.row_starts, shard.row_counts, strict=True)
                for path, start, count in parts:
                    seen += pq.read_table(path)["number"].slice(start, count).to_pylist()
    assert sorted(seen) == list(range(4000))
