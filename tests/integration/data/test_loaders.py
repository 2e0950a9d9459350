"""Loaders of real workers: killed, joined and resumed, with the coordinator's proof at the end."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from obstore.store import S3Store

from dtruntime import DatasetRegistry, TrainingOrchestrator
from dtruntime.data import FileSource, Loader, Mixture, build_index, merge_states
from dtruntime.errors import ShardError, StrataError
from dtruntime.storage import DiskCache
from dtruntime.testing import LocalCoordinator, WorkerProcess
from tests.support.data.real_data import DIGITS, FLIGHTS
from tests.support.paths import PROGRAMS
from tests.support.servers.s3_server import upload

READER = PROGRAMS / "live_reader.py"
ROWS = 4000
PATIENCE = 120.0


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    folder = tmp_path / "rows"
    folder.mkdir()
    for part in range(4):
        ids = np.arange(part * 1000, (part + 1) * 1000)
        pq.write_table(pa.table({"id": ids}), folder / f"{part}.parquet", row_group_size=50)
    return folder


class Readers:
    """Live readers in processes of their own."""

    def __init__(self, stack: ExitStack, url: str, job: str, folder: Path) -> None:
        self._stack = stack
        self._env = {
            "COORDINATOR_URL": url,
            "STRATA_JOB": job,
            "STRATA_CACHE_DIR": str(folder / "cache"),
        }
        self._folder = folder
        self._started = 0

    def start(self, name: str, commit_every: int = 2, *, hold: bool = False) -> WorkerProcess:
        self._started += 1
        output = str(self._folder / f"{self._started}-{name}.ids")
        arguments = [name, output, str(commit_every), *(["hold"] if hold else [])]
        process = WorkerProcess(READER, arguments, env=self._env)
        self._stack.enter_context(process)
        process.expect("registered", PATIENCE)
        return process

    def committed(self) -> list[int]:
        parts = [np.fromfile(path, "<i8") for path in sorted(self._folder.glob("*.ids"))]
        return np.sort(np.concatenate(parts)).tolist()


@pytest.fixture
def readers(own_coordinator: LocalCoordinator, job: str, tmp_path: Path):
    with ExitStack() as stack:
        yield Readers(stack, own_coordinator.url, job, tmp_path)


def steps(process: WorkerProcess, count: int) -> None:
    """Let a reader go on to its next commit, several times."""
    for _ in range(count):
        process.send("go")
        process.expect("committed", PATIENCE)


def notice_deaths(coordinator: LocalCoordinator, job: str) -> None:
    """Have killed readers declared dead at once: whoever registers looks for their processes."""
    with TrainingOrchestrator(coordinator_url=coordinator.url, job=job) as newcomer:
        newcomer.register()


def let_run(process: WorkerProcess) -> None:
    """Let a reader go on to the end; in one write, for it may end as soon as it has enough."""
    process.send("\n".join(["go"] * (ROWS // 4)))


def run_to_the_end(processes: list[WorkerProcess]) -> None:
    for process in processes:
        let_run(process)
    for process in processes:
        process.expect("done", PATIENCE)


def test_survivors_read_what_a_killed_worker_left_and_a_newcomer_gets_its_share(
    own_coordinator: LocalCoordinator, job: str, rows: Path, readers: Readers
) -> None:
    registry = DatasetRegistry(own_coordinator.url, job=job)
    registry.register("rows", rows, "parquet", shard_size=50, shuffle=True, seed=3)
    a, b, c = (readers.start(name) for name in "abc")
    for process in (a, b, c):
        process.send("begin")
        process.expect("committed", PATIENCE)
        steps(process, 3)
    b.kill()
    notice_deaths(own_coordinator, job)
    while registry.coverage("rows")[0].segments == 1:
        steps(a, 1)
    d = readers.start("d")
    d.send("begin")
    d.expect("committed", PATIENCE)
    steps(c, 2)
    run_to_the_end([a, c, d])
    assert readers.committed() == list(range(ROWS))
    (proof,) = registry.coverage("rows")
    assert (proof.covered, proof.missing, proof.repeated) == (ROWS, 0, 0)
    assert proof.complete
    assert proof.segments >= 3


def test_worker_killed_while_it_waits_for_the_others_has_committed_nothing_by_that(
    own_coordinator: LocalCoordinator, job: str, rows: Path, readers: Readers
) -> None:
    registry = DatasetRegistry(own_coordinator.url, job=job)
    registry.register("rows", rows, "parquet", shard_size=50, shuffle=True, seed=3)
    slow, eager = readers.start("slow"), readers.start("eager", commit_every=10**6)
    slow.send("begin")
    slow.expect("committed", PATIENCE)
    eager.send("begin")
    eager.expect("waits for the others", PATIENCE)
    eager.kill()
    notice_deaths(own_coordinator, job)
    run_to_the_end([slow])
    assert readers.committed() == list(range(ROWS))
    (proof,) = registry.coverage("rows")
    assert (proof.covered, proof.missing, proof.repeated) == (ROWS, 0, 0)


def test_coordinator_killed_in_the_middle_of_an_epoch_loses_no_claim(
    own_coordinator: LocalCoordinator, job: str, rows: Path, readers: Readers
) -> None:
    registry = DatasetRegistry(own_coordinator.url, job=job)
    registry.register("rows", rows, "parquet", shard_size=50)
    a, b = readers.start("a"), readers.start("b")
    for process in (a, b):
        process.send("begin")
        process.expect("committed", PATIENCE)
        steps(process, 2)
    own_coordinator.kill()
    own_coordinator.start()
    run_to_the_end([a, b])
    assert readers.committed() == list(range(ROWS))
    assert [c.repeated + c.missing for c in registry.coverage("rows")] == [0]


@pytest.mark.long
def test_slow_workers_shards_go_to_those_who_are_done(
    own_coordinator: LocalCoordinator, job: str, rows: Path, readers: Readers
) -> None:
    registry = DatasetRegistry(own_coordinator.url, job=job)
    registry.register("rows", rows, "parquet", shard_size=50)
    slow, fast = readers.start("slow", hold=True), readers.start("fast")
    slow.send("begin")
    slow.expect("holds a batch", PATIENCE)  # and is slower with it than the other with a whole lane
    fast.send("begin")
    let_run(fast)
    for _ in range(62):  # its half would be 50
        fast.expect("committed", PATIENCE)
    run_to_the_end([slow])
    fast.expect("done", PATIENCE)
    assert readers.committed() == list(range(ROWS))


def test_operator_takes_shards_from_a_slow_worker(
    own_coordinator: LocalCoordinator, job: str, rows: Path, readers: Readers
) -> None:
    registry = DatasetRegistry(own_coordinator.url, job=job)
    registry.register("rows", rows, "parquet", shard_size=50)
    slow, fast = readers.start("slow"), readers.start("fast")
    for process in (slow, fast):
        process.send("begin")
        process.expect("committed", PATIENCE)
    assert registry.rebalance("rows", 0, {0: 5}) == {0: 5, 1: 100}
    steps(fast, 60)
    run_to_the_end([slow, fast])
    assert readers.committed() == list(range(ROWS))
    assert [c.repeated + c.missing for c in registry.coverage("rows")] == [0]
    with pytest.raises(ShardError, match="complete"):
        registry.rebalance("rows", 0)
    with pytest.raises(ShardError, match="was not begun"):
        registry.rebalance("rows", 9)


def test_registered_datasets_are_mixed(
    own_coordinator: LocalCoordinator, job: str, rows: Path
) -> None:
    registry = DatasetRegistry(own_coordinator.url, job=job)
    for name in "ab":
        registry.register(name, rows, "parquet", shard_size=50)
    parts = {"a": (registry.source("a", skip=[(0, 3000)]), 1), "b": (registry.source("b"), 3)}
    ids = [batch["id"] for batch in Loader(Mixture(parts), 100)]
    counts = np.bincount(np.concatenate(ids), minlength=ROWS)
    assert len(np.concatenate(ids)) == 4000
    assert counts[:3000].max() == 1
    assert counts[3000:].max() == 2
    with pytest.raises(TypeError, match="colums"):
        registry.source("a", colums=["id"])


@pytest.mark.long
def test_everyone_killed_and_started_again_reads_only_what_was_not_committed(
    own_coordinator: LocalCoordinator, job: str, rows: Path, readers: Readers
) -> None:
    registry = DatasetRegistry(own_coordinator.url, job=job)
    registry.register("rows", rows, "parquet", shard_size=50)
    first = [readers.start(name) for name in "ab"]
    for process in first:
        process.send("begin")
        process.expect("committed", PATIENCE)
        steps(process, 5)
    for process in first:
        process.kill()
    second = [readers.start(name) for name in "xyz"]
    for process in second:
        process.send("begin")
    run_to_the_end(second)
    assert readers.committed() == list(range(ROWS))
    assert [c.repeated + c.missing for c in registry.coverage("rows")] == [0]


def test_coverage_is_proved_across_a_resume_at_another_world_size(
    own_coordinator: LocalCoordinator, job: str, rows: Path
) -> None:
    url = own_coordinator.url
    registry = DatasetRegistry(url, job=job)
    registry.register("rows", rows, "parquet", shard_size=50, shuffle=True)
    with TrainingOrchestrator(coordinator_url=url, job=job) as worker:
        worker.register()
        states = []
        for rank in range(3):
            loader = registry.loader("rows", 10, rank=rank, world_size=3, ids=True)
            for number, batch in enumerate(loader, 1):
                assert np.array_equal(batch["id"], batch["__id__"])
                if number == 40:
                    break
            states.append(json.loads(json.dumps(loader.state_dict())))
        resumed = registry.loader("rows", 64)
        resumed.load_state_dict(merge_states(states))
        for _ in resumed:
            pass
        (proof,) = registry.coverage("rows")
        assert (proof.covered, proof.missing, proof.repeated) == (ROWS, 0, 0)
        assert (proof.assumed, proof.complete) == (0, True)
        unmerged = registry.loader("rows", 64)
        unmerged.load_state_dict(states[0])
        for _ in unmerged:
            pass
        (proof,) = registry.coverage("rows")
        assert (proof.assumed, proof.missing, proof.repeated) == (1200, 0, 0)


def test_repeated_and_lost_samples_show(
    own_coordinator: LocalCoordinator, job: str, rows: Path
) -> None:
    url = own_coordinator.url
    registry = DatasetRegistry(url, job=job)
    registry.register("rows", rows, "parquet", shard_size=50)
    with TrainingOrchestrator(coordinator_url=url, job=job) as worker:
        worker.register()
        loader = registry.loader("rows", 100)
        for step in loader.deliveries():
            numbers = step.numbers[step.numbers != 7]
            loader.accept(step._replace(numbers=np.append(numbers, numbers[numbers == 3999])))
        loader.commit()
        (proof,) = registry.coverage("rows")
        assert (proof.covered, proof.missing, proof.repeated) == (ROWS - 1, 1, 1)
        assert proof.suspect == ((0, 128), (3968, 4000))


def test_live_epoch_is_exact_when_errors_are_caught_on_the_way(
    own_coordinator: LocalCoordinator, job: str, rows: Path
) -> None:
    url = own_coordinator.url
    registry = DatasetRegistry(url, job=job)
    registry.register("rows", rows, "parquet", shard_size=50)
    bad = {12, 1700, 3999}

    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        if int(sample["id"]) in bad:
            bad.remove(int(sample["id"]))
            raise OSError("cannot be decoded")
        return sample

    with TrainingOrchestrator(coordinator_url=url, job=job) as worker:
        worker.register()
        live = registry.live_loader("rows", 64, decode=decode)
        got: list[int] = []
        while live.epoch == 0:
            try:
                for batch in live:
                    got += batch["id"].tolist()
            except OSError:
                live.commit()
        assert sorted(got) == list(range(ROWS))
        (proof,) = registry.coverage("rows")
        assert (proof.covered, proof.exact, bad) == (ROWS, True, set())


def test_loader_of_a_worker_takes_its_rank_and_the_world_from_the_job(
    own_coordinator: LocalCoordinator, job: str, rows: Path
) -> None:
    url = own_coordinator.url
    registry = DatasetRegistry(url, job=job)
    registry.register("rows", rows, "parquet", shard_size=50, seed=9)
    with TrainingOrchestrator(coordinator_url=url, job=job, world_size=4, rank=2) as worker:
        worker.register()
        loader = registry.loader("rows", 10)
        assert (loader.rank, loader.world_size) == (2, 4)
        assert loader.state_dict()["plan"]["seed"] == 9
        assert len(loader) == 100


def test_loaders_that_cannot_be_made_say_why(
    own_coordinator: LocalCoordinator, job: str, rows: Path
) -> None:
    registry = DatasetRegistry(own_coordinator.url, job=job)
    with pytest.raises(ShardError, match="'rows' is not registered"):
        registry.loader("rows", 10)
    registry.register("rows", rows, "parquet", shard_size=50)
    registry.register_dataset("numbers", 100, 10)
    with pytest.raises(StrataError, match="registered worker"):
        registry.live_loader("rows", 10)
    with pytest.raises(ShardError, match="no column 'idd'"):
        registry.loader("rows", 10, columns=["idd"])
    with pytest.raises(ShardError, match="no files"):
        registry.loader("numbers", 10, columns=["id"])
    with pytest.raises(TypeError, match="colums"):
        registry.loader("rows", 10, colums=["id"])
    assert sum(len(b["sample"]) for b in registry.loader("numbers", 10)) == 100


def sums(loader: Loader, columns: list[str]) -> dict[str, int]:
    totals = dict.fromkeys(columns, 0)
    for batch in loader:
        for name in columns:
            totals[name] += int(batch[name].sum())
    return totals


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("csv", marks=pytest.mark.long),
        pytest.param("csv.gz", marks=pytest.mark.long),
        "parquet",
    ],
)
def test_flights_load_alike_from_disk_and_s3_on_any_number_of_workers(
    flights: dict[str, Path], s3: S3Store, tmp_path: Path, kind: str
) -> None:
    format = kind.partition(".")[0]
    columns = ["distance", "month", "dep_delay"]
    plain = pq.read_table(flights["parquet"], columns=columns)
    expected = {name: sum(v or 0 for v in plain[name].to_pylist()) for name in columns}
    cache = DiskCache(tmp_path / "shards", 2**28)
    remote = build_index(upload(s3, f"load-{kind}", flights[kind].parent), format)
    for index, world in ((build_index(flights[kind], format), 3), (remote, 2)):
        source = FileSource(index, 20_000, columns=columns, cache=cache)
        assert len(source) == FLIGHTS
        found = dict.fromkeys(columns, 0)
        for rank in range(world):
            loader = Loader(
                source, 4096, rank=rank, world_size=world, fill=dict.fromkeys(columns, 0)
            )
            for name, total in sums(loader, columns).items():
                found[name] += total
        assert found == expected
    assert cache.usage().entries


def test_digits_load_as_images_from_disk_and_s3(
    digits: tuple[Path, np.ndarray], s3: S3Store
) -> None:
    folder, array = digits
    for place in (str(folder), upload(s3, "load-digits", folder)):
        source = FileSource(build_index(place, "tfrecord"), 200, columns=["image", "label"])
        loader = Loader(
            source, 64, ids=True, decode=lambda s: {"x": np.stack(s["image"]), "y": s["label"]}
        )
        count = 0
        for batch in loader:
            expected = array[batch["__id__"]]
            assert np.allclose(batch["x"], expected[:, :-1])
            assert np.array_equal(batch["y"].ravel(), expected[:, -1])
            count += len(batch["__id__"])
        assert count == DIGITS


def test_loader_made_before_registration_does_not_read_the_others_share(
    coordinator: LocalCoordinator, job: str
) -> None:
    with DatasetRegistry(coordinator.url, job=job) as registry:
        registry.register_dataset("train", 100, 10)
        early, own = registry.loader("train", 10), registry.loader("train", 10, rank=0)
        with TrainingOrchestrator(coordinator_url=coordinator.url, job=job) as orchestrator:
            orchestrator.register()
            with pytest.raises(StrataError, match=r"made before .* register\(\)"):
                next(iter(early))
            assert sum(len(batch["sample"]) for batch in own) == 100


def test_registry_of_another_coordinator_does_not_take_the_worker_for_its_own(
    own_coordinator: LocalCoordinator, patient_coordinator: LocalCoordinator, job: str
) -> None:
    with (
        TrainingOrchestrator(
            coordinator_url=own_coordinator.url, job=job, world_size=4, rank=2
        ) as worker,
        DatasetRegistry(patient_coordinator.url, job=job) as elsewhere,
        DatasetRegistry(own_coordinator.url.replace("127.0.0.1", "localhost"), job=job) as here,
        DatasetRegistry(own_coordinator.url.removeprefix("http://"), job=job) as plain,
    ):
        worker.register()
        for registry in (elsewhere, here):
            registry.register_dataset("train", 100, 10)
        assert plain.loader("train", 10).rank == 2
        assert sum(len(batch["sample"]) for batch in elsewhere.loader("train", 10)) == 100
        assert here.loader("train", 10).rank == 2


READS_ON = """
import sys, threading
from dtruntime.data import FileSource, Loader, build_index

def read():
    threading.main_thread().join()
    source = FileSource(build_index(sys.argv[1], "parquet"), 50)
    print("read", sum(len(batch["id"]) for batch in Loader(source, 10)), flush=True)

threading.Thread(target=read).start()
"""


def test_thread_that_outlives_the_main_one_reads_everything(rows: Path) -> None:
    with WorkerProcess(READS_ON, [str(rows)]) as process:
        code = process.wait(PATIENCE)
        assert (process.lines, process.log, code) == ([f"read {ROWS}"], "", 0)
