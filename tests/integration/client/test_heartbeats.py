"""Heartbeats go on by themselves, whatever the program does, and carry what it reports."""

import random
from concurrent.futures import Future
from typing import Any

import pytest

from dtruntime import TrainingOrchestrator, WorkerConfig
from dtruntime.testing import LocalCoordinator, eventually
from dtruntime.types import Membership, WorkerState
from tests.support.coordinators import PATIENT, JobView
from tests.support.workers import RemoteWorker, remote_workers


@pytest.mark.long
@pytest.mark.deaths
def test_worker_busy_in_c_code_and_in_python_stays_alive(
    coordinator: LocalCoordinator, job: str, view: JobView
) -> None:
    with remote_workers(1, coordinator, job=job) as (worker,):
        busy: list[Future[Any]] = [
            worker.begin("compute_in_c", 5.0),
            worker.begin("spin", 5.0, threads=4),
        ]
        for work in busy:
            work.result(60)
        status = view.status
        assert (status.live_workers, status.workers[0].incarnation) == (1, 1)
        assert [kind for kind, _ in view.events] == ["worker.registered"]
        worker.barrier("step").result(60)


def test_report_is_carried_by_the_next_heartbeat(
    coordinator: LocalCoordinator, job: str, view: JobView
) -> None:
    with remote_workers(1, coordinator, job=job) as (worker,):
        assert view.status.workers[0].step is None
        worker.call("report", step=7, epoch=2, state="training", loss=0.125, lr=1e-4)
        seen = eventually(lambda: w if (w := view.status.workers[0]).step == 7 else None)
        assert (seen.epoch, seen.state) == (2, WorkerState.TRAINING)
        assert seen.metrics == {"loss": 0.125, "lr": 1e-4}
        worker.call("report", step=8)
        seen = eventually(lambda: w if (w := view.status.workers[0]).step == 8 else None)
        assert (seen.epoch, seen.state, seen.metrics["loss"]) == (2, WorkerState.TRAINING, 0.125)


def test_last_report_is_told_when_a_worker_leaves(
    coordinator: LocalCoordinator, job: str, view: JobView
) -> None:
    with TrainingOrchestrator(
        coordinator_url=coordinator.url, job=job, heartbeat_interval_ms=9000
    ) as worker:
        worker.register()
        worker.report(step=37, epoch=2, loss=0.25)
    (left,) = view.status.workers
    assert (left.membership, left.step, left.epoch) == (Membership.LEFT, 37, 2)
    assert left.metrics == {"loss": 0.25}


def test_worker_in_a_barrier_is_shown_as_waiting(
    coordinator: LocalCoordinator, job: str, view: JobView
) -> None:
    with remote_workers(2, coordinator, job=job) as workers:
        workers[0].call("report", state="training")
        wait = workers[0].barrier("step")
        eventually(lambda: view.status.workers[0].state == WorkerState.WAITING)
        workers[1].barrier("step").result(60)
        wait.result(60)
        eventually(lambda: view.status.workers[0].state == WorkerState.TRAINING)


def test_resources_are_measured(coordinator: LocalCoordinator, job: str, view: JobView) -> None:
    with remote_workers(1, coordinator, job=job) as (worker,):
        worker.begin("spin", 30.0, threads=1)
        seen = eventually(
            lambda: w if (w := view.status.workers[0]).resources.cpu_percent > 1 else None
        )
        assert 2**20 < seen.resources.memory_used_bytes < seen.resources.memory_total_bytes


def test_heartbeats_are_sent_at_the_interval_of_the_coordinator(
    coordinator: LocalCoordinator, job: str, view: JobView
) -> None:
    with remote_workers(1, coordinator, job=job) as (worker,):
        assert worker.call("identity").heartbeat_interval == 0.2
        eventually(lambda: view.status.workers[0].heartbeat_age < 0.1)


def test_heartbeats_leave_the_random_numbers_of_the_program_alone(
    coordinator: LocalCoordinator, job: str, view: JobView
) -> None:
    with TrainingOrchestrator(
        coordinator_url=coordinator.url, job=job, heartbeat_interval_ms=20
    ) as worker:
        random.seed(7)
        before = random.getstate()
        worker.register()
        for step in range(5):
            worker.report(step=step)
            eventually(lambda step=step: view.status.workers[0].step == step)  # type: ignore[misc]
        assert random.getstate() == before


def test_worker_may_choose_its_own_interval(
    coordinator: LocalCoordinator, job: str, view: JobView
) -> None:
    config = WorkerConfig(coordinator_url=coordinator.url, job=job, heartbeat_interval_ms=50)
    with TrainingOrchestrator(config) as orchestrator:
        orchestrator.register()
        assert orchestrator.identity.heartbeat_interval == 0.05


def test_interval_that_would_kill_the_worker_is_shortened(
    coordinator: LocalCoordinator, job: str
) -> None:
    with RemoteWorker(coordinator.url, job=job, heartbeat_interval_ms=60_000) as worker:
        worker.register()
        assert worker.call("identity").heartbeat_interval == PATIENT["heartbeat_timeout_ms"] / 3000
        assert worker.events("heartbeat.interval_shortened")


def test_explicit_heartbeat_is_sent_at_once(
    coordinator: LocalCoordinator, job: str, view: JobView
) -> None:
    with remote_workers(1, coordinator, job=job, heartbeat_interval_ms=900) as (worker,):
        worker.call("report", step=5)
        worker.call("heartbeat")
        assert view.status.workers[0].step == 5


@pytest.mark.parametrize("metrics", [{"loss": float("nan")}, {"loss": float("inf")}, {"n": 2**70}])
def test_odd_numbers_do_not_stop_the_heartbeats(
    coordinator: LocalCoordinator, job: str, view: JobView, metrics: dict[str, float]
) -> None:
    with remote_workers(1, coordinator, job=job) as (worker,):
        worker.call("report", step=1, **metrics)
        eventually(lambda: view.status.workers[0].step == 1)
        assert view.status.workers[0].metrics.keys() == metrics.keys()


@pytest.mark.parametrize(
    "metrics", [{f"metric-{n}": 1.0 for n in range(65)}, {"m" * 129: 1.0}], ids=["many", "long"]
)
def test_report_too_large_for_a_heartbeat_is_refused_where_it_is_made(
    metrics: dict[str, Any],
) -> None:
    orchestrator = TrainingOrchestrator()
    with pytest.raises(ValueError, match="at most 64 metrics"):
        orchestrator.report(**metrics)


def test_largest_report_fits_into_a_heartbeat(
    coordinator: LocalCoordinator, job: str, view: JobView
) -> None:
    with remote_workers(1, coordinator, job=job) as (worker,):
        worker.call("report", step=1, **{f"{n:0128}": 0.1 for n in range(64)})
        eventually(lambda: len(view.status.workers[0].metrics) == 64)
