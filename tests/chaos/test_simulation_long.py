"""The simulated cluster with fresh seeds, for as long as `STRATA_SIM_MINUTES` says (5)."""

import os
import random
import time
from collections.abc import Callable

import pytest

from tests.support.simulation.simulation import Simulation

MINUTES = float(os.environ.get("STRATA_SIM_MINUTES", "5"))
STEPS = 5_000


@pytest.mark.chaos
@pytest.mark.timeout(60 * MINUTES + 300)
def test_simulated_cluster_keeps_every_promise_for_minutes(
    record_property: Callable[[str, object], None],
) -> None:
    seed = random.SystemRandom().randrange(10**9)
    end = time.monotonic() + 60 * MINUTES
    runs = steps = 0
    while time.monotonic() < end:
        steps += Simulation(seed + runs, removals=runs % 2 == 1).run(STEPS)
        runs += 1
    record_property("first_seed", seed)
    record_property("runs", runs)
    record_property("steps", steps)
    print(f"{steps} steps in {runs} runs, seeds from {seed}")
    assert runs
