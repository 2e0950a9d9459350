"""Small values handed round among live workers."""

from pathlib import Path

import pytest

from dtruntime import TrainingOrchestrator
from dtruntime.errors import StrataError, SyncError
from dtruntime.rpc.gen import coordinator_pb2 as pb
from dtruntime.testing import LocalCoordinator, eventually
from tests.support.coordinators import JobView, StartCoordinator
from tests.support.raw_client import RawClient, Refusal
from tests.support.workers import remote_workers


def test_every_worker_gets_the_values_of_all(coordinator: LocalCoordinator, job: str) -> None:
    with remote_workers(3, coordinator, job=job) as workers:
        for round_ in range(3):
            values = [bytes([n, round_]) * 512 for n in range(3)]
            waits = [
                worker.begin("exchange", "plan", value)
                for worker, value in zip(workers, values, strict=True)
            ]
            for wait in waits:
                assert list(wait.result(60).items()) == list(enumerate(values))


def test_asynchronous_twin_does_the_same(coordinator: LocalCoordinator, job: str) -> None:
    with remote_workers(2, coordinator, job=job) as (first, second):
        wait = first.begin("exchange_async", "plan", b"a")
        assert second.call("exchange_async", "plan", b"") == {0: b"a", 1: b""}
        assert wait.result(60) == {0: b"a", 1: b""}


def test_value_of_a_worker_that_only_waits_is_empty(
    coordinator: LocalCoordinator, job: str
) -> None:
    with remote_workers(2, coordinator, job=job) as (first, second):
        wait = first.barrier("plan")
        assert second.call("exchange", "plan", b"x") == {0: b"", 1: b"x"}
        assert wait.result(60) is None


def test_large_or_wrong_values_are_refused_before_anything_is_sent() -> None:
    worker = TrainingOrchestrator(coordinator_url="http://localhost:1")
    with pytest.raises(ValueError, match="1024 bytes"):
        worker.exchange("plan", bytes(1025))
    with pytest.raises(TypeError, match="bytes, not str"):
        worker.exchange("plan", "text")  # type: ignore[arg-type]
    with pytest.raises(StrataError, match="not registered"):
        worker.exchange("plan", bytes(1024))


def test_service_refuses_large_values(service: RawClient) -> None:
    worker = service.register()
    request = pb.BarrierRequest(barrier_id="b", payload=bytes(1025), **worker.identity)
    with pytest.raises(Refusal, match="at most 1024 bytes"):
        service.begin("WaitBarrier", request).result()


def test_plain_barrier_is_as_small_on_the_wire_as_ever(service: RawClient) -> None:
    worker = service.register()
    assert not worker.arrive("b").result().values
    assert pb.BarrierRequest(barrier_id="b").ByteSize() == 3


@pytest.mark.deaths
def test_worker_that_dies_fails_the_exchange(
    coordinator: LocalCoordinator, job: str, view: JobView
) -> None:
    with remote_workers(3, coordinator, job=job) as workers:
        waits = [worker.begin("exchange", "plan", b"x", 60_000) for worker in workers[:2]]
        eventually(lambda: view.waiting("plan") == 2)
        workers[2].kill()
        for wait in waits:
            error = wait.exception(60)
            assert isinstance(error, SyncError)
            assert error.reason == "membership_changed"
        waits = [worker.begin("exchange", "plan", b"y", 60_000) for worker in workers[:2]]
        assert [wait.result(60) for wait in waits] == [{0: b"y", 1: b"y"}] * 2


def test_time_that_runs_out_names_the_missing(coordinator: LocalCoordinator, job: str) -> None:
    with remote_workers(2, coordinator, job=job) as (first, _):
        with pytest.raises(SyncError) as caught:
            first.call("exchange", "plan", b"x", timeout_ms=200)
        assert caught.value.reason == "timeout"
        assert set(caught.value.missing) == {"worker-1"}


def test_retry_gets_the_same_values_after_a_restart_of_the_coordinator(
    start_coordinator: StartCoordinator, tmp_path: Path
) -> None:
    coordinator = start_coordinator(heartbeat_timeout_ms=60_000)
    with RawClient(coordinator.url) as client:
        workers = client.workers(2, world_size=2)
        requests = [
            pb.BarrierRequest(
                barrier_id="plan",
                generation=worker.told,
                ticket=1,
                timeout_ms=30_000,
                payload=bytes([0, 255, worker.rank]),
                **worker.identity,
            )
            for worker in workers
        ]
        calls = [client.begin("WaitBarrier", request) for request in requests]
        replies = [call.result() for call in calls]
        assert dict(replies[0].values) == {0: b"\0\xff\0", 1: b"\0\xff\1"}
        coordinator.kill()
        coordinator.start()
        eventually(lambda: client.begin("WaitBarrier", requests[0]).result() == replies[0])


def test_newcomer_is_not_awaited_by_those_who_name_each_other(
    coordinator: LocalCoordinator, job: str
) -> None:
    with remote_workers(3, coordinator, job=job) as (first, second, third):
        wait = first.begin("exchange", "plan", b"a", ranks=(0, 1))
        assert second.call("exchange", "plan", b"b", ranks=[1, 0]) == {0: b"a", 1: b"b"}
        assert wait.result(60) == {0: b"a", 1: b"b"}
        with pytest.raises(ValueError, match="which is for ranks"):
            third.call("exchange", "plan", b"c", ranks=[0, 1])


def test_loss_of_another_does_not_end_a_meeting_of_named_ranks(
    coordinator: LocalCoordinator, job: str
) -> None:
    """It ends the next barrier of all, of which the lost one was to be a part."""
    with remote_workers(3, coordinator, job=job) as (first, second, third):
        wait = first.begin("exchange", "plan", b"a", ranks=(0, 1))
        third.call("deregister")
        assert second.call("exchange", "plan", b"b", ranks=(0, 1)) == {0: b"a", 1: b"b"}
        assert wait.result(60) == {0: b"a", 1: b"b"}
        with pytest.raises(SyncError, match="worker-2"):
            first.call("barrier", "everybody")
        wait = first.begin("exchange", "plan", b"a", ranks=(0, 1))
        second.call("deregister")
        with pytest.raises(SyncError, match="worker-1"):
            wait.result(60)
