"""Workers of a run that averages gradients train one model: that of a single worker."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dtruntime.testing import LocalCoordinator
from tests.support.programs import gradient_worker
from tests.support.programs.gradient_worker import FORGOTTEN, OWN_GROUP, PROGRAMS

PATIENCE = 100


def run_workers(
    folder: Path, url: str, workers: int, *programs: str, **environment: str
) -> dict[str, list[dict[str, np.ndarray]]]:
    """Run programs on several workers; returns what each worker had at the end of each."""
    folder.mkdir(exist_ok=True)
    script = [sys.executable, gradient_worker.__file__, str(folder), *programs]
    common = {"COORDINATOR_URL": url, "WORLD_SIZE": str(workers), "OMP_NUM_THREADS": "1"}
    logs = [folder / f"worker-{rank}.log" for rank in range(workers)]
    running = []
    try:
        for rank, log in enumerate(logs):
            given = {**os.environ, **common, "RANK": str(rank), **environment}
            with log.open("w") as file:
                running.append(subprocess.Popen(script, env=given, stdout=file, stderr=file))
        ended = [process.wait(PATIENCE) for process in running]
    finally:
        for process in running:
            process.kill()
    assert not any(ended), "\n".join(log.read_text()[-4000:] for log in logs)
    return {
        name: [dict(np.load(file)) for file in sorted(folder.glob(f"{name}-*.npz"))]
        for name in programs
    }


@pytest.fixture(scope="module")
def trained(
    patient_coordinator: LocalCoordinator, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, np.ndarray]]]:
    """What each program made, on two workers, all of them in the same processes."""
    folder = tmp_path_factory.mktemp("trained")
    names = ("undecided", *PROGRAMS, *OWN_GROUP, *FORGOTTEN, "one_sided")
    found = run_workers(folder, patient_coordinator.url, 2, *names)
    assert not (folder / "undecided").exists(), "something was opened before the error"
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_two_workers_train_the_model_of_one(trained, name, tmp_path):
    first, second = trained[name]
    alone = PROGRAMS[name](tmp_path)
    assert alone.keys() == first.keys()
    for key, value in alone.items():
        assert np.array_equal(first[key], second[key]), f"{key} differs between the workers"
        np.testing.assert_allclose(first[key], value, rtol=2e-4, atol=2e-5, err_msg=key)


def test_program_that_does_not_decide_is_told_its_choices(trained):
    choices = ("'model'", "process_group='auto'", "DistributedDataParallel", "average_gradients")
    for outcome in trained["undecided"]:
        for choice in (*choices, "independent=True"):
            assert choice in str(outcome["error"])


@pytest.mark.parametrize("name", OWN_GROUP)
def test_decisions_in_a_process_group_of_the_program_train_one_model(trained, name):
    first, second = trained[name]
    assert not str(first["error"])
    assert first["step"] == 8
    for key in first:
        assert np.array_equal(first[key], second[key]), key


@pytest.mark.parametrize("name", FORGOTTEN)
def test_weights_of_gradients_that_were_not_averaged_are_never_saved(trained, name):
    for outcome in trained[name]:
        assert "were used before they were averaged" in str(outcome["error"])
        assert outcome["step"] == 0


def test_backward_of_one_worker_alone_is_told_to_all(trained):
    for outcome in trained["one_sided"]:
        assert "not all workers take part in the same backward()" in str(outcome["error"])
        assert outcome["step"] <= 2
