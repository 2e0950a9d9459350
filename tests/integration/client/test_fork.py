"""Forked children: a clear error at once, a clean end, and no harm to the parent."""

import pytest

from dtruntime.testing import LocalCoordinator, WorkerProcess, eventually
from tests.support.coordinators import JobView

SETUP = """
import asyncio, multiprocessing, os, sys, time, warnings
warnings.simplefilter("ignore", DeprecationWarning)
from dtruntime import DatasetRegistry, StrataError, TrainingOrchestrator

parent = TrainingOrchestrator()
parent.register()

CALLS = {
    "barrier": lambda: parent.barrier("step"),
    "heartbeat": lambda: asyncio.run(parent.heartbeat()),
    "deregister": lambda: parent.deregister(),
    "rank": lambda: parent.rank,
    "fresh orchestrator": lambda: TrainingOrchestrator().register(),
    "fresh registry": lambda: DatasetRegistry().get_shard("images", 0, 0),
}

def attempt():
    started = time.monotonic()
    for name, call in CALLS.items():
        try:
            print(f"{name}: got", call(), flush=True)
        except StrataError as error:
            print(f"{name}: {type(error).__name__} {error}", flush=True)
    print("child", "at once" if time.monotonic() - started < 20 else "too late", flush=True)
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

AFTERWARDS = """
parent.barrier("step")
print("parent rank", parent.get_status().rank, flush=True)
input()
"""


@pytest.mark.parametrize("fork", FORKS)
def test_forked_child_gets_clear_errors_at_once_and_the_parent_lives_on(
    coordinator: LocalCoordinator, job: str, view: JobView, fork: str
) -> None:
    env = {"COORDINATOR_URL": coordinator.url, "STRATA_JOB": job}
    with WorkerProcess(SETUP + FORKS[fork] + AFTERWARDS, env=env) as process:
        for name in ("barrier", "heartbeat", "deregister", "rank", "fresh orch", "fresh reg"):
            error = process.expect(name, timeout=60)
            assert "StrataError" in error
            assert "fork" in error
            assert "plain data" in error
        assert process.expect("child ") == "child at once"
        assert process.expect("child exit") == "child exit 0"
        assert process.expect("parent rank", timeout=60) == "parent rank 0"
        assert [kind for kind, _ in view.events] == ["worker.registered"]
        if fork == "os.fork":
            ended = view.observer.server_info().now
            eventually(lambda: view.observer.server_info().now > ended + 3)
        assert view.status.live_workers == 1


def test_forking_often_hangs_no_parent_and_crashes_no_child(
    coordinator: LocalCoordinator, job: str
) -> None:
    program = """
import os, sys
from dtruntime import TrainingOrchestrator
orchestrator = TrainingOrchestrator(heartbeat_interval_ms=5)
orchestrator.register()
codes = set()
for _ in range(40):
    child = os.fork()
    if child == 0:
        sys.exit(0)
    codes.add(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print("codes", codes, flush=True)
"""
    env = {"COORDINATOR_URL": coordinator.url, "STRATA_JOB": job}
    with WorkerProcess(program, env=env) as process:
        assert process.expect("codes", timeout=60) == "codes {0}"


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
