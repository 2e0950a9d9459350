"""Workers that die over and over while their process group forms, at points drawn from a seed.

For a tenth of the time that `STRATA_CHAOS_MINUTES` says; `STRATA_CHAOS_SEED` repeats it.
"""

import faulthandler
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtruntime.testing import LocalCoordinator, WorkerProcess
from tests.integration.run.test_group_forming import PROGRAM, WORLD, Crew, check
from tests.support.programs.forming_worker import POINTS

MINUTES = float(os.environ.get("STRATA_CHAOS_MINUTES", "30")) / 10
SEED = int(os.environ.get("STRATA_CHAOS_SEED") or random.SystemRandom().randrange(10**9))
QUICK: dict[str, Any] = {"heartbeat_interval_ms": 200, "heartbeat_timeout_ms": 2000}


@pytest.fixture(scope="module")
def program() -> Iterator[WorkerProcess]:
    with WorkerProcess(PROGRAM) as program:
        yield program


@pytest.mark.chaos
@pytest.mark.timeout(60 * MINUTES + 900)
def test_deaths_while_groups_form_change_no_bit(program: WorkerProcess, tmp_path: Path) -> None:
    faulthandler.cancel_dump_traceback_later()
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    end = time.monotonic() + 60 * MINUTES
    with LocalCoordinator(tmp_path / "coordinator", **QUICK) as coordinator:
        calm = train(Crew(program, tmp_path / "calm", coordinator.url, "calm"), [])
        number = 0
        while number == 0 or time.monotonic() < end:
            deaths = [(rng.randrange(WORLD), rng.choice(POINTS)) for _ in range(rng.randint(1, 4))]
            crew = Crew(program, tmp_path / f"{number}", coordinator.url, f"forming-{number}")
            began = time.monotonic()
            check([train(crew, deaths)], calm)
            print(f"round {number}: {deaths}, {time.monotonic() - began:.1f} s")
            number += 1


def train(crew: Crew, deaths: list[tuple[int, str]]) -> dict[str, np.ndarray]:
    """Train with workers that die in turn, each rank as often as it is named."""
    left = {rank: [point for victim, point in deaths if victim == rank] for rank in range(WORLD)}
    try:
        pids = [crew.start(rank, dies=next(iter(left[rank]), "")) for rank in range(WORLD)]
        while any(left.values()):
            for rank in (rank for rank, points in left.items() if points):
                if has_died(pids[rank]):
                    del left[rank][0]
                    pids[rank] = crew.replace(pids[rank], rank, dies=next(iter(left[rank]), ""))
            time.sleep(0.05)
        trained = crew.finish(pids)
    finally:
        crew.close()
    check(trained, trained[0])
    return trained[0]


def has_died(pid: int) -> bool:
    """Whether a process has ended and waits to be reaped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
