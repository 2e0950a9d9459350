"""Who becomes which rank: assigned, asked for, named by the launcher, or waited for."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from dtruntime import TrainingOrchestrator, WorkerConfig
from dtruntime.errors import ConnectionError, StrataError, SyncError
from dtruntime.testing import LocalCoordinator, eventually
from tests.support.coordinators import JobView
from tests.support.raw_client import RawClient, Refusal
from tests.support.workers import RemoteWorker, remote_workers


@pytest.fixture
def env(
    coordinator: LocalCoordinator, job: str, monkeypatch: pytest.MonkeyPatch
) -> pytest.MonkeyPatch:
    """The environment of a launcher that names the coordinator and the job."""
    monkeypatch.setenv("COORDINATOR_URL", coordinator.url)
    monkeypatch.setenv("STRATA_JOB", job)
    return monkeypatch


def test_ids_are_assigned_by_rank_from_zero(service: RawClient) -> None:
    workers = service.workers(3)
    assert [w.worker_id for w in workers] == ["worker-0", "worker-1", "worker-2"]
    assert [w.rank for w in workers] == [0, 1, 2]
    incarnations = [w.registration.incarnation for w in workers]
    assert incarnations == sorted(set(incarnations))


def test_lowest_free_rank_is_taken(service: RawClient) -> None:
    workers = service.workers(4)
    workers[2].leave()
    workers[1].leave()
    assert [service.register().rank for _ in range(3)] == [1, 2, 4]


def test_id_and_rank_are_as_asked_for(service: RawClient) -> None:
    worker = service.register(worker_id="trainer/a", rank=5)
    assert (worker.worker_id, worker.rank) == ("trainer/a", 5)
    assert service.register(rank=2).worker_id == "worker-2"
    assert service.register().rank == 0


def test_everything_comes_from_the_environment(env: pytest.MonkeyPatch, view: JobView) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "3", "WORKER_ID": "host-b"}.items():
        env.setenv(name, value)
    with TrainingOrchestrator() as orchestrator:
        assert orchestrator.register() == "host-b"
        assert orchestrator.rank == 1
        assert orchestrator.job == view.job
        assert orchestrator.identity.world_size == 3
        assert view.status.world_size == 3


def test_arguments_beat_the_environment(env: pytest.MonkeyPatch, job: str) -> None:
    env.setenv("RANK", "1")
    env.setenv("WORKER_ID", "from-environment")
    env.setenv("STRATA_JOB", "another")
    with TrainingOrchestrator(worker_id="given", rank=0, job=job) as orchestrator:
        assert orchestrator.register() == "given"
        assert (orchestrator.rank, orchestrator.job) == (0, job)


@pytest.mark.parametrize(
    "variable", ["STRATA_ATTEMPT", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"]
)
def test_higher_restart_count_replaces_the_whole_group_at_once(
    env: pytest.MonkeyPatch, view: JobView, variable: str
) -> None:
    env.setenv("WORLD_SIZE", "2")
    ghosts = [TrainingOrchestrator(rank=rank) for rank in range(2)]
    for ghost in ghosts:
        ghost.register()
    env.setenv(variable, "1")
    env.setenv("WORLD_SIZE", "3")
    with TrainingOrchestrator(rank=0) as newcomer:
        assert newcomer.register() == "worker-0"
        assert view.status.world_size == 3
        assert view.status.live_workers == 1
        for ghost in ghosts:
            with pytest.raises(SyncError) as caught:
                ghost.barrier("step")
            assert caught.value.reason == "superseded"


def test_process_of_an_earlier_restart_is_refused(service: RawClient) -> None:
    service.register(attempt=2)
    with pytest.raises(Refusal, match="restart 1") as caught:
        service.register(attempt=1)
    assert caught.value.reason == "superseded"


def test_jobs_do_not_see_each_other(coordinator: LocalCoordinator, job: str) -> None:
    jobs = [f"{job}-{name}" for name in ("a", "b")]
    orchestrators = [
        TrainingOrchestrator(coordinator_url=coordinator.url, job=name, world_size=1)
        for name in jobs
    ]
    assert [o.register() for o in orchestrators] == ["worker-0", "worker-0"]
    for orchestrator in orchestrators:
        orchestrator.barrier("step", timeout_ms=60_000)
    orchestrators[0].commit_checkpoint("c-1", 1)
    assert orchestrators[1].latest_checkpoint() is None
    orchestrators[0].deregister()
    orchestrators[1].barrier("step", timeout_ms=60_000)
    orchestrators[1].deregister()


@pytest.mark.deaths
def test_full_job_makes_a_newcomer_wait_for_a_rank(
    coordinator: LocalCoordinator, job: str, view: JobView
) -> None:
    with (
        remote_workers(2, coordinator, job=job, world_size=2) as workers,
        RemoteWorker(coordinator.url, job=job, world_size=2) as spare,
    ):
        registration = spare.begin("register")
        eventually(lambda: spare.events("call.postponed"))
        assert not registration.done()
        workers[0].kill()
        assert registration.result(60) == "worker-0"
        assert spare.call("rank") == 0


def test_full_job_is_an_error_when_no_rank_comes_free(
    coordinator: LocalCoordinator, job: str
) -> None:
    config = WorkerConfig(
        coordinator_url=coordinator.url, job=job, world_size=1, connect_timeout_ms=500
    )
    with TrainingOrchestrator(config) as first:
        first.register()
        with pytest.raises(ConnectionError, match=f"all 1 ranks of job '{job}'"):
            TrainingOrchestrator(config).register()


@pytest.mark.parametrize("running", [0, 2])
def test_another_world_size_is_a_conflict_that_names_both(service: RawClient, running: int) -> None:
    service.register(world_size=running)
    with pytest.raises(Refusal) as caught:
        service.register(world_size=4)
    assert caught.value.code == grpc.StatusCode.FAILED_PRECONDITION
    assert caught.value.reason == "world_size_conflict"
    for part in (service.job, "world_size=4", "world_size=2" if running else "elastic"):
        assert part in caught.value.message


def test_worker_without_a_world_size_joins_a_fixed_job(service: RawClient) -> None:
    service.register(world_size=2)
    assert service.register().registration.world_size == 2


def test_sdk_raises_the_conflict_after_its_patience(
    coordinator: LocalCoordinator, job: str
) -> None:
    with TrainingOrchestrator(
        coordinator_url=coordinator.url, job=job, world_size=2
    ) as orchestrator:
        orchestrator.register()
        hasty = WorkerConfig(
            coordinator_url=coordinator.url, job=job, world_size=3, connect_timeout_ms=200
        )
        with pytest.raises(StrataError, match=r"world_size=2.*world_size=3"):
            TrainingOrchestrator(hasty).register()


def test_retry_of_a_registration_gives_the_same_member(service: RawClient) -> None:
    fields = {"session": "one-attempt", "world_size": 2}
    first = service.register(**fields)
    again = service.register(**fields)
    assert again.registration == first.registration
    assert service.call("GetStatus").live_workers == 1
    assert service.register(session="another-attempt", world_size=2).rank == 1


def test_same_id_from_another_process_replaces_the_first(service: RawClient) -> None:
    first = service.register(worker_id="trainer")
    second = service.register(worker_id="trainer")
    assert (second.worker_id, second.rank) == (first.worker_id, first.rank)
    assert second.registration.incarnation > first.registration.incarnation
    with pytest.raises(Refusal) as caught:
        first.heartbeat()
    assert caught.value.reason == "superseded"
    assert second.heartbeat().live_workers == 1


def test_same_rank_from_another_process_replaces_the_first(service: RawClient) -> None:
    first = service.register(world_size=2, rank=1)
    second = service.register(world_size=2, rank=1)
    assert second.rank == 1
    with pytest.raises(Refusal, match=r"replaced|registered again"):
        first.heartbeat()


def test_registering_again_gives_the_same_id(coordinator: LocalCoordinator, job: str) -> None:
    with TrainingOrchestrator(coordinator_url=coordinator.url, job=job) as orchestrator:
        assert orchestrator.register() == "worker-0"
        incarnation = orchestrator.identity.incarnation
        assert orchestrator.register() == "worker-0"
        assert orchestrator.identity.incarnation == incarnation


def test_worker_that_left_can_come_back(coordinator: LocalCoordinator, job: str) -> None:
    orchestrator = TrainingOrchestrator(coordinator_url=coordinator.url, job=job)
    for _ in range(3):
        assert orchestrator.register() == "worker-0"
        orchestrator.barrier("step", timeout_ms=60_000)
        orchestrator.deregister()
        assert not orchestrator.is_registered


def test_registration_carries_what_the_caller_says(
    coordinator: LocalCoordinator, job: str, view: JobView
) -> None:
    config = WorkerConfig(
        coordinator_url=coordinator.url, job=job, gpu_count=4, metadata={"zone": "b"}
    )
    with TrainingOrchestrator(config) as orchestrator:
        asyncio.run(
            orchestrator.register_worker(
                ip="192.168.1.10", port=8080, gpu_count=8, memory_bytes=512 * 1024**3, run=7
            )
        )
        worker = view.status.workers[0]
        assert (worker.hostname, worker.port) == ("192.168.1.10", 8080)
        assert (worker.gpu_count, worker.memory_bytes) == (8, 512 * 1024**3)
        assert worker.metadata == {"zone": "b", "run": "7"}
        assert worker.registered_at > 0
        assert "@" in worker.process


def test_hundred_registrations_at_once_get_a_hundred_ranks(
    coordinator: LocalCoordinator, job: str
) -> None:
    with RawClient(coordinator.url, job) as client, ThreadPoolExecutor(20) as threads:
        futures = [threads.submit(client.register, world_size=100) for _ in range(100)]
        workers = [future.result() for future in futures]
        assert sorted(worker.rank for worker in workers) == list(range(100))
        assert len({worker.registration.incarnation for worker in workers}) == 100
