"""Kill anything, and the run ends as if nothing had happened.

Real torch training on real processes with gloo; the kills are SIGKILL.
"""

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtruntime import DatasetRegistry
from dtruntime.testing import LocalCoordinator
from tests.support.crews import TrainingCrew, sequence

pytestmark = pytest.mark.timeout(600)

SAMPLES, EPOCHS, BATCH = 4096, 3, 128
STEPS = SAMPLES // BATCH * EPOCHS
SEED = 20_261_115


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCoordinator]:
    folder = tmp_path_factory.mktemp("coordinator")
    quick: dict[str, Any] = {"heartbeat_interval_ms": 200, "heartbeat_timeout_ms": 3000}
    with LocalCoordinator(folder, **quick) as coordinator:
        yield coordinator


def crew_of(folder: Path, url: str, workers: int = 4, *more: object) -> TrainingCrew:
    return TrainingCrew(
        folder,
        url,
        workers,
        "real_training.py",
        *("--folder", folder, "--trace", folder / "trace", "--samples", SAMPLES),
        *("--epochs", EPOCHS, "--batch-size", BATCH, "--save-steps", 5, *more),
    )


@pytest.fixture(scope="module")
def calm(coordinator: LocalCoordinator, tmp_path_factory: pytest.TempPathFactory) -> TrainingCrew:
    """A run that nobody disturbs."""
    with crew_of(tmp_path_factory.mktemp("run") / "calm", coordinator.url) as crew:
        crew.start()
        crew.wait()
        return crew


def check_coverage(coordinator: LocalCoordinator, crew: TrainingCrew) -> None:
    for found in DatasetRegistry(coordinator.url, job=crew.job).coverage("train"):
        assert found.exact, found
        assert found.covered == SAMPLES


@pytest.mark.long
def test_undisturbed_run_reads_every_sample_once_per_epoch(coordinator, calm):
    steps = sequence(calm)
    assert sorted(steps) == list(range(1, STEPS + 1))
    for epoch in range(EPOCHS):
        first = epoch * STEPS // EPOCHS
        seen = [steps[step] for step in range(first + 1, first + STEPS // EPOCHS + 1)]
        assert sum(map(len, seen)) == SAMPLES
        assert len(frozenset.union(*seen)) == SAMPLES
    check_coverage(coordinator, calm)


@pytest.mark.long
def test_killed_run_ends_with_the_same_bits(coordinator, calm, tmp_path):
    """Two workers, the coordinator, a worker again, then everybody: five kills at random steps."""
    rng = random.Random(SEED)
    print(f"seed {SEED}")
    with crew_of(tmp_path / "killed", coordinator.url, 4, "--step-seconds", 0.1) as crew:
        crew.start()
        for number, victim in enumerate(["worker", "worker", "coordinator", "worker", "all"]):
            goal = crew.last_step + rng.randrange(4, 14)
            crew.until(f"step {goal}", lambda goal=goal: crew.last_step >= goal)  # type: ignore[misc]
            if victim == "coordinator":
                coordinator.kill()
                coordinator.start()
            else:
                victims = crew.running if victim == "all" else [rng.choice(crew.running)]
                for trainer in victims:
                    trainer.kill()
                crew.start(len(victims))
            print(f"kill {number}: {victim} at step {goal}")
        crew.wait()
        assert np.array_equal(crew.weights(), calm.weights())
        assert sequence(crew) == sequence(calm)
        check_coverage(coordinator, crew)


@pytest.mark.long
def test_crew_shrinks_and_grows_and_reads_the_same_batches(coordinator, calm, tmp_path):
    """Nobody replaces a lost worker: three go on. Then a fourth comes, and is let in."""
    folder = tmp_path / "elastic"
    options = ("--wait-seconds", 0.5, "--step-seconds", 0.25)
    with crew_of(folder, coordinator.url, 4, *options) as crew:
        crew.start()
        crew.until("step 8", lambda: crew.last_step >= 8)
        crew.running[0].kill()
        crew.until("three workers", lambda: 3 in crew.worlds)
        crew.start(1)
        crew.until("four workers again", lambda: crew.worlds[-1] == 4)
        crew.wait()
        assert sequence(crew) == sequence(calm)
        check_coverage(coordinator, crew)


@pytest.mark.long
def test_run_of_four_goes_on_with_two(coordinator, calm, tmp_path):
    folder = tmp_path / "halved"
    with crew_of(folder, coordinator.url, 4, "--step-seconds", 0.1) as crew:
        crew.start()
        crew.until("step 20", lambda: crew.last_step >= 20)
        for trainer in crew.running:
            trainer.kill()
        crew.resize(2)
        crew.start()
        crew.wait()
        assert sequence(crew) == sequence(calm)
        assert crew.worlds[-1] == 2
        check_coverage(coordinator, crew)


@pytest.mark.long
def test_stopped_process_does_not_hold_up_the_others(coordinator, calm, tmp_path):
    """SIGSTOP: no connection breaks, so only the missing heartbeats tell."""
    with crew_of(tmp_path / "stopped", coordinator.url, 4, "--step-seconds", 0.1) as crew:
        crew.start()
        crew.until("step 12", lambda: crew.last_step >= 12)
        crew.running[2].stop()
        at = crew.last_step
        began = time.monotonic()
        crew.start(1)
        crew.until("more steps", lambda: crew.last_step > at + 6)
        print(f"training again after {time.monotonic() - began:.1f} s")
        crew.trainers[2].kill()
        crew.wait()
        assert np.array_equal(crew.weights(), calm.weights())
        assert sequence(crew) == sequence(calm)
