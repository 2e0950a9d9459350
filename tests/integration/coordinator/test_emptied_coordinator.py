"""A coordinator that comes back without its state: what its workers told it is told again."""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtruntime import DatasetRegistry, TrainingOrchestrator
from dtruntime.client.observer import Observer
from dtruntime.errors import ShardError, SyncError
from dtruntime.rpc.gen import coordinator_pb2 as pb
from dtruntime.testing import LocalCoordinator, WorkerProcess, eventually
from dtruntime.types import JobStatus
from tests.integration.run.test_operator_requests import crew_of, let_go, outcome, saved
from tests.support.command_line import strata
from tests.support.coordinators import StartCoordinator
from tests.support.crews import TrainingCrew, sequence
from tests.support.data.dataset_files import numbers, write_parquet
from tests.support.programs import emptied_torch_worker
from tests.support.raw_client import RawClient, Refusal

TOTAL = 4000 * 3999 / 2

READER = """
import sys
from dtruntime import DatasetRegistry, TrainingOrchestrator

worker = TrainingOrchestrator()
registry = DatasetRegistry()
print("registered", worker.register(), flush=True)
registry.register("rows", sys.argv[1], "parquet", shard_size=20, shuffle=True, seed=5)
input()
loader = registry.loader("rows", batch_size=10, ids=True)
for epoch in range(3):
    for batch in loader:
        print("read", epoch, *batch["__id__"].tolist(), flush=True)
        input()
    print("epoch", epoch, flush=True)
worker.report(epoch=3)
"""

LIVE = """
from dtruntime import DatasetRegistry, TrainingOrchestrator

with TrainingOrchestrator() as worker:
    registry = DatasetRegistry()
    print("registered", worker.register(), flush=True)
    registry.register_dataset("numbers", 100, 10)
    loader = registry.live_loader("numbers", 10)
    for batch in loader:
        loader.commit()
        print("read", flush=True)
        input()
"""


@pytest.fixture
def lossy(start_coordinator: StartCoordinator, tmp_path: Path) -> LocalCoordinator:
    """A coordinator whose log is not among what it loses."""
    return start_coordinator(log_path=tmp_path / "coordinator.log")


def come_back_empty(coordinator: LocalCoordinator) -> None:
    coordinator.kill()
    shutil.rmtree(coordinator.data_dir)
    coordinator.data_dir.mkdir()
    coordinator.start()


def status(coordinator: LocalCoordinator, job: str) -> JobStatus | None:
    with Observer(coordinator.url) as observer:
        return observer.status(job) if job in observer.jobs() else None


def known_status(coordinator: LocalCoordinator, job: str) -> JobStatus:
    found = status(coordinator, job)
    assert found is not None
    return found


def live(coordinator: LocalCoordinator, job: str) -> int:
    known = status(coordinator, job)
    return 0 if known is None else known.live_workers


@contextmanager
def programs(
    coordinator: LocalCoordinator, job: str, program: str, *arguments: object, count: int = 1
) -> Iterator[list[WorkerProcess]]:
    env = {"COORDINATOR_URL": coordinator.url, "STRATA_JOB": job}
    with ExitStack() as stack:
        given = [str(argument) for argument in arguments]
        started = []
        for _ in range(count):
            started.append(stack.enter_context(WorkerProcess(program, given, env=env)))
            started[-1].expect("registered")
        yield started


def read_by(workers: list[WorkerProcess], epoch: int) -> list[int]:
    """What all of them read of an epoch."""
    found: list[int] = []
    for worker in workers:
        said = (line.split() for line in worker.lines)
        found += [
            int(x)
            for word, number, *ids in said
            if word == "read"
            for x in ids
            if int(number) == epoch
        ]
    return sorted(found)


def go_on(worker: WorkerProcess, batches: int) -> None:
    for _ in range(batches):
        worker.expect("read")
        worker.send("next")


