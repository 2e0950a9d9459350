"""The demonstration, as a user runs it: real processes, real data, a real verdict."""

import contextlib
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest

from dtruntime.demo.plan import Plan
from dtruntime.demo.verdict import judge
from dtruntime.testing import eventually
from dtruntime.types import CheckpointInfo, EpochCoverage

STRATA = [sys.executable, "-m", "dtruntime.cli.main"]
SMALL = ["demo", "--plain", "--workers", "3", "--epochs", "2", "--samples", "6500"]
"""Thirteen shards for three workers: not all have the same number to read."""
ENDLESS = ["demo", "--plain", "--workers", "2", "--epochs", "1000", "--samples", "3000"]


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished small run that kept its files."""

    output: str
    exit_code: int
    folder: Path

    @property
    def plan(self) -> Plan:
        return Plan.read(str(self.folder / "plan.json"))

    @property
    def last_checkpoint(self) -> Path:
        return max((self.folder / "checkpoints").iterdir())

    @property
    def processes(self) -> list[int]:
        return processes_in(self.output)


def run_small(folder: Path) -> Run:
    done = subprocess.run(
        [*STRATA, *SMALL, "--seed", "7", "--dir", str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    return Run(done.stdout, done.returncode, folder)


def processes_in(output: str) -> list[int]:
    """The process numbers of the coordinator and then of the workers."""
    coordinator = re.search(r"serves at \S+ process (\d+)", output)
    workers = re.search(r"workers, processes ([\d ]+)", output)
    assert coordinator, output
    assert workers, output
    return [int(coordinator[1]), *map(int, workers[1].split())]


def still_running(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def assert_all_ended(pids: list[int]) -> None:
    eventually(
        lambda: not [pid for pid in pids if still_running(pid)],
        within=10,
        what=f"the end of processes {pids}",
    )


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_small(tmp_path_factory.mktemp("demo") / "run")


def test_demo_passes_its_own_checks_and_says_so(small_run: Run) -> None:
    assert small_run.exit_code == 0, small_run.output
    summary = dict(re.findall(r"^  [✓·] (\w+) +(.*)$", small_run.output, re.MULTILINE))
    assert "✗" not in small_run.output
    assert "\x1b" not in small_run.output
    assert summary["workers"] == "3 of 3 ended well, with identical parameters after 88 steps"
    assert summary["coverage"].startswith("13,000 reads: each of 6,500 samples exactly once")
    assert summary["proof"] == "digests of 2 of 2 epochs: 0 lost, 0 repeated"
    assert summary["checkpoint"] == "last of 2, step 88, 159.5 kB; loads and is the final model"
    before, after = map(float, re.findall(r"([\d.]+)%", summary["accuracy"]))
    assert before < 20 < 50 < after
    assert re.match(r"8; .* p50 [\d.]+ [mµ]?s, p99 [\d.]+ [mµ]?s", summary["barriers"])
    assert re.search(r"\d+ by the workers, 0 failed; .* WaitBarrier, 24$", summary["requests"])
    assert_all_ended(small_run.processes)


def test_demo_trains_on_real_parquet_files_of_one_shard_each(small_run: Run) -> None:
    files = sorted((small_run.folder / "data").iterdir())

    assert [pq.read_metadata(file).num_rows for file in files] == [500] * 13


def test_workers_together_read_every_sample_once_in_each_epoch(small_run: Run) -> None:
    for epoch in range(2):
        parts = [np.load(f) for f in small_run.folder.glob(f"workers/worker-*.epoch-{epoch}.npy")]

        assert len(parts) == 3
        assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(6500))


def test_same_seed_gives_the_same_model_bit_for_bit(small_run: Run, tmp_path: Path) -> None:
    again = run_small(tmp_path / "again")

    with np.load(small_run.last_checkpoint) as first, np.load(again.last_checkpoint) as second:
        assert np.array_equal(first["parameters"], second["parameters"])


def lose_a_sample(run: Run) -> None:
    file = run.folder / "workers" / "worker-1.epoch-1.npy"
    np.save(file, np.load(file)[1:])


def repeat_a_sample(run: Run) -> None:
    file = run.folder / "workers" / "worker-1.epoch-0.npy"
    ids = np.load(file)
    np.save(file, np.append(ids, ids[0]))


def cut_the_checkpoint(run: Run) -> None:
    os.truncate(run.last_checkpoint, 1000)


def replace_the_checkpoint(run: Run) -> None:
    shutil.copy(min((run.folder / "checkpoints").iterdir()), run.last_checkpoint)


@pytest.mark.parametrize(
    ("damage", "failed"),
    [
        (lose_a_sample, "coverage"),
        (repeat_a_sample, "coverage"),
        (cut_the_checkpoint, "checkpoint"),
        (replace_the_checkpoint, "checkpoint"),
    ],
)
def test_verdict_notices_what_went_wrong(small_run: Run, tmp_path: Path, damage, failed) -> None:
    copy = Run("", 0, tmp_path / "run")
    shutil.copytree(small_run.folder, copy.folder)
    damage(copy)

    plan = msgspec.structs.replace(copy.plan, root=str(copy.folder))
    latest = CheckpointInfo("step-000088", 88, path=str(copy.last_checkpoint))

    proofs = [EpochCoverage(epoch, 6500, 6500, 0, 0, complete=True) for epoch in range(2)]
    verdict = judge(plan, 2, latest, proofs)

    assert not verdict.passed
    assert [check.name for check in verdict.checks if not check.passed] == [failed]


@pytest.mark.parametrize(
    "change", [{"missing": 1}, {"repeated": 1}, {"assumed": 5}, {"complete": False}]
)
def test_verdict_notices_an_epoch_without_proof(small_run: Run, change) -> None:
    latest = CheckpointInfo("step-000088", 88, path=str(small_run.last_checkpoint))
    proof = EpochCoverage(0, 6500, 6500, 0, 0, complete=True)
    damaged = dataclasses.replace(proof, epoch=1, **change)

    verdict = judge(small_run.plan, 2, latest, [proof, damaged])

    assert [check.name for check in verdict.checks if not check.passed] == ["proof"]


@contextlib.contextmanager
def endless_run(folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A run that trains, with the process numbers of its coordinator and workers."""
    process = subprocess.Popen(
        [*STRATA, *ENDLESS],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    assert process.stdout is not None
    output = ""
    try:
        for line in process.stdout:
            output += line
            if "checkpoint  step" in line:
                break
        pids = processes_in(output)
        assert all(still_running(pid) for pid in pids)
        yield process, pids
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_killed_worker_ends_the_demo_with_a_clear_message(tmp_path: Path) -> None:
    with endless_run(tmp_path) as (demo, pids):
        os.kill(pids[2], signal.SIGKILL)
        output, _ = demo.communicate(timeout=30)

    assert demo.returncode == 1
    failure = f"✗ worker-1 (process {pids[2]}) was killed by SIGKILL in epoch "
    assert failure in output
    assert "the end of its log:" in output
    assert "worker.registered worker=worker-1" in output.partition("the end of its log:")[2]
    assert "Traceback" not in output
    assert_all_ended(pids)
    assert list(tmp_path.iterdir()) == []


def test_killed_coordinator_ends_the_demo_with_a_clear_message(tmp_path: Path) -> None:
    with endless_run(tmp_path) as (demo, pids):
        os.kill(pids[0], signal.SIGKILL)
        output, _ = demo.communicate(timeout=30)

    assert demo.returncode == 1
    assert f"✗ the coordinator (process {pids[0]}) does not answer any more" in output
    assert "Traceback" not in output
    assert_all_ended(pids)


@pytest.mark.parametrize(
    ("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_ended_demo_leaves_no_process_behind(
    tmp_path: Path, number: signal.Signals, exit_code: int
) -> None:
    with endless_run(tmp_path) as (demo, pids):
        demo.send_signal(number)
        output, _ = demo.communicate(timeout=30)

    assert demo.returncode == exit_code
    assert "Traceback" not in output
    assert_all_ended(pids)
    if number != signal.SIGKILL:
        assert "interrupted" in output
        assert list(tmp_path.iterdir()) == []


def test_missing_pyarrow_is_named_with_its_remedy() -> None:
    without = "import sys; sys.modules['pyarrow'] = None; from dtruntime.cli.main import main; "
    done = subprocess.run(
        [sys.executable, "-c", without + "sys.exit(main(['demo']))"],
        capture_output=True,
        text=True,
        timeout=30,
    )

    assert done.returncode == 1
    assert "pip install 'dtruntime[data]'" in done.stderr


def test_folder_with_other_peoples_files_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()

    done = subprocess.run(
        [*STRATA, *SMALL, "--dir", str(tmp_path)], capture_output=True, text=True, timeout=30
    )

    assert done.returncode == 1
    assert "was not made by the demo" in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]
