"""SIGTERM: those who wait are told, nothing is lost, and the process ends well."""

import signal
import time

import grpc
import pytest

from dtruntime.testing import LocalCoordinator, eventually
from tests.support.coordinators import TRANSPORTS, StartCoordinator
from tests.support.raw_client import RawClient, Refusal
from tests.support.workers import remote_workers


@pytest.fixture(params=TRANSPORTS)
def stoppable(request: pytest.FixtureRequest, start_coordinator: StartCoordinator) -> object:
    return start_coordinator(options=["--transport", request.param], heartbeat_timeout_ms=30_000)


def test_sigterm_tells_waiting_callers_at_once_and_exits_with_zero(
    stoppable: LocalCoordinator,
) -> None:
    with RawClient(stoppable.url) as client:
        first, second, _ = client.workers(3, world_size=3)
        held = [
            first.arrive("step"),
            second.commit("c-1", 1, partial=True, timeout_ms=60_000),
        ]
        eventually(lambda: client.call("GetStatus").barriers)
        started = time.monotonic()
        assert stoppable.stop() == 0
        for call in held:
            with pytest.raises(Refusal, match="shutting down") as caught:
                call.result()
            assert caught.value.code == grpc.StatusCode.UNAVAILABLE
            assert caught.value.reason == "shutting_down"
        assert time.monotonic() - started < 15, "a held call was waited out"
    assert "coordinator.stopped" in stoppable.log


def test_sigterm_ends_streams_of_events(stoppable: LocalCoordinator) -> None:
    with RawClient(stoppable.url) as client:
        client.register()
        stream = client.watch(follow=True)
        assert next(stream).kind == "worker.registered"
        assert stoppable.stop() == 0
        assert list(stream) == []


def test_workers_carry_on_after_a_planned_restart(stoppable: LocalCoordinator) -> None:
    with RawClient(stoppable.url) as client, remote_workers(2, stoppable) as workers:
        waits = [workers[0].barrier("step")]
        eventually(lambda: client.call("GetStatus").barriers)
        generation = client.call("GetStatus").generation
        assert stoppable.stop() == 0
        stoppable.start()
        waits.append(workers[1].barrier("step"))
        for wait in waits:
            wait.result(60)
        assert client.call("GetStatus").generation == generation


def test_interrupt_from_the_keyboard_ends_it_just_as_well(
    own_coordinator: LocalCoordinator,
) -> None:
    own_coordinator.send_signal(signal.SIGINT)
    assert own_coordinator.wait() == 0
    assert "coordinator.stopped" in own_coordinator.log


def test_coordinator_that_drains_serves_until_the_last_worker_has_left(
    start_coordinator: StartCoordinator,
) -> None:
    coordinator = start_coordinator(options=["--drain-seconds", "60"])
    with RawClient(coordinator.url) as client:
        first, second = client.workers(2, world_size=2)
        coordinator.send_signal(signal.SIGTERM)
        eventually(lambda: "coordinator.draining workers=2" in coordinator.log)
        held = first.arrive("before leaving")
        second.arrive("before leaving").result()
        held.result()
        first.commit("c-1", 1).result()
        first.leave()
        second.leave()
        assert coordinator.wait() == 0
    coordinator.start()
    with RawClient(coordinator.url) as client:
        assert client.call("GetStatus").latest_checkpoint.checkpoint_id == "c-1"


def test_second_signal_ends_a_coordinator_that_drains(start_coordinator: StartCoordinator) -> None:
    coordinator = start_coordinator(options=["--drain-seconds", "600"])
    with RawClient(coordinator.url) as client:
        client.register()
        coordinator.send_signal(signal.SIGTERM)
        eventually(lambda: "coordinator.draining" in coordinator.log)
        coordinator.send_signal(signal.SIGTERM)
        assert coordinator.wait() == 0


def test_coordinator_without_workers_has_nothing_to_wait_for(
    start_coordinator: StartCoordinator,
) -> None:
    coordinator = start_coordinator(options=["--drain-seconds", "600"])
    assert coordinator.stop() == 0
