"""What is shown of workers and runs that have ended: what they said last, also after a restart."""

import signal
import time
from typing import Any

import pytest

from dtruntime import TrainingOrchestrator
from dtruntime.rpc.gen import coordinator_pb2 as pb
from dtruntime.rpc.messages import STATE_CODES
from dtruntime.testing import LocalCoordinator, WorkerProcess, eventually
from dtruntime.types import WorkerState
from tests.support.http_api import Api
from tests.support.raw_client import RawClient, RawWorker

TRAINING = STATE_CODES[WorkerState.TRAINING]

PROGRAM = """
import signal
import sys
from dtruntime import TrainingOrchestrator

signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
worker = TrainingOrchestrator()
worker.register()
worker.report(step=3, loss=1 / 3)
worker.beat()
print("begun", flush=True)
input()
for step in range(4, 25):
    worker.report(step=step, loss=1 / step)
print("reported", flush=True)
"""
ENDS = {
    "deregistered": "worker.deregister()",
    "exception": "raise RuntimeError('out of data')",
    "terminated": "input()",
}


@pytest.mark.parametrize("end", ENDS)
def test_run_that_has_ended_shows_what_was_reported_last(
    served: LocalCoordinator, api: Api, job: str, end: str
) -> None:
    env = {"COORDINATOR_URL": served.url, "STRATA_JOB": job}
    with WorkerProcess(PROGRAM + ENDS[end], env=env) as program:
        program.expect("begun")
        eventually(lambda: task_of(api, job).get("step") == 3, what="the first report is shown")
        program.send("")
        program.expect("reported")
        if end == "terminated":
            program.send_signal(signal.SIGTERM)
        program.wait()
    (worker,) = workers_of(api, job)
    assert (worker["membership"], worker["step"]) == ("left", 24)
    task = task_of(api, job)
    assert (task["state"], task["step"], task["metrics"]) == ("stopped", 24, {"loss": 1 / 24})


def test_last_report_counts_whichever_worker_made_it(
    served: LocalCoordinator, api: Api, job: str
) -> None:
    with RawClient(served.url, job) as raw:
        first, second = raw.workers(2)
        beat(first, 7, loss=1.0)
        beat(second, 5, loss=3.0)
        eventually(lambda: task_of(api, job).get("step") == 7)
        second.leave()
        beat(first, 8, loss=2.0)
        first.leave()
    task = task_of(api, job)
    assert (task["step"], task["metrics"]) == (8, {"loss": 2.5})


@pytest.mark.deaths
def test_killed_coordinator_knows_how_its_workers_ended(
    served: LocalCoordinator, api: Api, job: str
) -> None:
    with RawClient(served.url, job) as raw:
        left, dead = raw.workers(2)
        for worker, step in ((left, 200), (dead, 199)):
            beat(worker, step, epoch=8, loss=0.5, epochs=8.0, steps=200.0)
        left.leave("done")
        eventually(lambda: raw.statuses()[dead.worker_id].membership == pb.MEMBERSHIP_DEAD)
    workers, task = workers_of(api, job), task_of(api, job)
    assert [(w["membership"], w["step"], w["epoch"]) for w in workers] == [
        ("left", 200, 8),
        ("dead", 199, 8),
    ]
    assert (task["step"], task["epochs"], task["total_steps"]) == (200, 8, 200)
    served.kill()
    served.start()
    assert [timeless(w) for w in workers_of(api, job)] == [timeless(w) for w in workers]
    assert task_of(api, job) == task
    found = api.ask("/api/dashboard", job=job).json()
    started = found["coordinator"]["started_at"]
    heard = [found["coordinator"]["now"] - w["heartbeat_age_seconds"] for w in found["workers"]]
    assert max(heard) < started, "nobody was heard since the start"
    with RawClient(served.url, job) as raw:
        info = raw.call("GetServerInfo")
        ages = [w.heartbeat_age_seconds for w in raw.statuses().values()]
        assert min(ages) > info.now - info.started_at


@pytest.mark.long
def test_recovery_counts_from_the_last_sign_of_life_of_one_found_dead(
    served: LocalCoordinator, api: Api, job: str
) -> None:
    env = {"COORDINATOR_URL": served.url, "STRATA_JOB": job}
    with WorkerProcess(PROGRAM, env=env) as first:
        first.expect("begun")
        eventually(lambda: task_of(api, job).get("step") == 3)
        first.kill()
    killed = time.time()
    with TrainingOrchestrator(coordinator_url=served.url, job=job) as worker:
        worker.register()
        trained = eventually(lambda: next_step(worker, api), what="the job trains again")
    assert trained["lost_at"] <= killed < trained["detected_at"]
    metrics = api.ask("/api/metrics", job=job).json()
    assert metrics["last_recovery_seconds"] >= trained["training_at"] - killed


def next_step(worker: TrainingOrchestrator, api: Api) -> Any:
    """Train for a step; the recovery, when it is over."""
    worker.report(step=(worker.get_status().step or 0) + 1)
    worker.beat()
    found = api.ask("/api/history", job=worker.job).json()["recoveries"]
    return next((one for one in found if one["training_at"] is not None), None)


def beat(worker: RawWorker, step: int, epoch: int = 0, **metrics: float) -> None:
    worker.heartbeat(state=TRAINING, step=step, epoch=epoch, metrics=metrics)


def workers_of(api: Api, job: str) -> list[Any]:
    found: list[Any] = api.ask("/api/workers", job=job).json()["items"]
    return found


def task_of(api: Api, job: str) -> Any:
    response = api.ask("/api/tasks", job=job)
    return next(iter(response.json().get("items", ())), {})


def timeless(worker: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in worker.items() if name != "heartbeat_age_seconds"}
