"""Barriers among live workers: rounds, repeated arrivals, time that runs out."""

import asyncio
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from dtruntime import TrainingOrchestrator
from dtruntime.errors import SyncError
from dtruntime.rpc.gen import coordinator_pb2 as pb
from dtruntime.testing import LocalCoordinator, WorkerProcess, eventually
from dtruntime.types import WorkerState
from tests.support.coordinators import JobView
from tests.support.raw_client import RawClient, Refusal
from tests.support.workers import remote_workers

COMPLETED = pb.BARRIER_OUTCOME_COMPLETED
TIMED_OUT = pb.BARRIER_OUTCOME_TIMED_OUT


def test_barrier_completes_when_the_last_process_arrives(
    coordinator: LocalCoordinator, job: str, view: JobView
) -> None:
    with remote_workers(3, coordinator, job=job) as workers:
        waits = [worker.barrier("start") for worker in workers[:2]]
        eventually(lambda: view.waiting("start") == 2)
        assert not any(wait.done() for wait in waits)
        waits.append(workers[2].barrier("start"))
        for wait in waits:
            wait.result(60)
        assert not view.status.barriers


def test_name_can_be_used_again_in_round_after_round(
    coordinator: LocalCoordinator, job: str
) -> None:
    with remote_workers(2, coordinator, job=job) as workers:
        for _ in range(20):
            for wait in [worker.barrier("step") for worker in workers]:
                wait.result(60)


def test_fast_worker_does_not_slip_through_two_rounds(
    coordinator: LocalCoordinator, job: str, view: JobView
) -> None:
    with remote_workers(2, coordinator, job=job) as (fast, slow):
        first = fast.barrier("step")
        slow.barrier("step").result(60)
        first.result(60)
        second = fast.barrier("step")
        eventually(lambda: view.waiting("step") == 1)
        assert not second.done()
        slow.barrier("step").result(60)
        second.result(60)


def test_time_that_runs_out_names_the_missing_and_their_last_step(
    coordinator: LocalCoordinator, job: str
) -> None:
    with remote_workers(3, coordinator, job=job) as workers:
        workers[1].call("report", step=41)
        workers[1].call("heartbeat")
        with pytest.raises(SyncError) as caught:
            workers[0].barrier("step", timeout_ms=300).result(60)
        error = caught.value
        assert error.reason == "timeout"
        assert error.missing == {"worker-1": 41, "worker-2": None}
        assert error.missing_count == 2
        assert error.generation == workers[0].call("generation")
        for part in ("'step'", "300 ms", "worker-1", "step 41", "worker-2", "strata status"):
            assert part in str(error)


def test_worker_that_is_expected_but_never_came_is_named(
    coordinator: LocalCoordinator, job: str
) -> None:
    with TrainingOrchestrator(
        coordinator_url=coordinator.url, job=job, world_size=2, rank=0
    ) as orchestrator:
        orchestrator.register()
        with pytest.raises(SyncError, match=r"worker-1 \(not registered yet\)"):
            orchestrator.barrier("step", timeout_ms=200)


@pytest.mark.long
def test_wait_without_a_timeout_goes_on_and_the_log_names_the_missing(
    coordinator: LocalCoordinator, job: str
) -> None:
    with remote_workers(1, coordinator, job=job, world_size=3) as (first,):
        wait = first.begin("wait_barrier", "step")
        told = eventually(lambda: first.events("barrier.waiting"))[0]
        assert told["barrier"] == "step"
        assert told["arrived"] == "1 of 3"
        assert told["missing"] == "worker-1 (not registered yet), worker-2 (not registered yet)"
        assert not wait.done()
        with remote_workers(2, coordinator, job=job, world_size=3) as others:
            for arrival in [wait, *(other.barrier("step") for other in others)]:
                arrival.result(60)


def test_round_completes_after_one_of_its_waits_has_timed_out(
    coordinator: LocalCoordinator, job: str, view: JobView
) -> None:
    with remote_workers(2, coordinator, job=job) as (hasty, patient):
        with pytest.raises(SyncError, match="timed out"):
            hasty.barrier("step", timeout_ms=100).result(60)
        wait = patient.barrier("step")
        eventually(lambda: view.waiting("step") == 1)
        hasty.barrier("step").result(60)
        wait.result(60)


def test_arriving_twice_counts_once(service: RawClient) -> None:
    first, second = service.workers(2, world_size=2)
    calls = [first.arrive("step"), first.arrive("step"), first.arrive("step", ticket=1)]
    eventually(lambda: service.call("GetStatus").barriers)
    assert service.call("GetStatus").barriers[0].arrived == 1
    assert second.arrive("step").result().participants == 2
    assert {call.result().outcome for call in calls} == {COMPLETED}


def test_two_threads_of_one_worker_count_once(coordinator: LocalCoordinator, job: str) -> None:
    def orchestrator() -> TrainingOrchestrator:
        return TrainingOrchestrator(coordinator_url=coordinator.url, job=job, world_size=2)

    with orchestrator() as one, orchestrator() as other, ThreadPoolExecutor() as threads:
        one.register()
        other.register()
        twice = [threads.submit(one.barrier, "step", 60_000) for _ in range(2)]
        eventually(lambda: one.activity.under_way(WorkerState.WAITING) == 2)
        # Answered on the same connection: both arrivals were heard before.
        asyncio.run(one.heartbeat())
        other.barrier("step", 60_000)
        assert [wait.result(60) for wait in twice] == [None, None]