@pytest.mark.long
def test_plain_readers_read_every_sample_once_and_prove_it(
    lossy: LocalCoordinator, job: str, tmp_path: Path
) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    write_parquet(numbers(0, 120), folder / "part-0.parquet")
    with programs(lossy, job, READER, folder, count=2) as workers:
        for worker in workers:
            worker.send("begin")
        for worker in workers:
            go_on(worker, 8)  # six of the first epoch, two of the second
        ranks = {w.worker_id: w.rank for w in known_status(lossy, job).workers}
        come_back_empty(lossy)
        eventually(lambda: live(lossy, job) == 2, what="both are registered again")
        assert {w.worker_id: w.rank for w in known_status(lossy, job).workers} == ranks
        for worker in workers:
            go_on(worker, 10)
            worker.expect("epoch 2")
            assert worker.wait() == 0, worker.log
    for epoch in range(3):
        assert read_by(workers, epoch) == list(range(120)), f"epoch {epoch}"
    with DatasetRegistry(lossy.url, job=job) as registry:
        covered = registry.coverage("rows")
        assert [(one.epoch, one.complete, one.exact) for one in covered] == [
            (epoch, True, True) for epoch in range(3)
        ]


def test_dataset_that_somebody_else_registered_is_told_again_by_its_reader(
    lossy: LocalCoordinator, job: str
) -> None:
    with DatasetRegistry(lossy.url, job=job) as outsider:
        outsider.register_dataset("numbers", 60, 10, shuffle=True)
    worker = TrainingOrchestrator(coordinator_url=lossy.url, job=job)
    worker.register()
    registry = DatasetRegistry()
    loader = registry.loader("numbers", 10, ids=True)
    batches = iter(loader)
    seen = next(batches)["__id__"].tolist()
    come_back_empty(lossy)
    for batch in batches:
        seen += batch["__id__"].tolist()
    assert sorted(seen) == list(range(60))
    assert registry.describe("numbers").shuffle
    (covered,) = registry.coverage("numbers")
    assert covered.exact
    worker.deregister()


def test_dataset_that_was_removed_stays_so(lossy: LocalCoordinator, job: str) -> None:
    """Removal is no loss: whoever removed it meant it."""
    with DatasetRegistry(lossy.url, job=job) as registry:
        registry.register_dataset("numbers", 60, 10)
        strata("datasets", "rm", "numbers", "--url", lossy.url, "--job", job, "--force")
        with pytest.raises(ShardError, match="not registered"):
            registry.describe("numbers")


def test_barrier_after_the_loss_says_that_the_membership_changed(
    lossy: LocalCoordinator, job: str
) -> None:
    """Who has come back first would pass alone otherwise."""
    worker = TrainingOrchestrator(coordinator_url=lossy.url, job=job)
    worker.register()
    generation = worker.generation
    come_back_empty(lossy)
    with pytest.raises(SyncError, match="has lost its state") as told:
        worker.barrier("step")
    assert told.value.reason == "membership_changed"
    assert worker.is_registered
    assert worker.generation > generation
    worker.barrier("step")
    assert [w.rank for w in known_status(lossy, job).workers] == [worker.rank]
    worker.deregister()


def test_epoch_of_a_live_loader_whose_ledger_is_lost_is_not_begun_again(
    lossy: LocalCoordinator, job: str
) -> None:
    with programs(lossy, job, LIVE) as (worker,):
        worker.expect("read")
        come_back_empty(lossy)
        eventually(lambda: live(lossy, job) == 1, what="it is registered again")
        with RawClient(lossy.url, job) as client:
            newcomer = client.register(worker_id="newcomer")
            claim = pb.ClaimRequest(**newcomer.identity, dataset_id="numbers", plan="other")
            eventually(lambda: _is_registered(client, "numbers"), what="the dataset is told again")
            client.call("ClaimSamples", claim)
            worker.send("next")
            assert worker.wait() == 1
        last = worker.log.strip().splitlines()[-1]
    assert "ShardError" in last
    assert "strata state restore" in last


def _is_registered(client: RawClient, dataset: str) -> bool:
    return client.call("GetDataset", pb.DatasetRequest(dataset_id=dataset, job=client.job)).found


