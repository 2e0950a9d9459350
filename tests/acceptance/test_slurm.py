"""The batch script on a real Slurm of two nodes: what is stored, and how jobs end."""

import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from dtruntime.testing import eventually
from tests.support.crews import last_saved
from tests.support.paths import PROGRAMS
from tests.support.programs.slurm_training import EPOCHS, STEPS, new_run
from tests.support.servers.s3_server import free_ports
from tests.support.servers.slurm_cluster import MISSING, PATIENCE, SlurmCluster, SlurmJob

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "launchers" / "slurm.sbatch"
TRAINING = PROGRAMS / "slurm_training.py"

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        bool(MISSING),
        reason=f"NOT TESTED on a real Slurm: {', '.join(MISSING)} not installed (Debian: apt-get "
        "install slurm-wlm munge; `make test-long` does that where it may)",
    ),
]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@dataclass(frozen=True)
class Training:
    """A job of the batch script, and what it stores."""

    job: SlurmJob
    folder: Path

    @property
    def log(self) -> str:
        path = self.folder / "job.log"
        return path.read_text() if path.exists() else ""

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def beginnings(self) -> list[int]:
        """After which step each worker began, in the order of their starts."""
        return [int(step) for step in re.findall(r"begins after step (\d+)", self.log)]

    def until_step(self, step: int) -> None:
        def reached() -> bool:
            steps = re.findall(r"^step (\d+)$", self.log, re.MULTILINE)
            return max(map(int, steps), default=0) >= step

        eventually(reached, within=PATIENCE, what=f"step {step}")

    def end(self) -> str:
        try:
            return self.job.end()
        except AssertionError as exc:
            raise AssertionError(f"{exc}\n{self.log[-6000:]}") from None

    def stored(self) -> tuple[str, list[int]]:
        """How the run ended, and how often each sample was trained, by its last checkpoint."""
        with new_run(self.folder) as run:
            return run.ending, np.unique(run.state["times"]).tolist()


Submit = Callable[..., Training]


@pytest.fixture
def submit(slurm: SlurmCluster, tmp_path: Path) -> Iterator[Submit]:
    """Submits the batch script with two nodes of two workers; at the end nothing is left of it."""
    begun: list[Training] = []

    def start(*arguments: str, options: tuple[str, ...] = (), **environment: str) -> Training:
        folder = tmp_path / f"training-{len(begun)}"
        folder.mkdir()
        shape = ["--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=0", "--time=10"]
        shape += [f"--output={folder}/job.log", f"--chdir={folder}", *options]
        job = slurm.submit(
            *shape,
            str(SCRIPT),
            *arguments,
            environment={
                "PROGRAM": str(TRAINING),
                "FOLDER": str(folder),
                "PORT": str(free_ports(1)[0]),
                "STRATA_LOG": "info",
                "STRATA_HEARTBEAT_TIMEOUT_MS": "4000",
                **environment,
            },
        )
        begun.append(Training(job, folder))
        return begun[-1]

    yield start
    for training in begun:
        slurm.command("scancel", training.job.number, check=False)
        training.end()


def test_two_nodes_of_two_workers_train_every_sample_once_per_epoch(submit: Submit) -> None:
    training = submit()
    assert training.end() == "COMPLETED 0", training.log
    places = set(re.findall(r"worker (\d of 4) on (d\d) begins after step 0", training.log))
    assert {node for _, node in places} == {"d1", "d2"}
    assert len(places) == 4
    assert training.stored() == ("finished", [EPOCHS])
    assert f"exact epochs: {EPOCHS}" in training.log


