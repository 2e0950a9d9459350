"""Workers that were killed and still count: what their successors read, and what is said of it."""

import os

import pytest

from dtruntime import DatasetRegistry, TrainingOrchestrator
from dtruntime.testing import LocalCoordinator, WorkerProcess, eventually
from tests.support.command_line import strata
from tests.support.coordinators import JobView
from tests.support.http_api import Api
from tests.support.raw_client import RawClient
from tests.support.workers import RemoteWorker, remote_workers

READER = """
from dtruntime import DatasetRegistry, TrainingOrchestrator

worker, datasets = TrainingOrchestrator(), DatasetRegistry()
worker.register()
datasets.register_dataset("train", 100, 10)
loader = datasets.loader("train", 10)
read = 0
for batch in loader:
    read += len(batch["sample"])
    print("read", read, flush=True)
    if read == 20:
        input()
print("done as rank", worker.rank, "with", read, flush=True)
"""


def test_restart_after_a_kill_reads_the_whole_epoch(
    coordinator: LocalCoordinator, job: str, view: JobView
) -> None:
    env = {"COORDINATOR_URL": coordinator.url, "STRATA_JOB": job}
    with WorkerProcess(READER, env=env) as first:
        first.expect("read 20")
        first.kill()
    with WorkerProcess(READER, env=env) as second:
        second.expect("read 20")
        second.send("")
        assert second.expect("done as") == "done as rank 0 with 100"
    reasons = [fields["reason"] for kind, fields in view.events if kind == "worker.dead"]
    assert [reason for reason in reasons if "has ended" in reason] == reasons != []
    with DatasetRegistry(coordinator.url, job=job) as registry:
        (epoch,) = registry.coverage("train")
        assert epoch.exact


def test_process_that_nobody_waited_for_is_gone_too(
    coordinator: LocalCoordinator, job: str, view: JobView
) -> None:
    with remote_workers(2, coordinator, job=job) as (first, other):
        first.kill()
        with remote_workers(1, coordinator, job=job) as (again,):
            assert again.call("rank") == 0
        assert other.call("rank") == 1


def test_paused_processes_are_not_gone(coordinator: LocalCoordinator, job: str) -> None:
    with remote_workers(1, coordinator, job=job) as (first,):
        first.pause()
        with RemoteWorker(coordinator.url, job=job) as second:
            second.register()
            assert second.call("rank") == 1
        first.resume()
        assert first.call("rank") == 0


def test_full_world_takes_a_replacement_at_once(
    coordinator: LocalCoordinator, job: str, view: JobView
) -> None:
    with remote_workers(2, coordinator, job=job, world_size=2) as (first, _):
        first.kill()
        with remote_workers(1, coordinator, job=job, world_size=2) as (again,):
            assert again.call("rank") == 0
    # Not by the heartbeats that it would have missed in the end.
    reasons = [fields["reason"] for kind, fields in view.events if kind == "worker.dead"]
    assert ["has ended" in reason for reason in reasons] == [True]


def test_process_of_another_machine_is_not_judged(coordinator: LocalCoordinator, job: str) -> None:
    with RawClient(coordinator.url, job) as raw:
        alive = raw.register(machine="elsewhere", pid=os.getpid(), process_started=1)
    assert alive.rank == 0
    with TrainingOrchestrator(coordinator_url=coordinator.url, job=job) as worker:
        worker.register()
        assert worker.rank == 1


@pytest.mark.deaths
def test_loader_that_shares_with_a_silent_member_says_so(
    coordinator: LocalCoordinator, job: str, caplog: pytest.LogCaptureFixture
) -> None:
    with RawClient(coordinator.url, job) as raw:
        silent = raw.register(worker_id="elsewhere").worker_id
    with TrainingOrchestrator(coordinator_url=coordinator.url, job=job) as worker:
        worker.register()
        registry = DatasetRegistry()
        registry.register_dataset("train", 100, 10)
        loader = registry.loader("train", 10)
        assert loader.world_size == 2
        eventually(lambda: "worker.shares_with_silent_members" in caplog.text)
        assert silent in caplog.text


@pytest.mark.deaths
def test_member_that_beats_is_not_called_silent(
    coordinator: LocalCoordinator, job: str, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        remote_workers(1, coordinator, job=job),
        TrainingOrchestrator(coordinator_url=coordinator.url, job=job) as worker,
    ):
        worker.register()
        registry = DatasetRegistry()
        registry.register_dataset("train", 100, 10)
        registry.loader("train", 10)
        beats = worker._heartbeats
        eventually(lambda: beats.watching is not None and beats.watching.done())
        assert "worker.shares_with_silent_members" not in caplog.text


@pytest.mark.deaths
def test_epochs_that_ended_with_missing_samples_are_red(served: LocalCoordinator, api: Api) -> None:
    with RawClient(served.url, "halves") as raw:
        raw.register()
    with TrainingOrchestrator(coordinator_url=served.url, job="halves") as worker:
        worker.register()
        registry = DatasetRegistry()
        registry.register_dataset("train", 100, 10)
        loader = registry.loader("train", 10)
        assert sum(len(batch["sample"]) for _ in range(2) for batch in loader) == 100
        (first, _) = registry.coverage("train")
        assert first.missing == 50

    def logged() -> list[dict[str, str]]:
        answer = api.ask("/api/logs", job="halves", level="error", event="epoch.incomplete")
        return [entry["fields"] for entry in answer.json()["items"]]

    eventually(lambda: len(logged()) == 2)
    assert {(entry["epoch"], entry["missing"]) for entry in logged()} == {("0", "50"), ("1", "50")}
    shown = strata("datasets", "show", "train", "--job", "halves", "--url", served.url)
    assert shown.stdout.count("SAMPLES MISSING") == 2
    status = strata("status", "--job", "halves", "--url", served.url)
    assert "epoch 1 of train ended with 50 of 100 samples missing" in status.stdout
    assert not first.ended_incomplete  # the other member was still there when it was asked