def test_call_of_another_state_is_refused_whatever_identity_it_names(
    lossy: LocalCoordinator, job: str
) -> None:
    """An emptied coordinator gives the same ids, ranks and incarnations again."""
    with RawClient(lossy.url, job) as client:
        before = client.register(worker_id="w")
        come_back_empty(lossy)
        after = client.register(worker_id="w")
        assert after.identity == before.identity
        old, new = before.registration.state_id, after.registration.state_id
        calls: dict[str, dict[str, Any]] = {
            "Heartbeat": {},
            "WaitBarrier": {"barrier_id": "b", "ticket": 1, "timeout_ms": 1},
            "BeginCheckpoint": {"step": 1, "ticket": 1},
            "NotifyCheckpoint": {"checkpoint_id": "c", "step": 1},
            "AbandonCheckpoints": {},
            "DeregisterWorker": {},
        }
        for method, fields in calls.items():
            with pytest.raises(Refusal, match="never had") as refused:
                client.call(method, **before.identity, **fields, state_id=old)
            assert refused.value.reason == "foreign_state", method
        assert after.heartbeat(state_id=new).live_workers == 1


def test_numbers_go_on_above_what_a_returning_worker_knew(
    lossy: LocalCoordinator, job: str
) -> None:
    with RawClient(lossy.url, job) as client:
        known = {"previous_incarnation": 7, "previous_generation": 30, "previous_attempts": 12}
        worker = client.register(worker_id="w", state_id="another", **known)
        assert worker.registration.incarnation == 8
        assert worker.registration.generation > 30
        assert worker.begin_checkpoint(5).checkpoint_id == "step-000000000005-000013"


