"""Forked children: a clear error at once, a clean end, and no harm to the parent."""

import pytest

from dtruntime.testing import LocalCoordinator, WorkerProcess, eventually
from tests.integration.conftest import JobView

SETUP = """
import multiprocessing, os, sys, time, warnings
warnings.simplefilter("ignore", DeprecationWarning)
from dtruntime import DatasetRegistry, StrataError, TrainingOrchestrator

parent = TrainingOrchestrator()
parent.register()

def attempt():
    "What a child gets from this call, and how long it takes."
    started = time.monotonic()
    try:
        print("child got", {CALL}, flush=True)
    except StrataError as error:
        print("child error", type(error).__name__, error, flush=True)
    took = time.monotonic() - started
    print("child", "at once" if took < 20 else f"only after {took} s", flush=True)
"""

FORKS = {
    "os.fork": """
child = os.fork()
if child == 0:
    attempt()
    sys.exit(0)
print("child exit", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
""",
    "os.fork, os._exit": """
child = os.fork()
if child == 0:
    attempt()
    os._exit(0)
print("child exit", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
""",
    "multiprocessing": """
child = multiprocessing.get_context("fork").Process(target=attempt)
child.start()
child.join()
print("child exit", child.exitcode, flush=True)
""",
}

CALLS = {
    "barrier of the parent's": 'parent.barrier("step")',
    "heartbeat of the parent's": "__import__('asyncio').run(parent.heartbeat())",
    "deregister of the parent's": "parent.deregister()",
    "rank of the parent's": "parent.rank",
    "a fresh orchestrator": "TrainingOrchestrator().register()",
    "a fresh registry": 'DatasetRegistry().get_shard("images", 0, 0)',
}

AFTERWARDS = """
parent.barrier("step")
print("parent rank", parent.get_status().rank, flush=True)
input()
"""


def child_of(coordinator: LocalCoordinator, job: str, fork: str, call: str) -> WorkerProcess:
    program = SETUP.replace("{CALL}", call) + FORKS[fork] + AFTERWARDS
    env = {"COORDINATOR_URL": coordinator.url, "STRATA_JOB": job}
    return WorkerProcess(program, env=env)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("fork", FORKS)
def test_forked_child_gets_a_clear_error_at_once(
    coordinator: LocalCoordinator, job: str, view: JobView, fork: str, call: str
) -> None:
    with child_of(coordinator, job, fork, CALLS[call]) as process:
        error = process.expect("child error", timeout=60)
        assert "fork" in error
        assert "plain data" in error
        assert process.expect("child ") == "child at once"
        assert process.expect("child exit") == "child exit 0"
        assert process.expect("parent rank", timeout=60) == "parent rank 0"
        assert view.status.live_workers == 1
        assert view.status.workers[0].incarnation == 1


def test_parent_outlives_its_childs_exit_by_more_than_the_heartbeat_timeout(
    coordinator: LocalCoordinator, job: str, view: JobView
) -> None:
    with child_of(coordinator, job, "multiprocessing", CALLS["rank of the parent's"]) as process:
        process.expect("parent rank")
        seen = view.observer.server_info().now
        eventually(lambda: view.observer.server_info().now > seen + 3)
        assert view.status.live_workers == 1
        assert [kind for kind, _ in view.events] == ["worker.registered"]


def test_child_forked_before_first_use_can_use_strata_itself(
    coordinator: LocalCoordinator, job: str, view: JobView
) -> None:
    program = """
import os, sys
from dtruntime import TrainingOrchestrator
child = os.fork()
with TrainingOrchestrator(world_size=2) as orchestrator:
    orchestrator.register()
    orchestrator.barrier("step")
if child:
    print("exit", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
    env = {"COORDINATOR_URL": coordinator.url, "STRATA_JOB": job}
    with WorkerProcess(program, env=env) as process:
        assert process.expect("exit", timeout=60) == "exit 0"
        assert process.wait() == 0
        assert view.status.live_workers == 0


def test_spawned_child_can_use_strata_while_the_parent_does(
    coordinator: LocalCoordinator, job: str
) -> None:
    program = """
import multiprocessing
from dtruntime import TrainingOrchestrator

def run():
    with TrainingOrchestrator(world_size=2) as orchestrator:
        orchestrator.register()
        orchestrator.barrier("step")

if __name__ == "__main__":
    with TrainingOrchestrator(world_size=2) as orchestrator:
        orchestrator.register()
        child = multiprocessing.get_context("spawn").Process(target=run)
        child.start()
        orchestrator.barrier("step")
        child.join()
        print("exit", child.exitcode, flush=True)
"""
    env = {"COORDINATOR_URL": coordinator.url, "STRATA_JOB": job}
    with WorkerProcess(program, env=env) as process:
        assert process.expect("exit", timeout=60) == "exit 0"


def test_pool_of_forked_children_works_with_plain_data(
    coordinator: LocalCoordinator, job: str
) -> None:
    program = """
import multiprocessing, warnings
warnings.simplefilter("ignore", DeprecationWarning)
from dtruntime import DatasetRegistry, TrainingOrchestrator
with TrainingOrchestrator() as orchestrator:
    orchestrator.register()
    registry = DatasetRegistry()
    registry.register("images", "/data", "csv", total_samples=100, shard_size=10)
    files = registry.get_shard("images", 0, 0)
    with multiprocessing.get_context("fork").Pool(4) as pool:
        print("lengths", sum(pool.map(len, files * 10)), flush=True)
    orchestrator.barrier("step")
print("done", flush=True)
"""
    env = {"COORDINATOR_URL": coordinator.url, "STRATA_JOB": job}
    with WorkerProcess(program, env=env) as process:
        assert process.expect("lengths", timeout=60) == f"lengths {100 * len('/data/shard_0.csv')}"
        process.expect("done", timeout=60)
        assert process.wait() == 0
