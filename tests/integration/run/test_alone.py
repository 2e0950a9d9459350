"""Runs without a coordinator on one folder: they do not know of each other, and say so."""

from pathlib import Path

from dtruntime import CheckpointManager
from dtruntime.testing import WorkerProcess

PROGRAM = """
import sys
from dtruntime import Run

with Run(sys.argv[1], data=100, batch_size=10, save_steps=5) as run:
    for number, batch in enumerate(run):
        if number == 2:
            print("reading", flush=True)
            input()
print("done", run.step, flush=True)
"""


def test_second_program_on_the_same_folder_is_warned(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    with WorkerProcess(PROGRAM, [folder]) as first:
        first.expect("reading")
        assert "run.not_alone" not in first.log
        with WorkerProcess(PROGRAM, [folder]) as second:
            second.expect("reading")
            assert "run.not_alone" in second.log
            assert str(first.pid) in second.log
            assert "COORDINATOR_URL" in second.log
            first.send("")
            first.expect("done")
            assert first.log.count("run.not_alone") == 1
            assert str(second.pid) in first.log


def test_killed_program_and_own_managers_are_no_reason_to_warn(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with WorkerProcess(PROGRAM, [str(folder)]) as first:
        first.expect("reading")
        first.kill()
    with WorkerProcess(PROGRAM, [str(folder)]) as again:
        again.expect("reading")
        assert "run.not_alone" not in again.log
    with CheckpointManager(folder) as one, CheckpointManager(folder) as other:
        assert one.other_writers() == other.other_writers() == []