def test_run_goes_on_from_its_last_checkpoint(
    lossy: LocalCoordinator, job: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with crew_of(folder, lossy, job, 3, hold=35, save_steps=10) as crew:
        crew.until("the step to hold at", lambda: crew.last_step >= 35)
        come_back_empty(lossy)
        crew.until("their return", lambda: live(lossy, job) == 3)
        let_go(crew)
        crew.wait()
    ends = [outcome(crew, number) for number in range(3)]
    assert {(end["ending"], end["total"]) for end in ends} == {("finished", TOTAL)}, crew.logs()
    read = [number for ids in sequence(crew).values() for number in ids]
    assert sorted(read) == list(range(4000))
    assert saved(folder)[-1] == 100
    known = status(lossy, job)
    assert known is not None
    assert known.latest_checkpoint is not None
    assert known.latest_checkpoint.step == 100
    with DatasetRegistry(lossy.url, job=job) as registry:
        (dataset,) = registry.list_datasets()
        (covered,) = registry.coverage(dataset.dataset_id)
        assert covered.exact


@pytest.mark.long
def test_torch_run_trains_the_model_of_an_undisturbed_one(
    lossy: LocalCoordinator, job: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    program = Path(emptied_torch_worker.__file__)
    with TrainingCrew(folder, lossy.url, 2, str(program), folder, 23) as crew:
        crew.environment["STRATA_JOB"] = job
        crew.traces = "steps-*.jsonl"
        crew.start()
        crew.until("the step to hold at", lambda: crew.last_step >= 23)
        come_back_empty(lossy)
        crew.until("their return", lambda: live(lossy, job) == 2)
        let_go(crew)
        crew.wait()
    first, second = (dict(np.load(file)) for file in sorted(folder.glob("weights-*.npz")))
    (tmp_path / "alone").mkdir()
    alone = emptied_torch_worker.train(tmp_path / "alone", 0)
    for name, value in alone.items():
        assert np.array_equal(first[name], second[name]), name
        np.testing.assert_allclose(first[name], value, rtol=2e-4, atol=2e-5, err_msg=name)
    samples, steps = emptied_torch_worker.SAMPLES, 20
    trained = sequence(crew)
    for epoch in range(2):
        within = range(epoch * steps + 1, (epoch + 1) * steps + 1)
        ids = [number for step in within for number in trained[step]]
        assert sorted(ids) == list(range(samples)), f"epoch {epoch}"


@pytest.mark.long
def test_run_rides_through_a_coordinator_whose_log_is_lost_and_that_is_restored(
    lossy: LocalCoordinator, job: str, tmp_path: Path
) -> None:
    """It refuses to start on what is left; a copy from before its workers came does."""
    folder, copy = tmp_path / "run", tmp_path / "copy.db"
    data = ("--data-dir", str(lossy.data_dir))
    assert strata("state", "backup", str(copy), *data).returncode == 0
    with crew_of(folder, lossy, job, 2, hold=35, save_steps=10) as crew:
        crew.until("the step to hold at", lambda: crew.last_step >= 35)
        lossy.kill()
        (lossy.data_dir / "state.db-wal").unlink()
        with pytest.raises(Exception, match="strata state restore"):
            lossy.start()
        assert strata("state", "restore", str(copy), *data, "--force").returncode == 0
        lossy.start()
        crew.until("their return", lambda: live(lossy, job) == 2)
        let_go(crew)
        crew.wait()
    ends = [outcome(crew, number) for number in range(2)]
    assert {(end["ending"], end["total"]) for end in ends} == {("finished", TOTAL)}, crew.logs()


def test_commits_of_one_writer_are_told_again(lossy: LocalCoordinator, job: str) -> None:
    worker = TrainingOrchestrator(coordinator_url=lossy.url, job=job)
    worker.register()
    for step in (1, 2):
        worker.commit_checkpoint(f"c-{step}", step, path=f"/c-{step}", size_bytes=step)
    come_back_empty(lossy)
    with pytest.raises(SyncError):
        worker.barrier("step")
    with Observer(lossy.url) as observer:
        told = eventually(
            lambda: found if len(found := observer.checkpoints(job)) == 2 else None,
            what="both are told again",
        )
    assert [(one.checkpoint_id, one.path, one.size_bytes) for one in told] == [
        ("c-1", "/c-1", 1),
        ("c-2", "/c-2", 2),
    ]
    latest = worker.latest_checkpoint()
    assert latest is not None
    assert latest.step == 2
    worker.deregister()


def test_commit_that_finds_the_state_lost_comes_behind_those_that_are_told_again(
    lossy: LocalCoordinator, job: str
) -> None:
    worker = TrainingOrchestrator(coordinator_url=lossy.url, job=job, heartbeat_interval_ms=9000)
    worker.register()
    for step in (1, 2):
        worker.commit_checkpoint(f"c-{step}", step)
    come_back_empty(lossy)
    worker.commit_checkpoint("c-3", 3)
    with Observer(lossy.url) as observer:
        assert [one.checkpoint_id for one in observer.checkpoints(job)] == ["c-1", "c-2", "c-3"]
    latest = worker.latest_checkpoint()
    assert latest is not None
    assert latest.step == 3
    worker.deregister()


def test_step_that_was_begun_when_the_state_was_lost_can_be_saved_again(
    lossy: LocalCoordinator, job: str
) -> None:
    worker = TrainingOrchestrator(coordinator_url=lossy.url, job=job, heartbeat_interval_ms=9000)
    worker.register()
    for step in range(1, 6):
        worker.commit_checkpoint(worker.begin_checkpoint(step), step, partial=True)
    come_back_empty(lossy)
    first = worker.begin_checkpoint(6)
    worker.abandon_checkpoints()
    with pytest.raises(SyncError):
        worker.barrier("goes back")
    again = worker.begin_checkpoint(6)
    worker.commit_checkpoint(again, 6, partial=True)
    assert again != first
    latest = worker.latest_checkpoint()
    assert latest is not None
    assert latest.checkpoint_id == again
    worker.deregister()


def test_look_at_an_empty_coordinator_fences_nobody(lossy: LocalCoordinator, job: str) -> None:
    """Others have returned before, and so the job is there and the worker not."""
    worker = TrainingOrchestrator(coordinator_url=lossy.url, job=job, heartbeat_interval_ms=9000)
    worker.register()
    come_back_empty(lossy)
    with RawClient(lossy.url, job) as client:
        client.register(worker_id="other", rank=1)
        assert worker.get_status().worker_id == worker.worker_id
    assert worker.live_workers() == 2
    worker.deregister()
