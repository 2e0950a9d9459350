"""A worker that dies while torch's process group forms takes nobody with it."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtruntime.testing import LocalCoordinator, WorkerProcess, eventually
from tests.support.paths import PROGRAMS
from tests.support.programs.forming_worker import POINTS

PROGRAM = PROGRAMS / "forming_worker.py"
WORLD = 3
PATIENCE = 120
LEADER, OTHER = 0, 1
QUICK = {("connected", OTHER), ("published", LEADER), ("formed", OTHER)}
"""The rest is for `make test-long`."""
DEATHS = [
    pytest.param(
        point,
        victim,
        id=f"{point}-{('leader', 'other')[victim]}",
        marks=[] if (point, victim) in QUICK else pytest.mark.long,
    )
    for point in POINTS
    for victim in (LEADER, OTHER)
]


class Crew:
    """Forked workers of one job."""

    def __init__(self, program: WorkerProcess, folder: Path, url: str, job: str) -> None:
        self._program = program
        self.folder = folder
        folder.mkdir()
        self._environment = {
            "COORDINATOR_URL": url,
            "STRATA_JOB": job,
            "STRATA_LOG": "info",
            "WORLD_SIZE": str(WORLD),
        }
        self.running: set[int] = set()

    def start(self, rank: int, **options: Any) -> int:
        environment = {**self._environment, "RANK": str(rank)}
        call = {"environment": environment, "folder": str(self.folder), **options}
        self._program.send(json.dumps(call))
        pid = int(self._program.expect("started ").split()[1])
        self.running.add(pid)
        return pid

    def wait(self, pid: int) -> int:
        """Wait for a worker's end; returns its exit code."""
        self._program.send(f"reap {pid}")
        code = int(self._program.expect(f"ended {pid} ", PATIENCE).split()[2])
        self.running.discard(pid)
        return code

    def log(self, pid: int) -> str:
        path = self.folder / f"{pid}.log"
        return path.read_text() if path.exists() else ""

    def replace(self, pid: int, rank: int, **options: Any) -> int:
        """Wait until a worker has killed itself, and start another."""
        assert self.wait(pid) == -signal.SIGKILL, self.log(pid)
        return self.start(rank, **options)

    def finish(self, pids: list[int]) -> list[dict[str, np.ndarray]]:
        """Wait until workers have finished well, all of them together; returns their weights."""
        for pid in pids:
            assert self.wait(pid) == 0, self.log(pid)
            assert "run.goes_on_smaller" not in self.log(pid), self.log(pid)
        worlds = [json.loads((self.folder / f"worlds-{pid}.json").read_text()) for pid in pids]
        assert {world for found in worlds for world in found.values()} == {WORLD}
        assert all(found.keys() == worlds[0].keys() for found in worlds)
        return [dict(np.load(self.folder / f"weights-{pid}.npz")) for pid in pids]

    def close(self) -> None:
        for pid in self.running:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def program() -> Iterator[WorkerProcess]:
    with WorkerProcess(PROGRAM) as program:
        yield program


@pytest.fixture
def crew(
    program: WorkerProcess, coordinator: LocalCoordinator, job: str, tmp_path: Path
) -> Iterator[Crew]:
    crew = Crew(program, tmp_path / "crew", coordinator.url, job)
    yield crew
    crew.close()


@pytest.fixture(scope="module")
def calm(
    program: WorkerProcess,
    patient_coordinator: LocalCoordinator,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, np.ndarray]:
    """The weights of a run that nobody disturbs."""
    folder = tmp_path_factory.mktemp("calm") / "crew"
    crew = Crew(program, folder, patient_coordinator.url, "calm-forming")
    found = crew.finish([crew.start(rank) for rank in range(WORLD)])
    check(found, found[0])
    return found[0]


def check(trained: list[dict[str, np.ndarray]], expected: dict[str, np.ndarray]) -> None:
    """The same bits on all workers."""
    for weights in trained:
        assert weights.keys() == expected.keys()
        assert all(np.array_equal(weights[key], expected[key]) for key in expected)


@pytest.mark.deaths
@pytest.mark.parametrize(("point", "victim"), DEATHS)
def test_death_while_the_group_forms_is_a_loss_like_any_other(crew, calm, point, victim):
    pids = [crew.start(rank, dies=point if rank == victim else "") for rank in range(WORLD)]
    pids[victim] = crew.replace(pids[victim], victim)
    check(crew.finish(pids), calm)


@pytest.mark.long
@pytest.mark.deaths
def test_replacements_that_die_while_the_group_forms_again_are_replaced(crew, calm):
    """The others have had a group, and have seen another one fail."""
    pids = [crew.start(rank, dies="stepping" if rank == OTHER else "") for rank in range(WORLD)]
    for point in ("connected", "published", ""):
        pids[OTHER] = crew.replace(pids[OTHER], OTHER, dies=point)
    check(crew.finish(pids), calm)


@pytest.mark.long
def test_death_right_after_the_roll_call_ends_the_waits_of_all(
    program, start_coordinator, calm, tmp_path
):
    """The last one had registered since the dead one was last heard: for the coordinator they
    were no companions, and its loss ends no wait of the last one's."""
    coordinator = start_coordinator(heartbeat_interval_ms=15_000)
    crew = Crew(program, tmp_path / "crew", coordinator.url, "right-after")
    try:
        first, second = crew.start(LEADER, dies="assembled"), crew.start(1)
        # From here on it waits in one call for 8 s.
        said = "since_seconds=8"
        eventually(lambda: said in crew.log(first), within=60, what="the first at the roll call")
        last = crew.start(2)
        check(crew.finish([crew.replace(first, LEADER), second, last]), calm)
    finally:
        crew.close()


@pytest.mark.long
def test_word_of_a_death_is_awaited_as_long_as_the_coordinator_needs(
    program, start_coordinator, tmp_path
):
    """The others know at once that a connection broke, and only after 47 s that it was a death."""
    timing = {"heartbeat_interval_ms": 500, "heartbeat_timeout_ms": 47_000}
    coordinator = start_coordinator(**timing)
    crew = Crew(program, tmp_path / "crew", coordinator.url, "slow-to-detect")
    try:
        pids = [crew.start(rank, wait_seconds=0) for rank in (0, 1)]
        victim = crew.start(2, dies="stepping")
        assert crew.wait(victim) == -signal.SIGKILL
        for pid in pids:
            assert crew.wait(pid) == 0, crew.log(pid)
            assert "run.goes_on_smaller" in crew.log(pid)
    finally:
        crew.close()
    first, second = (dict(np.load(crew.folder / f"weights-{pid}.npz")) for pid in pids)
    check([second], first)
