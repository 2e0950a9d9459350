"""What an operator asks of a running job reaches its workers."""

import json
import threading
from collections.abc import Iterator

import pytest

from dtruntime import TrainingOrchestrator
from dtruntime.client.observer import Observer
from dtruntime.errors import StrataError, SyncError
from dtruntime.testing import LocalCoordinator, eventually
from dtruntime.types import Action
from tests.support.command_line import strata
from tests.support.coordinators import JobView, StartCoordinator
from tests.support.raw_client import RawClient
from tests.support.workers import remote_workers


@pytest.fixture
def worker(coordinator: LocalCoordinator, job: str) -> Iterator[TrainingOrchestrator]:
    with TrainingOrchestrator(coordinator_url=coordinator.url, job=job) as orchestrator:
        orchestrator.register()
        yield orchestrator


def test_request_of_an_operator_reaches_all_workers_until_one_completes_it(
    coordinator: LocalCoordinator, job: str, view: JobView
) -> None:
    with remote_workers(2, coordinator, job=job) as (first, second):
        key = view.observer.request_action(job, "checkpoint", reason="before the upgrade")
        eventually(lambda: first.call("actions") and second.call("actions"))
        (action,) = first.call("actions")
        assert (action.action_id, action.kind, action.worker_id) == (key, "checkpoint", "")
        assert (action.reason, action.requested_by) == ("before the upgrade", "")
        assert second.call("actions") == view.status.actions == (action,)
        second.call("complete_action", key, "saved step 7")
        first.call("complete_action", key)
        eventually(lambda: not first.call("actions") and not second.call("actions"))
    (fields,) = (fields for kind, fields in view.events if kind == "action.completed")
    assert fields["by"] == "worker-1"
    assert fields["outcome"] == "saved step 7"


def test_worker_asks_to_be_drained(worker: TrainingOrchestrator) -> None:
    key = worker.request_action("drain", reason="preempted")
    assert worker.request_action("drain", worker.worker_id) == key
    worker.beat()
    (action,) = worker.actions
    assert isinstance(action, Action)
    assert action.worker_id == action.requested_by == worker.worker_id
    assert action.requested_at > 0


def test_impossible_requests_say_what_is_wrong(
    worker: TrainingOrchestrator, view: JobView, job: str
) -> None:
    with pytest.raises(ValueError, match="checkpoint, stop, drain"):
        worker.request_action("dance")
    with pytest.raises(StrataError, match="'nobody' is not a live worker"):
        worker.request_action("drain", "nobody")
    with pytest.raises(ValueError, match="whole job"):
        view.observer.request_action(job, "stop", worker.worker_id)
    with pytest.raises(StrataError, match="does not exist"):
        view.observer.request_action("no-such-job", "stop")
    with pytest.raises(StrataError, match="no action 'action-999999'"):
        worker.complete_action("action-999999")
    assert worker.is_registered


def test_pending_requests_survive_a_kill_of_the_coordinator(
    start_coordinator: StartCoordinator,
) -> None:
    coordinator = start_coordinator(heartbeat_timeout_ms=60_000)
    with TrainingOrchestrator(coordinator_url=coordinator.url) as worker:
        worker.register()
        key = worker.request_action("stop")
        coordinator.kill()
        coordinator.start()
        with Observer(coordinator.url, patience=30.0) as observer:
            assert [a.action_id for a in observer.actions("default")] == [key]
            assert observer.request_action("default", "stop") == key


def test_heartbeat_without_actions_carries_no_bytes_for_them(service: RawClient) -> None:
    worker = service.register()
    before = worker.heartbeat()
    service.call("RequestAction", kind="stop")
    assert worker.heartbeat().ByteSize() > before.ByteSize()
    assert not before.actions


def test_listener_is_called_when_members_or_actions_change(
    coordinator: LocalCoordinator, worker: TrainingOrchestrator, job: str
) -> None:
    heard: list[tuple[int, int, str]] = []
    changed = threading.Event()

    def listener() -> None:
        thread = threading.current_thread().name
        heard.append((worker.generation, len(worker.actions), thread))
        changed.set()

    def failing() -> None:
        raise RuntimeError("not your business")

    worker.on_heartbeat(failing)
    worker.on_heartbeat(listener)
    worker.beat()
    key = worker.request_action("checkpoint")
    assert changed.wait(60)
    for _ in range(3):
        worker.beat()
    assert [entry[1:] for entry in heard] == [(1, "strata-io")]
    worker.complete_action(key)
    eventually(lambda: [entry[1] for entry in heard] == [1, 0])
    with TrainingOrchestrator(coordinator_url=coordinator.url, job=job) as other:
        other.register()
        eventually(lambda: len(heard) == 3)
        assert heard[-1][0] > heard[0][0]


