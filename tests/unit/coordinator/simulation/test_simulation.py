"""A simulated cluster under faults keeps every promise.

`STRATA_SIM_SEED=123` replays one seed, `STRATA_SIM_BASE_SEED=random` (or a number) replaces the
fixed seeds, `STRATA_SIM_STEPS` sets the steps of chaos per seed. `make chaos` goes on for longer.
"""

import os
import random

import pytest

from tests.support.simulation.simulation import Simulation

SEEDS = 20
QUICK_SEEDS = 6
"""As many of them are in `make test`, the others in `make test-long`."""
STEPS = int(os.environ.get("STRATA_SIM_STEPS", "5000"))
"""Of each seed: 100,000 in all."""
REMOVAL_SEEDS = 3
REMOVAL_STEPS = 1000


def seeds() -> list[int]:
    if "STRATA_SIM_SEED" in os.environ:
        return [int(os.environ["STRATA_SIM_SEED"])]
    base = os.environ.get("STRATA_SIM_BASE_SEED", "0")
    first = random.SystemRandom().randrange(10**9) if base == "random" else int(base)
    return list(range(first, first + SEEDS))


@pytest.mark.parametrize(
    "seed",
    [
        seed if number < QUICK_SEEDS else pytest.param(seed, marks=pytest.mark.long)
        for number, seed in enumerate(seeds())
    ],
)
def test_simulated_cluster_keeps_every_promise(seed: int) -> None:
    assert Simulation(seed).run(STEPS) >= STEPS


@pytest.mark.parametrize("seed", seeds()[:REMOVAL_SEEDS])
def test_simulated_cluster_keeps_every_promise_while_jobs_are_removed(seed: int) -> None:
    simulation = Simulation(seed, removals=True)
    steps = min(STEPS, REMOVAL_STEPS) if "STRATA_SIM_STEPS" not in os.environ else STEPS
    assert simulation.run(steps) >= steps
    assert simulation.promises.removals.removals


def test_seed_decides_the_whole_run() -> None:
    runs = []
    for _ in range(2):
        simulation = Simulation(5)
        simulation.run(400)
        runs.append((simulation.steps, simulation.now, list(simulation.trace)))
    assert runs[0] == runs[1]