def test_retry_of_a_completed_round_is_answered_at_once(service: RawClient) -> None:
    first, second = service.workers(2, world_size=2)
    wait = first.arrive("step", ticket=1)
    passed = second.arrive("step", ticket=1).result()
    assert wait.result() == passed
    assert first.arrive("step", ticket=1).result() == passed
    assert not service.call("GetStatus").barriers


def test_retry_after_a_timeout_is_answered_as_before(service: RawClient) -> None:
    first, second = service.workers(2, world_size=2)
    expired = first.arrive("step", ticket=1, timeout_ms=50).result()
    assert expired.outcome == TIMED_OUT
    again = first.arrive("step", ticket=1, timeout_ms=60_000).result()
    assert again == expired
    wait = first.arrive("step", ticket=2)
    assert second.arrive("step", ticket=1).result().outcome == COMPLETED
    assert wait.result().outcome == COMPLETED


def test_caller_that_hangs_up_does_not_count_any_more(service: RawClient) -> None:
    first, second = service.workers(2, world_size=2)
    call = first.arrive("step")
    eventually(lambda: service.call("GetStatus").barriers)
    call.cancel()
    eventually(lambda: not service.call("GetStatus").barriers)
    assert second.arrive("step", timeout_ms=50).result().outcome == TIMED_OUT


def test_cancelled_wait_is_withdrawn(
    coordinator: LocalCoordinator, job: str, view: JobView
) -> None:
    async def wait_and_give_up() -> None:
        async with TrainingOrchestrator(
            coordinator_url=coordinator.url, job=job, world_size=2
        ) as orchestrator:
            await orchestrator.register_worker()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(orchestrator.wait_barrier("step", 60_000), 0.5)
            await asyncio.to_thread(eventually, lambda: not view.status.barriers)

    asyncio.run(wait_and_give_up())


def test_newcomer_of_an_elastic_job_does_not_hold_up_a_round_that_is_open(
    service: RawClient,
) -> None:
    first, second = service.workers(2)
    wait = first.arrive("step")
    eventually(lambda: service.call("GetStatus").barriers)
    service.register()
    assert second.arrive("step").result().participants == 2
    assert wait.result().participants == 2


def test_different_names_are_different_barriers(service: RawClient) -> None:
    first, second = service.workers(2, world_size=2)
    calls = [first.arrive("a"), second.arrive("b")]
    eventually(lambda: len(service.call("GetStatus").barriers) == 2)
    assert not any(call.done() for call in calls)
    second.arrive("a").result()
    first.arrive("b").result()
    assert [call.result().outcome for call in calls] == [COMPLETED, COMPLETED]


def test_same_name_in_two_jobs_is_two_barriers(service: RawClient, service_url: str) -> None:
    with RawClient(service_url, f"{service.job}-other") as elsewhere:
        here, _ = service.workers(2, world_size=2)
        there = elsewhere.register(world_size=1)
        wait = here.arrive("step", timeout_ms=200)
        assert there.arrive("step").result().outcome == COMPLETED
        assert wait.result().outcome == TIMED_OUT


def test_barrier_of_one_worker_passes_at_once(coordinator: LocalCoordinator, job: str) -> None:
    with TrainingOrchestrator(coordinator_url=coordinator.url, job=job) as orchestrator:
        orchestrator.register()
        started = time.monotonic()
        for _ in range(20):
            orchestrator.barrier("alone", timeout_ms=60_000)
        assert time.monotonic() - started < 30


def test_interrupted_wait_ends_and_is_withdrawn(
    coordinator: LocalCoordinator, job: str, view: JobView
) -> None:
    program = """
from dtruntime import TrainingOrchestrator
orchestrator = TrainingOrchestrator(world_size=2)
orchestrator.register()
try:
    orchestrator.barrier("step", timeout_ms=100_000)
except KeyboardInterrupt:
    print("interrupted", flush=True)
input()
"""
    env = {"COORDINATOR_URL": coordinator.url, "STRATA_JOB": job}
    with WorkerProcess(program, env=env) as worker:
        eventually(lambda: job in view.observer.jobs() and view.waiting("step") == 1)
        worker.send_signal(signal.SIGINT)
        worker.expect("interrupted")
        eventually(lambda: not view.status.barriers)
        assert view.status.live_workers == 1


def test_many_open_barriers_are_refused_with_a_hint(service: RawClient, service_url: str) -> None:
    worker, _ = service.workers(2, world_size=2)
    held = [worker.arrive(f"step-{number}", timeout_ms=60_000) for number in range(1024)]
    with RawClient(service_url, service.job) as another:
        eventually(lambda: len(another.call("GetStatus").barriers) == 1024)
        worker.client = another
        with pytest.raises(Refusal, match="disagree about barrier names") as caught:
            worker.arrive("step-1024").result()
        assert caught.value.reason == "too_many_barriers"
        assert not any(call.done() for call in held)


@pytest.mark.deaths
def test_worker_silent_since_before_a_later_one_joined_fails_only_those_who_knew_it(
    coordinator: LocalCoordinator, job: str, view: JobView
) -> None:
    with RawClient(coordinator.url, job) as client:
        first, _, last = client.workers(3)
        waits = [first.arrive("step", timeout_ms=20_000), last.arrive("step", timeout_ms=20_000)]

        def dead_while_the_others_beat() -> int:
            first.heartbeat()
            last.heartbeat()
            return view.dead

        eventually(dead_while_the_others_beat)
        changed = waits[0].result()
        assert changed.outcome == pb.BARRIER_OUTCOME_MEMBERSHIP_CHANGED
        assert not waits[1].done()
        first.told = changed.generation
        assert first.arrive("step").result().outcome == pb.BARRIER_OUTCOME_COMPLETED
        assert waits[1].result().outcome == pb.BARRIER_OUTCOME_COMPLETED