def test_preempted_job_saves_is_put_back_and_resumes_where_it_was(
    slurm: SlurmCluster, submit: Submit
) -> None:
    training = submit("--step-seconds=0.1")
    training.until_step(15)
    urgent = slurm.submit("-p", "high", "-N2", "-n4", "--wrap", "sleep 1", "-o", "/dev/null")
    training.job.until_restarted()
    assert urgent.end() == "COMPLETED 0"
    saved = last_saved(training.checkpoints)
    assert saved >= 15

    assert training.end() == "COMPLETED 0", training.log
    assert training.job.restarts == 1
    # The second group goes on with the step after the save: nothing was trained in vain.
    assert training.beginnings == [0] * 4 + [saved] * 4
    assert training.log.count(f"\nstep {saved + 1}\n") == 1
    assert training.stored() == ("finished", [EPOCHS])
    assert f"exact epochs: {EPOCHS}" in training.log


def test_run_that_finishes_with_fewer_workers_completes_and_the_next_job_starts(
    slurm: SlurmCluster, submit: Submit
) -> None:
    training = submit("--step-seconds=0.05", "--wait-seconds=1")
    after = f"--dependency=afterok:{training.job.number}"
    chained = slurm.submit(after, "--wrap", "true", "-o", "/dev/null")
    training.until_step(15)
    found = re.findall(r"worker 3 of 4 on d2 begins .* process (\d+)", training.log)
    os.kill(int(found[0]), signal.SIGKILL)

    assert training.end() == "COMPLETED 0", training.log
    assert "Exited with exit code 137" in training.log or "Killed" in training.log
    assert "run.goes_on_smaller" in training.log
    assert training.stored() == ("finished", [EPOCHS])
    assert chained.end() == "COMPLETED 0"


def test_cancelled_job_saves_and_does_not_come_back(slurm: SlurmCluster, submit: Submit) -> None:
    training = submit("--step-seconds=0.1")
    training.until_step(15)
    slurm.command("scancel", training.job.number)

    assert training.end().startswith("CANCELLED"), training.log
    saved = last_saved(training.checkpoints)
    assert saved >= 15
    assert saved % 10, "this was saved by the way, and not at the notice"
    assert "run.leaves_unsaved" not in training.log
    assert training.job.restarts == 0
    assert training.beginnings == [0] * 4
    ending, times = training.stored()
    assert (ending, max(times)) == ("", 1)


def test_mistake_in_the_program_fails_the_job_and_the_next_one_does_not_start(
    slurm: SlurmCluster, submit: Submit
) -> None:
    training = submit("--fail-at=25")
    after = f"--dependency=afterok:{training.job.number}"
    chained = slurm.submit(after, "--kill-on-invalid-dep=yes", "--wrap", "true", "-o", "/dev/null")

    assert training.end() == "FAILED 1", training.log
    assert "a mistake in the program" in training.log
    assert training.job.restarts == 0
    assert last_saved(training.checkpoints) in (10, 20)
    assert chained.end().startswith("CANCELLED")


def test_mistake_after_a_finished_run_is_a_failure_too(submit: Submit) -> None:
    training = submit("--fail-afterwards")
    assert training.end() == "FAILED 1", training.log
    assert training.stored() == ("finished", [EPOCHS])


def test_job_whose_time_is_nearly_up_comes_back_and_resumes_with_an_empty_coordinator(
    slurm: SlurmCluster, submit: Submit
) -> None:
    training = submit("--step-seconds=0.3", options=("--signal=B:USR1@90",))
    training.until_step(15)
    # Slurm looks every 30 seconds whether the end is 90 + 30 seconds away or less.
    minutes = int(training.job.field("RunTime").split(":")[1]) + 2
    training.job.update(f"TimeLimit={minutes}")
    training.job.until_restarted()
    training.job.update("TimeLimit=10")
    shutil.rmtree(slurm.folder / f"strata-{training.job.number}")
    saved = last_saved(training.checkpoints)
    assert 15 <= saved < STEPS
    assert "run.leaves_unsaved" not in training.log

    assert training.end() == "COMPLETED 0", training.log
    assert training.job.restarts == 1
    assert training.beginnings == [0] * 4 + [saved] * 4
    assert training.stored() == ("finished", [EPOCHS])
