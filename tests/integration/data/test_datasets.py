"""Real files, registered with a real coordinator: who reads which rows of them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq
import pytest

from dtruntime import DatasetRegistry, ShardError, ShardInfo, StrataError, TrainingOrchestrator
from dtruntime._sync_bridge import io
from dtruntime.client import dataset_registration
from dtruntime.data import CsvOptions, IndexProgress, build_index, shards
from dtruntime.errors import ShardNotFoundError
from dtruntime.rpc.gen import coordinator_pb2 as pb
from dtruntime.testing import LocalCoordinator
from tests.support.coordinators import StartCoordinator
from tests.support.data.dataset_files import (
    SAMPLES,
    TOTAL,
    replace_one,
    write_files,
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


def read_rows(shard: ShardInfo, format: str) -> list[int]:
    """The numbers in a shard, read as a user would from paths and rows."""
    read = pq.read_table if format == "parquet" else arrow_csv.read_csv
    found = []
    for path, (start, stop) in zip(shard.file_paths, shard.row_ranges, strict=True):
        found += read(path)["number"].slice(start, stop - start).to_pylist()
    return found


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("format", ["parquet", "csv"])
def test_ranks_read_every_row_once_where_the_shards_say_it_is(
    coordinator: LocalCoordinator,
    registry: DatasetRegistry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    format: str,
    exact: bool,
) -> None:
    folder = write_files(tmp_path / "data", format)
    registry.register("numbers", folder, format, shard_size=500, exact=exact, shuffle=True)
    with RawClient(registry._channel.url, registry.job) as client:
        client.workers(3, world_size=3)
    seen: list[int] = []
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        with DatasetRegistry(coordinator.url, job=registry.job) as own:
            mine = own.get_shards("numbers", epoch=1)
        for info in mine:
            rows = read_rows(info, format)
            assert rows == list(range(info.start_index, info.end_index))
            seen += rows
    assert sorted(seen) == list(range(TOTAL))
    summary = registry.describe("numbers")
    assert summary.total_samples == TOTAL
    if exact:
        assert summary.shard_count == -(-TOTAL // 500)


def test_single_shard_calls_have_the_rows_too(registry: DatasetRegistry, parquet: Path) -> None:
    registry.register("numbers", parquet, "parquet", shard_size=4000, exact=True)
    with RawClient(registry._channel.url, registry.job) as client:
        worker = client.register()
        reply = client.call("GetDataShard", dataset_id="numbers", worker_id=worker.worker_id)
    assert (reply.start_sample, reply.end_sample, reply.shard_count) == (0, 4000, 2)
    names = [Path(path).name for path in reply.file_paths]
    assert names == [f"part-{n}.parquet" for n in range(4)]
    assert list(reply.row_starts) == [0, 0, 0, 0]
    assert list(reply.row_counts) == [2500, 10, 1, 1489]


def test_description_says_what_the_index_found(registry: DatasetRegistry, parquet: Path) -> None:
    registry.register("numbers", parquet, "parquet", TOTAL, 1000, seed=7, owner="me")
    registry.register_dataset("plain", 100, 10)
    index = build_index(parquet, "parquet")
    cut = shards(index, 1000)
    summary = registry.describe("numbers")
    assert (summary.path, summary.format) == (str(parquet), "parquet")
    assert (summary.total_samples, summary.shard_count) == (TOTAL, len(cut))
    assert (summary.seed, summary.shuffle, summary.exact) == (7, False, False)
    assert summary.fingerprint == index.fingerprint
    assert summary.total_bytes == sum(path.stat().st_size for path in parquet.iterdir())
    assert summary.columns == ("number: int64", "text: string")
    assert summary.metadata == {"owner": "me"}
    layout = registry.layout("numbers")
    assert layout.shard_samples.tolist() == [len(shard) for shard in cut]
    assert layout.shard_bytes is not None
    assert layout.shard_bytes.tolist() == cut.bytes_read.tolist()
    assert layout.file_samples.tolist() == SAMPLES
    assert layout.files == tuple(file.url for file in index.files)
    assert registry.index_of("numbers").fingerprint == index.fingerprint
    listed = registry.list_datasets()
    assert [item.dataset_id for item in listed] == ["numbers", "plain"]
    assert [item.shard_count for item in listed] == [len(cut), 10]


def test_list_of_datasets_leaves_the_long_lists_out(
    registry: DatasetRegistry, parquet: Path
) -> None:
    registry.register("numbers", parquet, "parquet")
    with RawClient(registry._channel.url, registry.job) as client:
        (info,) = client.call("ListDatasets").datasets
        short = client.call("GetDataset", dataset_id="numbers").dataset
        full = client.call("GetDataset", dataset_id="numbers", full=True).dataset
    assert info == short
    for left_out in (short.index, short.layout.files, short.layout.shard_samples):
        assert not left_out
    for included in (full.index, full.layout.files, full.layout.shard_samples):
        assert included


def test_file_folder_glob_and_file_url_name_the_same_samples(
    registry: DatasetRegistry, parquet: Path
) -> None:
    registry.register("glob", f"{parquet}/part-[01].parquet", "parquet")
    registry.register("file", parquet / "part-0.parquet", "parquet")
    registry.register("url", parquet.as_uri(), "parquet")
    totals = [registry.describe(name).total_samples for name in ("glob", "file", "url")]
    assert totals == [2510, 2500, TOTAL]
    registry.register("url", os.path.relpath(parquet), "parquet")


def test_registering_again_does_nothing_and_reads_nothing(
    registry: DatasetRegistry, parquet: Path
) -> None:
    told: list[IndexProgress] = []
    registry.register("numbers", parquet, "parquet", progress=told.append)
    assert told[-1].files_done == len(SAMPLES)
    told.clear()
    registry.register("numbers", parquet, "parquet", progress=told.append)
    registry.register("numbers", parquet, "parquet", TOTAL)
    assert not told
    with RawClient(registry._channel.url, registry.job) as client:
        kinds = [event.kind for event in client.events()]
    assert kinds.count("dataset.registered") == 1


async def test_registering_inside_a_running_loop(
    coordinator: LocalCoordinator, job: str, parquet: Path
) -> None:
    async with DatasetRegistry(coordinator.url, job=job) as registry:
        await registry.register_async("numbers", parquet, "parquet", shard_size=100)
        assert (await registry.describe_async("numbers")).total_samples == TOTAL
        assert (await registry.index_of_async("numbers")).total_samples == TOTAL
        assert (await registry.plan_async("numbers", join=1)).shards_moved > 0
        assert await registry.coverage_async("numbers") == []
        with pytest.raises(StrataError, match="await coverage_async"):
            registry.coverage("numbers")


def test_index_that_is_too_large_to_be_kept_is_made_again(
    registry: DatasetRegistry, parquet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_registration, "INDEX_BYTES", 10)
    options = CsvOptions(header=False)
    csv = parquet.parent / "a.csv"
    csv.write_text("1\n2\n3\n")
    registry.register("numbers", parquet, "parquet")
    registry.register("rows", csv, "csv", options=options)
    assert registry.index_of("numbers").fingerprint == registry.describe("numbers").fingerprint
    assert registry.index_of("rows").options == options


def test_options_belong_to_the_dataset(registry: DatasetRegistry, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("1;2\n3;4\n")
    options = CsvOptions(delimiter=";", header=False)
    registry.register("rows", path, "csv", options=options)
    registry.register("rows", path, "csv", options=options)
    assert registry.describe("rows").total_samples == 2
    assert registry.index_of("rows").options == options
    with pytest.raises(ShardError, match=r"other options \(registered .*;.*, given none\)"):
        registry.register("rows", path, "csv")
    with pytest.raises(ValueError, match="not the options of format 'parquet'"):
        registry.register("other", path, "parquet", options=options)


def test_everything_survives_a_killed_coordinator(
    start_coordinator: StartCoordinator, parquet: Path
) -> None:
    coordinator = start_coordinator()
    with DatasetRegistry(coordinator.url, patience=20) as registry:
        registry.register("numbers", parquet, "parquet", shard_size=700, shuffle=True, k="v")

        def seen() -> tuple[object, ...]:
            layout = registry.layout("numbers")
            index = registry.index_of("numbers")
            return (
                registry.describe("numbers"),
                registry.get_shards("numbers", epoch=3),
                layout.files,
                layout.shard_samples.tolist(),
                index.fingerprint,
                index.schema,
            )

        before = seen()
        coordinator.kill()
        coordinator.start()
        assert seen() == before
        registry.register("numbers", parquet, "parquet", shard_size=700, shuffle=True, k="v")
        replace_one(parquet)
        with pytest.raises(ShardError, match=r"part-1\.parquet"):
            registry.register("numbers", parquet, "parquet", shard_size=700, shuffle=True, k="v")


def test_longest_index_and_many_shards_pass_both_transports(service: RawClient, job: str) -> None:
    count, index = 100_000, os.urandom(16 * 2**20)
    sizes = np.random.default_rng(0).integers(1, 10**6, count)
    layout = pb.DatasetLayout(
        fingerprint="f",
        shard_samples=sizes.tolist(),
        shard_bytes=(sizes * 100).tolist(),
        root="/data/",
        files=["a.csv"],
        file_samples=[int(sizes.sum())],
    )
    service.call(
        "RegisterDataset",
        dataset_id="d",
        path="/data",
        format="csv",
        total_samples=int(sizes.sum()),
        shard_size=500_000,
        layout=layout,
        index=index,
    )
    url = service.channel._channel.target().decode()  # type: ignore[attr-defined]
    with DatasetRegistry(url, job=job, patience=20) as registry:
        info = io.submit(registry._described("d", full=True)).result().dataset
        assert info.index == index
        assert registry.layout("d").shard_samples.tolist() == sizes.tolist()
        (last,) = registry.get_shards("d", 0)[-1:]
        assert (last.shard_id, last.end_index) == (count - 1, int(sizes.sum()))


def test_plan_says_what_then_happens(registry: DatasetRegistry, parquet: Path) -> None:
    registry.register("numbers", parquet, "parquet", shard_size=50, seed=3)
    sizes = registry.layout("numbers")
    assert sizes.shard_bytes is not None
    with RawClient(registry._channel.url, registry.job) as client:
        workers = client.workers(3)

        def owners() -> dict[int, int]:
            return {
                shard.shard_id: rank
                for rank in ranks
                for shard in client.call("ListShards", dataset_id="numbers", rank=rank).shards
            }

        ranks = [0, 1, 2]
        before = owners()
        plan = registry.plan("numbers", join=2, leave=[1])
        assert plan == registry.plan("numbers", join=[3, 4], leave=[1])
        client.workers(2)
        workers[1].leave()
        ranks = [0, 2, 3, 4]
        after = owners()
        moved = [shard for shard in before if before[shard] != after[shard]]
        assert plan.shards_moved == len(moved)
        assert plan.samples_moved == sizes.shard_samples[moved].sum()
        assert plan.bytes_moved == sizes.shard_bytes[moved].sum()
        summary = registry.describe("numbers")
        assert (summary.slot_count, summary.dead_slots) == (5, (1,))
        assert registry.plan("numbers", join=1).gained.keys() == {1}
        with pytest.raises(ValueError, match="only live slots can leave"):
            registry.plan("numbers", leave=[1])


def test_plan_without_workers_takes_the_world_size_or_one(
    registry: DatasetRegistry, coordinator: LocalCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.register_dataset("plain", 105, 10)
    assert registry.plan("plain", join=1).before.slot_count == 1
    plan = registry.plan("plain", leave=[3], world_size=4)
    assert (plan.before.slot_count, plan.shards_moved) == (4, plan.lost[3])
    monkeypatch.setenv("WORLD_SIZE", "8")
    with DatasetRegistry(coordinator.url, job=registry.job) as other:
        everything = other.plan("plain", leave=range(7))
    assert everything.before.slot_count == 8
    assert everything.most_load == 11


def test_unknown_dataset_is_not_found(registry: DatasetRegistry) -> None:
    for ask in (registry.describe, registry.index_of, registry.plan, registry.coverage):
        with pytest.raises(ShardNotFoundError, match="'nothing' is not registered in job"):
            ask("nothing")


def test_registry_of_a_worker_knows_its_job(
    coordinator: LocalCoordinator, job: str, parquet: Path
) -> None:
    with TrainingOrchestrator(coordinator_url=coordinator.url, job=job) as orchestrator:
        orchestrator.register()
        with DatasetRegistry() as registry:
            registry.register("numbers", parquet, "parquet")
            assert registry.describe("numbers").slot_count == 1


def test_registry_is_imported_and_used_without_pyarrow(
    coordinator: LocalCoordinator, job: str
) -> None:
    program = (
        "import sys; from dtruntime import DatasetRegistry, MovePlan, DatasetSummary\n"
        f"registry = DatasetRegistry({coordinator.url!r}, job={job!r})\n"
        "registry.register_dataset('plain', 100, 10); registry.plan('plain', join=1)\n"
        "print(registry.describe('plain').shard_count, 'pyarrow' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert result.stdout.split() == ["10", "False"], result.stderr


async def test_cancelled_registration_ends_the_indexing(
    coordinator: LocalCoordinator, job: str, parquet: Path
) -> None:
    reached, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def hold(_: IndexProgress) -> None:
        reached.set()
        go_on.wait(20)
        ended.set()

    async with DatasetRegistry(coordinator.url, job=job) as registry:
        task = asyncio.create_task(
            registry.register_async("numbers", parquet, "parquet", progress=hold)
        )
        assert await asyncio.to_thread(reached.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # Another call's answer means that the thread of all calls has seen the cancellation.
        await registry.register_dataset_async("other", 10, 5)
        go_on.set()
        assert await asyncio.to_thread(ended.wait, 20)
        told: list[IndexProgress] = []
        await registry.register_async("numbers", parquet, "parquet", progress=told.append)
        assert told, "the first index was not finished and kept"


def test_registry_made_before_registration_follows_the_orchestrator(
    coordinator: LocalCoordinator, job: str
) -> None:
    registry = DatasetRegistry(patience=1)
    with TrainingOrchestrator(coordinator_url=coordinator.url, job=job) as orchestrator:
        orchestrator.register()
        registry.register_dataset("train", 100, 10)
        assert registry.job == job
        assert [shard.end_index for shard in registry.get_shards("train", 0)]
    with DatasetRegistry(coordinator.url, job=job) as other:
        assert [known.dataset_id for known in other.list_datasets()] == ["train"]


def test_registry_follows_the_environment_at_each_use(
    coordinator: LocalCoordinator, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = DatasetRegistry(patience=1)
    monkeypatch.setenv("COORDINATOR_URL", coordinator.url)
    monkeypatch.setenv("STRATA_JOB", job)
    registry.register_dataset("train", 100, 10)
    monkeypatch.setenv("STRATA_JOB", f"{job}-b")
    registry.register_dataset("other", 100, 10)
    assert [known.dataset_id for known in registry.list_datasets()] == ["other"]


def test_registry_goes_with_the_process_to_another_coordinator(
    coordinator: LocalCoordinator, own_coordinator: LocalCoordinator, job: str
) -> None:
    registry = DatasetRegistry(patience=1)
    for dataset, where in (("first", coordinator), ("second", own_coordinator)):
        with TrainingOrchestrator(coordinator_url=where.url, job=job) as orchestrator:
            orchestrator.register()
            registry.register_dataset(dataset, 100, 10)
            assert [known.dataset_id for known in registry.list_datasets()] == [dataset]
    registry.close()


def test_arguments_of_a_registry_stand_beside_another_orchestrator(
    coordinator: LocalCoordinator, own_coordinator: LocalCoordinator, job: str
) -> None:
    registry = DatasetRegistry(coordinator.url, job=job)
    with TrainingOrchestrator(coordinator_url=own_coordinator.url, job="elsewhere") as worker:
        worker.register()
        registry.register_dataset("train", 100, 10)
    with DatasetRegistry(coordinator.url, job=job) as other:
        assert [known.dataset_id for known in other.list_datasets()] == ["train"]