def test_command_line_requests_lists_and_cancels(
    coordinator: LocalCoordinator, worker: TrainingOrchestrator, job: str
) -> None:
    where = ["--url", coordinator.url, "--job", job]
    asked = strata("actions", "request", "stop", "--reason", "maintenance", "--json", *where)
    assert asked.returncode == 0, asked.stderr
    (action,) = json.loads(asked.stdout)["actions"]
    assert (action["kind"], action["reason"], action["job"]) == ("stop", "maintenance", job)
    drained = strata("actions", "request", "drain", "--worker", worker.worker_id, *where)
    assert worker.worker_id in drained.stdout
    listed = strata("actions", "ls", *where)
    assert "maintenance" in listed.stdout
    assert "drain" in listed.stdout
    assert json.loads(strata("actions", "ls", "--json", *where).stdout)["schema"] == 1
    assert strata("actions", "cancel", action["action_id"], *where).returncode == 0
    (left,) = json.loads(strata("actions", "ls", "--json", *where).stdout)["actions"]
    assert left["kind"] == "drain"
    assert "drain" in strata("status", *where).stdout


def test_command_line_says_what_cannot_be_asked(
    coordinator: LocalCoordinator, worker: TrainingOrchestrator, job: str
) -> None:
    where = ["--url", coordinator.url, "--job", job]
    assert strata("actions", "request", "dance", *where).returncode == 2
    unnamed = strata("actions", "request", "drain", *where)
    assert unnamed.returncode == 2
    assert "--worker" in unnamed.stderr
    unknown = strata("actions", "request", "drain", "--worker", "nobody", *where)
    assert unknown.returncode == 1
    assert "'nobody'" in unknown.stderr
    gone = strata("actions", "ls", "--url", coordinator.url, "--job", "no-such-job")
    assert gone.returncode == 1
    assert strata("actions", "ls", "--url", "http://localhost:1").returncode == 3


# Step times and losses


def test_slow_worker_is_shown(coordinator: LocalCoordinator, job: str, view: JobView) -> None:
    with remote_workers(4, coordinator, job=job) as workers:
        for worker, seconds in zip(workers, (0.1, 0.11, 0.1, 0.4), strict=True):
            worker.call("report", step=5, step_seconds=seconds)
        eventually(lambda: [w.is_straggler for w in view.status.workers] == [False] * 3 + [True])
        slow = view.status.workers[3]
        assert slow.step_seconds == 0.4
        assert slow.slowness is not None
        assert slow.slowness > 3
        assert "worker.slow" in dict(view.events)
        shown = strata("status", "--url", coordinator.url, "--job", job).stdout
        assert "slow: 3.8 × the median" in shown
        workers[3].call("report", step_seconds=0.1)
        eventually(lambda: "worker.recovered_speed" in dict(view.events))


def test_step_time_that_is_none_is_refused() -> None:
    worker = TrainingOrchestrator(coordinator_url="http://localhost:1")
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="step_seconds"):
            worker.report(step_seconds=wrong)


@pytest.mark.deaths
def test_losses_are_counted_and_departures_are_not(
    coordinator: LocalCoordinator, job: str, view: JobView
) -> None:
    with remote_workers(3, coordinator, job=job) as (first, second, third):
        second.call("deregister")
        assert first.call("recent_losses", 600) == 0
        third.kill()
        eventually(lambda: first.call("recent_losses", 600) == 1)
        assert view.status.recent_losses(600) == 1
        assert view.observer.recent_losses(job, 600) == 1
        assert view.observer.recent_losses(job, 0) == 0
        assert first.call("live_workers") == 1


def test_worker_that_is_fenced_learns_of_it_when_it_asks(
    coordinator: LocalCoordinator, worker: TrainingOrchestrator, job: str
) -> None:
    with TrainingOrchestrator(
        coordinator_url=coordinator.url, job=job, worker_id=worker.worker_id
    ) as other:
        other.register()
        with pytest.raises(SyncError, match="registered again"):
            worker.request_action("stop")
