"""A network between worker and coordinator that cuts, delays, refuses and goes silent."""

import time
from collections.abc import Iterator

import pytest

from dtruntime import TrainingOrchestrator
from dtruntime.testing import LocalCoordinator, TcpProxy, eventually
from tests.support.coordinators import JobView, StartCoordinator
from tests.support.raw_client import RawClient
from tests.support.workers import RemoteWorker, remote_workers


@pytest.fixture
def proxy(coordinator: LocalCoordinator) -> Iterator[TcpProxy]:
    with TcpProxy(coordinator.url) as proxy:
        yield proxy


def test_connection_cut_in_the_middle_of_a_barrier_is_made_again(
    coordinator: LocalCoordinator, proxy: TcpProxy, job: str, view: JobView
) -> None:
    with (
        remote_workers(1, coordinator, job=job, world_size=2) as (near,),
        remote_workers(1, proxy.url, job=job, world_size=2) as (far,),
    ):
        generation = view.status.generation
        for _ in range(3):
            wait = far.barrier("step")
            eventually(lambda: view.waiting("step") == 1)
            assert proxy.cut() == 1
            eventually(lambda: view.waiting("step") == 1 and proxy.connections == 1)
            assert not wait.done()
            near.barrier("step").result(60)
            wait.result(60)
        assert view.status.generation == generation
        assert not far.events("worker.superseded")


def test_reply_lost_with_its_connection_is_given_again(
    coordinator: LocalCoordinator, proxy: TcpProxy, job: str, view: JobView
) -> None:
    with (
        remote_workers(1, coordinator, job=job, world_size=2) as (near,),
        remote_workers(1, proxy.url, job=job, world_size=2) as (far,),
    ):
        wait = far.barrier("step")
        eventually(lambda: view.waiting("step") == 1)
        proxy.go_silent()
        near.barrier("step").result(60)
        proxy.cut()
        wait.result(60)
        assert not view.status.barriers


def test_refused_connections_are_tried_until_they_work(
    proxy: TcpProxy, job: str, view: JobView
) -> None:
    with remote_workers(1, proxy.url, job=job) as (worker,):
        proxy.refuse()
        wait = worker.barrier("step")
        eventually(lambda: worker.events("coordinator.unreachable"))
        assert not wait.done()
        proxy.accept()
        wait.result(60)
        eventually(lambda: worker.events("coordinator.back"))
        assert len(worker.events("coordinator.unreachable")) == 1


def test_half_open_connection_is_noticed_and_replaced(
    start_coordinator: StartCoordinator,
) -> None:
    coordinator = start_coordinator(heartbeat_timeout_ms=30_000)
    with TcpProxy(coordinator.url) as proxy, RemoteWorker(proxy.url) as worker:
        worker.register()
        assert proxy.go_silent() == 1
        started = time.monotonic()
        worker.barrier("step", timeout_ms=100_000).result(60)
        assert time.monotonic() - started < 40, "only gRPC's own minute, or a time-out, ended it"
        with RawClient(coordinator.url) as client:
            assert client.call("GetStatus").live_workers == 1
            assert client.call("GetStatus").generation == 1


def test_slow_network_is_slow_and_nothing_else(proxy: TcpProxy, job: str, view: JobView) -> None:
    proxy.delay = 0.15
    with remote_workers(2, proxy.url, job=job) as workers:
        for _ in range(2):
            for wait in [worker.barrier("step") for worker in workers]:
                wait.result(60)
        assert view.status.live_workers == 2
        assert not any(worker.events("coordinator.unreachable") for worker in workers)


@pytest.mark.long
def test_very_slow_network_still_lets_a_worker_register(proxy: TcpProxy, job: str) -> None:
    proxy.delay = 0.6
    with TrainingOrchestrator(coordinator_url=proxy.url, job=job) as orchestrator:
        assert orchestrator.register() == "worker-0"


def test_commit_whose_connection_is_cut_is_made_exactly_once(
    coordinator: LocalCoordinator, proxy: TcpProxy, job: str
) -> None:
    with (
        TrainingOrchestrator(coordinator_url=proxy.url, job=job) as orchestrator,
        RawClient(coordinator.url, job) as client,
    ):
        orchestrator.register()
        for step in range(20):
            if step % 4 == 3:
                proxy.cut()
            orchestrator.commit_checkpoint(f"c-{step}", step)
        stored = [c.checkpoint_id for c in client.call("ListCheckpoints").checkpoints]
        assert stored == [f"c-{step}" for step in range(20)]


def test_registration_whose_reply_is_lost_takes_one_rank(
    coordinator: LocalCoordinator, proxy: TcpProxy, job: str, view: JobView
) -> None:
    with RemoteWorker(proxy.url, job=job) as worker:
        proxy.delay = 0.3
        registration = worker.begin("register")
        eventually(lambda: job in view.observer.jobs() and view.status.live_workers == 1)
        proxy.cut()
        proxy.delay = 0.0
        assert registration.result(60) == "worker-0"
        assert view.status.generation == 1
        assert worker.call("identity").incarnation == 1
