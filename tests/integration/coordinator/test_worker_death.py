"""Workers that die, leave or hang: what the others learn, how soon, and how often."""

import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from dtruntime.errors import StorageError, SyncError
from dtruntime.testing import LocalCoordinator, eventually
from dtruntime.types import Membership
from tests.support.coordinators import JobView
from tests.support.workers import RemoteWorker, remote_workers


def sync_error_of(future: object) -> SyncError:
    with pytest.raises(SyncError) as caught:
        future.result(60)  # type: ignore[attr-defined]
    return caught.value


@pytest.mark.deaths
def test_killed_worker_fails_the_others_barrier_long_before_its_timeout(
    coordinator: LocalCoordinator, job: str, view: JobView
) -> None:
    with remote_workers(3, coordinator, job=job) as workers:
        first, victim, last = workers
        waits = [first.barrier("step"), last.barrier("step")]
        eventually(lambda: view.waiting("step") == 2)
        killed_at = time.monotonic()
        victim.kill()
        errors = [sync_error_of(wait) for wait in waits]
        assert time.monotonic() - killed_at < 30, "a barrier of 60 s was waited out"
        for error in errors:
            assert error.reason == "membership_changed"
            assert list(error.lost) == ["worker-1"]
            assert "no heartbeat" in error.lost["worker-1"]
            assert error.survivors == (0, 2)
            assert "worker-1" in str(error)
            assert error.generation == view.status.generation


@pytest.mark.deaths
def test_each_survivor_is_told_once_and_the_next_barrier_completes(
    coordinator: LocalCoordinator, job: str, view: JobView
) -> None:
    with remote_workers(3, coordinator, job=job) as workers:
        first, victim, last = workers
        wait = first.barrier("step")
        eventually(lambda: view.waiting("step") == 1)
        victim.kill()
        assert sync_error_of(wait).reason == "membership_changed"
        again = first.barrier("step")
        eventually(lambda: view.waiting("step") == 1)
        told = sync_error_of(last.barrier("step"))
        assert (told.reason, list(told.lost)) == ("membership_changed", ["worker-1"])
        last.barrier("step").result(60)
        again.result(60)
        for _ in range(2):
            for passed in [first.barrier("step"), last.barrier("step")]:
                passed.result(60)


def test_worker_that_leaves_fails_the_others_barrier_at_once(
    coordinator: LocalCoordinator, job: str, view: JobView
) -> None:
    with remote_workers(3, coordinator, job=job) as workers:
        waits = [worker.barrier("step") for worker in workers[:2]]
        eventually(lambda: view.waiting("step") == 2)
        workers[2].call("deregister", "spot instance is taken away")
        for wait in waits:
            error = sync_error_of(wait)
            assert error.reason == "membership_changed"
            assert "spot instance is taken away" in error.lost["worker-2"]
            assert error.survivors == (0, 1)
        for passed in [worker.barrier("step") for worker in workers[:2]]:
            passed.result(60)


@pytest.mark.deaths
def test_replacement_takes_the_rank_of_the_dead_and_is_not_told_of_it(
    coordinator: LocalCoordinator, job: str, view: JobView
) -> None:
    with (
        remote_workers(3, coordinator, job=job) as workers,
        RemoteWorker(coordinator.url, job=job) as newcomer,
    ):
        before = view.status
        workers[1].kill()
        eventually(lambda: view.dead == 1)
        assert newcomer.register() == "worker-1"
        after = view.status
        incarnations = {w.rank: w.incarnation for w in after.workers}
        assert incarnations[1] > max(w.incarnation for w in before.workers)
        for survivor in (workers[0], workers[2]):
            assert sync_error_of(survivor.barrier("step")).reason == "membership_changed"
        for passed in [w.barrier("step") for w in (workers[0], newcomer, workers[2])]:
            passed.result(60)


@pytest.mark.long
@pytest.mark.deaths
def test_worker_killed_between_barriers_is_reported_by_the_next_one(
    coordinator: LocalCoordinator, job: str, view: JobView
) -> None:
    with remote_workers(2, coordinator, job=job) as (survivor, victim):
        for passed in [survivor.barrier("step"), victim.barrier("step")]:
            passed.result(60)
        victim.kill()
        eventually(lambda: view.dead == 1)
        assert list(sync_error_of(survivor.barrier("step")).lost) == ["worker-1"]
        survivor.barrier("step").result(60)


@pytest.mark.deaths
def test_killed_worker_aborts_its_checkpoint_and_the_status_says_how_each_one_ended(
    coordinator: LocalCoordinator, job: str, view: JobView
) -> None:
    with remote_workers(3, coordinator, job=job) as workers:
        saves = [
            workers[rank].begin("commit_checkpoint", "epoch-1", 10, path="/c/10", partial=True)
            for rank in (0, 2)
        ]
        workers[1].kill()
        for save in saves:
            with pytest.raises(StorageError, match=r"worker-1.*lost"):
                save.result(60)
        assert view.status.latest_checkpoint is None
        assert "checkpoint.aborted" in [kind for kind, _ in view.events]
        workers[2].call("deregister", "done")
        by_rank = {worker.rank: worker for worker in view.status.workers}
        assert [by_rank[rank].membership for rank in range(3)] == [
            Membership.LIVE,
            Membership.DEAD,
            Membership.LEFT,
        ]
        assert "no heartbeat" in by_rank[1].detail
        assert by_rank[2].detail == "done"
        kinds = [(kind, fields.get("worker")) for kind, fields in view.events]
        assert ("worker.dead", "worker-1") in kinds
        assert ("worker.left", "worker-2") in kinds


