"""Sharded models under torchrun: killed, and resumed by other numbers of workers."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtruntime import CheckpointManager
from dtruntime.cli.main import main
from dtruntime.testing import LocalCoordinator, eventually
from tests.support.crews import EXAMPLES, TrainingCrew, last_saved, sequence

pytestmark = pytest.mark.long

PATIENCE = 150.0
SIZES = ("--samples", "2048", "--batch-size", "64", "--epochs", "1", "--save-steps", "8")
STEPS = 32
CERTAIN = ("--dropout", "0")
"""Without chance, weights differ by the order of sums alone when numbers of workers do."""


class Torchrun(TrainingCrew):
    """Runs of one job, one after the other, each by torchrun."""

    def __init__(self, folder: Path, url: str) -> None:
        super().__init__(folder, url, 1, "fsdp_torchrun.py")
        self._log = folder / "torchrun.log"

    @property
    def log(self) -> str:
        return self._log.read_text()

    @contextlib.contextmanager
    def launched(self, workers: int, *options: str) -> Iterator[subprocess.Popen[bytes]]:
        """torchrun with so many workers, all of which are gone afterwards."""
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(workers), "--max-restarts", "3"]
        command += [str(EXAMPLES / "fsdp_torchrun.py"), "--folder", str(self.folder)]
        command += ["--trace", str(self.folder / "trace"), *SIZES, *options]
        environment = {**self.environment, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with self._log.open("a") as log:
            process = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def run(self, workers: int, *options: str) -> None:
        with self.launched(workers, *options) as process:
            self.ends_well(process)

    def ends_well(self, process: subprocess.Popen[bytes]) -> None:
        try:
            assert process.wait(PATIENCE) == 0, self.log
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running\n{self.log}") from None

    def begun(self) -> list[tuple[int, int, int, int]]:
        """Worker, workers, process and first step of each process that began."""
        pattern = r"worker (\d+) of (\d+) \(process (\d+), restart \d+\) begins after step (\d+)"
        return [tuple(map(int, found)) for found in re.findall(pattern, self.log)]  # type: ignore[misc]

    def manifests(self) -> list[Any]:
        with CheckpointManager(self.folder / "checkpoints") as manager:
            return manager.checkpoints()


@pytest.fixture(scope="module")
def coordinator() -> Iterator[LocalCoordinator]:
    with LocalCoordinator() as running:
        yield running


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, coordinator: LocalCoordinator) -> Torchrun:
    """A run that nobody disturbs."""
    run = Torchrun(tmp_path_factory.mktemp("calm"), coordinator.url)
    run.run(2)
    return run


@pytest.mark.timeout(400)
def test_killed_worker_costs_nothing_and_the_weights_are_those_of_an_undisturbed_run(
    tmp_path: Path, coordinator: LocalCoordinator, calm: Torchrun
) -> None:
    killed = Torchrun(tmp_path / "killed", coordinator.url)
    with killed.launched(2, "--step-seconds", "0.25") as process:
        eventually(
            lambda: last_saved(killed.folder / "checkpoints") >= 8 or process.poll() is not None,
            within=PATIENCE,
            what="the checkpoint of step 8",
        )
        (victim,) = (number for worker, _, number, _ in killed.begun() if worker == 1)
        os.kill(victim, signal.SIGKILL)
        killed.ends_well(process)
    resumed = [step for *_, step in killed.begun() if step]
    assert len(resumed) == 2, killed.log
    assert resumed[0] == resumed[1] >= 8
    assert np.array_equal(killed.weights(), calm.weights())
    assert sequence(killed) == sequence(calm)
    for run in (calm, killed):
        assert "epoch 0: every sample once" in run.log


@pytest.mark.timeout(400)
def test_checkpoint_of_two_workers_is_resumed_by_one_and_that_by_two(
    tmp_path: Path,
    coordinator: LocalCoordinator,
    capsys: pytest.CaptureFixture[str],
) -> None:
    steady = Torchrun(tmp_path / "steady", coordinator.url)
    run = Torchrun(tmp_path / "resized", coordinator.url)
    steady.run(2, *CERTAIN)
    run.run(2, *CERTAIN, "--stop-after", "11")
    run.run(1, *CERTAIN, "--stop-after", "21")
    run.run(2, *CERTAIN)
    assert [(workers, step) for _, workers, _, step in run.begun()] == [
        (2, 0),
        (2, 0),
        (1, 11),
        (2, 21),
        (2, 21),
    ]
    assert run.worlds == [2] * 11 + [1] * 10 + [2] * 11
    assert sequence(run) == sequence(steady)
    assert len(sequence(run)) == STEPS
    assert "epoch 0: every sample once" in run.log, run.log
    difference = np.abs(run.weights() - steady.weights()).max()
    assert difference < 1e-3

    kept = {info.step: info for info in run.manifests()}
    parts = {step: info.parts for step, info in kept.items()}
    assert parts == {11: 2, 16: 1, 21: 1, 24: 2, 32: 2}, "the five newest are kept"
    assert kept[32].metadata == {"finished": "yes"}
    assert main(["checkpoints", "verify", str(run.folder / "checkpoints")]) == 0
    assert main(["checkpoints", "ls", str(run.folder / "checkpoints")]) == 0
    assert "32" in capsys.readouterr().out
