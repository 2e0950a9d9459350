"""Runs under launchers: torchrun for real, Slurm and Ray with stand-ins.

A real Slurm is in ``test_slurm.py``, for where it can be installed.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtruntime import CheckpointManager
from dtruntime.run.preemption import PREEMPTED
from dtruntime.testing import LocalCoordinator, eventually
from tests.support.crews import last_saved

ROOT = Path(__file__).parents[2]
LAUNCHERS = ROOT / "examples" / "launchers"
PATIENCE = 100.0


@pytest.fixture(scope="module")
def coordinator() -> Iterator[LocalCoordinator]:
    with LocalCoordinator() as running:
        yield running


# torchrun


@dataclass
class Launched:
    """A launcher in a process of its own, with its log."""

    process: subprocess.Popen[bytes]
    log_path: Path

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def until(self, text: str) -> None:
        def said() -> bool:
            if text in self.log:
                return True
            assert self.process.poll() is None, f"ended without saying {text!r}\n{self.log}"
            return False

        eventually(said, within=PATIENCE, what=f"{text!r} in {self.log_path}")

    def wait(self) -> int:
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running\n{self.log}") from None


@contextlib.contextmanager
def launched(folder: Path, command: list[str], environment: dict[str, str]) -> Iterator[Launched]:
    """A launcher, whose whole process group is gone afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    log_path = folder / "launcher.log"
    with log_path.open("a") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "STRATA_LOG": "info", "OMP_NUM_THREADS": "1", **environment},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield Launched(process, log_path)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def torchrun(folder: Path, coordinator: LocalCoordinator, *options: str) -> Any:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "--max-restarts", "3"]
    command += [str(ROOT / "examples" / "ddp_torchrun.py"), "--folder", str(folder), *options]
    environment = {
        "COORDINATOR_URL": coordinator.url,
        "STRATA_JOB": folder.name,
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    return launched(folder, command, environment)


def process_of(worker: int, log: str) -> int:
    found = re.search(rf"worker {worker} of 2 \(process (\d+), restart 0\)", log)
    assert found, log
    return int(found[1])


@pytest.mark.long
@pytest.mark.timeout(400)
def test_torchrun_restarts_the_group_and_the_weights_are_those_of_an_undisturbed_run(
    tmp_path: Path, coordinator: LocalCoordinator
) -> None:
    with torchrun(tmp_path / "whole", coordinator) as whole:
        assert whole.wait() == 0, whole.log
    with torchrun(tmp_path / "killed", coordinator, "--step-seconds", "0.05") as run:
        run.until("step 40:")
        eventually(lambda: last_saved(tmp_path / "killed" / "checkpoints") >= 20, what="a save")
        os.kill(process_of(1, run.log), signal.SIGKILL)
        assert run.wait() == 0, run.log

    resumed = re.findall(r"restart 1\) begins after step (\d+)", run.log)
    assert len(resumed) == 2, run.log
    assert int(resumed[0]) >= 20
    assert run.log.count("every sample once") == 3, run.log
    one, other = (np.load(tmp_path / name / "weights.npy") for name in ("whole", "killed"))
    assert one.tobytes() == other.tobytes()


@pytest.mark.long
def test_notice_to_torchrun_lets_all_workers_save_the_same_step_and_leave(
    tmp_path: Path, coordinator: LocalCoordinator
) -> None:
    with torchrun(tmp_path / "noticed", coordinator, "--step-seconds", "0.1") as run:
        run.until("step 20:")
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() != 0
    # torchrun kills after 30 s whoever has not left by then.
    assert "via 9" not in run.log, run.log
    agreed = {int(step) for step in re.findall(r"run.agreed action=drain step=(\d+)", run.log)}
    with CheckpointManager(tmp_path / "noticed" / "checkpoints") as manager:
        latest = manager.latest()
    assert latest is not None
    assert latest.step in agreed, run.log


# Slurm, with stand-ins for its commands


TRAINING = """\
import argparse, os, pathlib, time
from dtruntime import Run
from dtruntime.telemetry import configure_logging
parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=pathlib.Path)
folder = parser.parse_args().folder
configure_logging()
with Run(folder / "checkpoints", max_steps=200, save_steps=50, state={"sum": 0}) as run:
    print(f"{run.rank} of {run.world_size} begins after step {run.step}\\n", end="", flush=True)
    for number in run:
        run.state["sum"] += number
        if run.step == 20:
            print("well under way", flush=True)
        time.sleep(0.1 if os.environ["SLURM_RESTART_COUNT"] == "0" else 0)
    print(f"{run.ending}: {run.state['sum']}", flush=True)
"""

STAND_INS = {
    # Two tasks of a step; ends with the worst of their results.
    "srun": """\
[ "$1" = --kill-on-bad-exit=0 ] || exit 99
shift
worst=0
for rank in 0 1; do
    SLURM_STEP_ID=0 SLURM_PROCID=$rank SLURM_NTASKS=2 "$@" &
    tasks[rank]=$!
done
echo "${tasks[@]}" > "$STAND_INS/tasks"
for task in "${tasks[@]}"; do
    wait "$task" || worst=$?
done
exit "$worst"
""",
    "scancel": '[ "$*" = "--signal=TERM 42" ] && kill -TERM $(cat "$STAND_INS/tasks")\n',
    "scontrol": """\
case $1 in
    show) echo "JobId=42 JobState=RUNNING Reason=None PreemptTime=None" ;;
    *) echo "$*" > "$STAND_INS/requeued" ;;
esac
""",
}


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a batch script on a machine that is all there is of a cluster."""
    stand_ins = tmp_path / "bin"
    stand_ins.mkdir()
    for name, body in STAND_INS.items():
        (stand_ins / name).write_text("#!/bin/bash\n" + body)
        (stand_ins / name).chmod(0o755)
    (tmp_path / "training.py").write_text(TRAINING)
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    return {
        "PATH": f"{stand_ins}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "STAND_INS": str(stand_ins),
        "SLURM_JOB_ID": "42",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "PROGRAM": str(tmp_path / "training.py"),
        "PORT": str(port),
    }


def sbatch(tmp_path: Path, name: str, slurm: dict[str, str], restarts: int) -> Any:
    node = tmp_path / name
    node.mkdir()
    environment = {**slurm, "TMPDIR": str(node), "SLURM_RESTART_COUNT": str(restarts)}
    return launched(node, ["bash", str(LAUNCHERS / "slurm.sbatch")], environment)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_slurm_script_saves_at_the_notice_requeues_and_resumes_on_another_node(
    tmp_path: Path, slurm: dict[str, str]
) -> None:
    requeued = tmp_path / "bin" / "requeued"
    with sbatch(tmp_path, "first-node", slurm, 0) as job:
        job.until("well under way")
        job.process.send_signal(signal.SIGUSR1)
        assert job.wait() == PREEMPTED, job.log
    assert requeued.read_text() == "requeue 42\n"
    assert job.log.count("preempted: ") == 2, job.log
    requeued.unlink()

    with sbatch(tmp_path, "second-node", slurm, 1) as job:
        assert job.wait() == 0, job.log
    resumed = re.findall(r"(\d) of 2 begins after step (\d+)", job.log)
    assert sorted(rank for rank, _ in resumed) == ["0", "1"]
    assert all(int(step) >= 20 for _, step in resumed), job.log
    assert job.log.count(f"finished: {sum(range(200))}") == 2, job.log
    assert not requeued.exists()


# Ray, with a stand-in: shows that our half of the program is right


RAY = {
    "ray/__init__.py": "",
    "ray/train/__init__.py": """\
class _Context:
    def get_world_rank(self): return 0
    def get_world_size(self): return 1
def get_context(): return _Context()
def report(metrics): print("reported", metrics, flush=True)
class _Config:
    def __init__(self, **options): self.options = options
class FailureConfig(_Config): pass
class RunConfig(_Config): pass
class ScalingConfig(_Config): pass
""",
    "ray/train/torch.py": """\
import threading
class TorchTrainer:
    def __init__(self, function, train_loop_config, scaling_config, run_config):
        self.work = threading.Thread(target=function, args=(train_loop_config,))
    def fit(self):
        self.work.start()
        self.work.join()
        return self
    metrics = "done"
def prepare_model(model): return model
""",
}


def test_ray_program_trains_in_the_thread_of_a_stand_in_for_ray(
    tmp_path: Path, coordinator: LocalCoordinator
) -> None:
    for name, body in RAY.items():
        file = tmp_path / "packages" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(body)
    command = [sys.executable, str(LAUNCHERS / "ray_train.py"), "--coordinator", coordinator.url]
    command += ["--folder", str(tmp_path / "run"), "--workers", "1"]
    packages = {"PYTHONPATH": str(tmp_path / "packages")}
    with launched(tmp_path / "log", command, packages) as program:
        assert program.wait() == 0, program.log
    assert "reported {'step': 400}" in program.log


# Scripts, by reading


@pytest.mark.parametrize("script", sorted(LAUNCHERS.glob("*.sbatch")), ids=lambda p: p.name)
def test_scripts_are_valid_bash(script: Path) -> None:
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