def test_process_that_ends_by_itself_leaves_at_once(
    coordinator: LocalCoordinator, job: str, view: JobView
) -> None:
    with remote_workers(2, coordinator, job=job) as (survivor, finished):
        wait = survivor.barrier("step")
        eventually(lambda: view.waiting("step") == 1)
        finished.process.close_input()
        assert finished.process.wait() == 0
        assert "process ended" in sync_error_of(wait).lost["worker-1"]


def pause_and_replace(view: JobView, victim: RemoteWorker, newcomer: RemoteWorker) -> None:
    victim.pause()
    eventually(lambda: view.dead == 1)
    assert newcomer.register() == "worker-1"
    victim.resume()


def commit(worker: RemoteWorker) -> object:
    return worker.begin("commit_checkpoint", "late", 7, path="/late")


@pytest.mark.deaths
@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda w: w.barrier("step"), id="barrier"),
        pytest.param(commit, id="commit", marks=pytest.mark.long),
        pytest.param(lambda w: w.begin("heartbeat"), id="heartbeat", marks=pytest.mark.long),
    ],
)
def test_paused_worker_finds_itself_superseded_and_can_register_again(
    coordinator: LocalCoordinator, job: str, view: JobView, call: Callable[[RemoteWorker], object]
) -> None:
    with (
        remote_workers(2, coordinator, job=job) as workers,
        RemoteWorker(coordinator.url, job=job) as newcomer,
    ):
        pause_and_replace(view, workers[1], newcomer)
        error = sync_error_of(call(workers[1]))
        assert error.reason == "superseded"
        assert "worker-1" in str(error)
        assert "register() again" in str(error)
        assert view.status.latest_checkpoint is None
        assert not workers[1].call("is_registered")
        assert workers[1].register() == "worker-2"
        assert sync_error_of(workers[0].barrier("step")).reason == "membership_changed"
        for passed in [w.barrier("step") for w in (*workers, newcomer)]:
            passed.result(60)


@pytest.mark.deaths
def test_paused_worker_learns_of_its_fate_from_its_own_heartbeats(
    coordinator: LocalCoordinator, job: str, view: JobView
) -> None:
    with (
        remote_workers(2, coordinator, job=job) as workers,
        RemoteWorker(coordinator.url, job=job) as newcomer,
    ):
        pause_and_replace(view, workers[1], newcomer)
        assert eventually(lambda: workers[1].events("worker.superseded"))
        assert not workers[1].call("is_registered")
        with pytest.raises(SyncError, match="register"):
            workers[1].call("rank")


@pytest.mark.long
@pytest.mark.deaths
def test_worker_paused_in_a_barrier_is_superseded_when_it_wakes(
    coordinator: LocalCoordinator, job: str, view: JobView
) -> None:
    with remote_workers(3, coordinator, job=job) as workers:
        wait = workers[1].barrier("step")
        eventually(lambda: view.waiting("step") == 1)
        workers[1].pause()
        eventually(lambda: view.dead == 1)
        workers[1].resume()
        assert sync_error_of(wait).reason == "superseded"


def test_pause_shorter_than_the_timeout_goes_unnoticed(
    coordinator: LocalCoordinator, job: str, view: JobView
) -> None:
    with remote_workers(2, coordinator, job=job) as workers:
        generation = view.status.generation
        workers[1].pause()
        wait = workers[0].barrier("step")
        eventually(lambda: max(w.heartbeat_age for w in view.status.workers) > 0.5)
        workers[1].resume()
        workers[1].barrier("step").result(60)
        wait.result(60)
        assert view.status.generation == generation


@pytest.mark.long
@pytest.mark.deaths
def test_death_ends_a_wait_without_a_timeout(
    coordinator: LocalCoordinator, job: str, view: JobView
) -> None:
    with remote_workers(2, coordinator, job=job) as (waiting, victim):
        wait = waiting.begin("wait_barrier", "step")
        eventually(lambda: view.waiting("step") == 1)
        victim.kill()
        with pytest.raises(SyncError) as caught:
            wait.result(60)
        assert caught.value.reason == "membership_changed"
        assert list(caught.value.lost) == ["worker-1"]


HOLDS_THE_LOCK = """
import ctypes, sys
from dtruntime import TrainingOrchestrator
from dtruntime.errors import SyncError

with TrainingOrchestrator(coordinator_url=sys.argv[1], job=sys.argv[2]) as worker:
    worker.register()
    ctypes.PyDLL(None).sleep(6)  # C code that does not release the interpreter lock
    try:
        worker.beat()
    except SyncError as exc:
        print(exc)
"""


@pytest.mark.deaths
def test_death_by_a_held_interpreter_lock_names_that_cause(
    coordinator: LocalCoordinator, job: str, view: JobView
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HOLDS_THE_LOCK, coordinator.url, job],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "holds the interpreter lock" in done.stdout, done
    assert "heartbeat_timeout_ms" in done.stdout, done
    (death,) = [fields for kind, fields in view.events if kind == "worker.dead"]
    assert death["reason"].startswith("no heartbeat for")
    assert "interpreter lock" in death["hint"]
