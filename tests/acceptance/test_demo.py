"""The demonstration, as a user runs it: real processes, real kills, a real proof."""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest

from dtruntime.dashboard import static_folder
from dtruntime.demo.proof import Kill, RunResult, check_coverage, check_disturbance, judge
from dtruntime.demo.scenario import Scenario
from dtruntime.demo.timeline import Incident, NoteReader
from dtruntime.testing import eventually
from dtruntime.types import EpochCoverage

STRATA = [sys.executable, "-m", "dtruntime.cli.main"]
PATIENT = """
import sys
from dtruntime.cli.main import main
from dtruntime.demo import demonstration, scenario
demonstration.SILENCE_MS = 60_000
scenario.Scenario.kill_step = property(lambda plan: plan.save_steps * 3 // 2)
sys.exit(main(sys.argv[1:]))
"""
"""The same for a busy machine: nobody who is late is dead, and the kill is long before the end."""
SMALL = ["demo", "--plain", "--workers", "2", "--epochs", "2", "--samples", "1000"]
ENDLESS = ["demo", "--plain", "--workers", "2", "--epochs", "1000", "--samples", "3000"]
PROVED = ["disturbance", "samples", "coverage", "checkpoints", "weights", "accuracy"]


@dataclasses.dataclass(frozen=True)
class Demo:
    """A demonstration that has ended."""

    output: str
    exit_code: int
    folder: Path

    @property
    def checks(self) -> dict[str, tuple[bool, str]]:
        """What was proved, or not."""
        found = re.findall(r"^  ([✓✗]) (\w+) +(.*)$", self.output, re.MULTILINE)
        return {name: (mark == "✓", text) for mark, name, text in found}

    @property
    def facts(self) -> dict[str, str]:
        return dict(re.findall(r"^  · (\w+(?: \w+)?) +(.*)$", self.output, re.MULTILINE))

    @property
    def story(self) -> list[str]:
        """The topics of what happened, in order."""
        return re.findall(r"^ *[\d.]+ s  (\w+(?: back)?)", self.output, re.MULTILINE)

    @property
    def plan(self) -> Scenario:
        return Scenario.read(self.folder / "plan.json")


def show(folder: Path, *options: str, strata: list[str] = STRATA) -> Demo:
    done = subprocess.run(
        [*strata, *options, "--keep", str(folder)], capture_output=True, text=True, timeout=170
    )
    assert done.stderr == ""
    return Demo(done.stdout, done.returncode, folder)


def processes_in(output: str) -> list[int]:
    """The process numbers of the coordinator and then of the first workers."""
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
        within=60,
        what=f"the end of processes {pids}",
    )


def in_order(wanted: list[str], found: list[str]) -> bool:
    rest = iter(found)
    return all(topic in rest for topic in wanted)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """What ``make demo`` does."""
    return show(tmp_path_factory.mktemp("demo") / "kept", "demo", "--plain")


def test_killed_worker_costs_nothing_and_the_demo_proves_it(whole: Demo) -> None:
    assert whole.exit_code == 0, whole.output
    assert "\x1b" not in whole.output
    assert list(whole.checks) == PROVED
    assert all(passed for passed, _ in whole.checks.values())
    assert whole.checks["samples"][1].startswith("0 lost, 0 repeated in 3 epochs")
    assert whole.checks["coverage"][1].startswith("0 lost, 0 repeated in 3 epochs")
    assert "equal bit for bit those of 4 undisturbed workers" in whole.checks["weights"][1]
    before, after = map(float, re.findall(r"([\d.]+)%", whole.checks["accuracy"][1]))
    assert before < 20 < 80 < after
    assert_all_ended(processes_in(whole.output))


def measured(fact: str) -> float:
    """The seconds that a fact begins with."""
    amount, unit = re.findall(r"^([\d.]+) (m?s) (?:after|from) the kill", fact)[0]
    return float(amount) / (1000 if unit == "ms" else 1)


def test_demo_tells_how_it_recovered_with_measured_times(whole: Demo) -> None:
    tale = ["data", "training", "KILLED", "detected", "waiting", "replaced", "joined"]
    assert in_order([*tale, "rolled back", "training", "finished", "again"], whole.story)
    detected, recovered = (measured(whole.facts[fact]) for fact in ("detected", "recovered"))
    assert 0 < detected < recovered
    step, again = re.search(r"step (\d+); (\d+) steps", whole.facts["rolled back"]).groups()  # type: ignore[union-attr]
    assert int(step) % whole.plan.save_steps == 0
    ends: dict[int, int] = {}
    for note in NoteReader(whole.folder / "disturbed" / "notes").news():
        ends[note.generation] = max(ends.get(note.generation, 0), note.step)
    assert int(step) + int(again) in ends.values(), "where the crew before had come to"


def test_demo_trains_on_real_parquet_files(whole: Demo) -> None:
    files = sorted((whole.folder / "data").iterdir())

    assert [pq.read_metadata(file).num_rows for file in files] == [500] * 48


@pytest.mark.long
def test_killed_coordinator_is_restarted_and_no_step_is_done_again(tmp_path: Path) -> None:
    patient = [sys.executable, "-c", PATIENT]
    options = ["demo", "--plain", "--workers", "2", "--epochs", "25", "--samples", "4000"]
    demo = show(tmp_path / "kept", *options, "--kill", "coordinator", strata=patient)

    assert demo.exit_code == 0, demo.output
    assert all(passed for passed, _ in demo.checks.values())
    assert in_order(["training", "KILLED", "restarted", "training", "finished"], demo.story)
    assert demo.facts["carried on"].endswith("none was done again")
    assert_all_ended(processes_in(demo.output))


@pytest.mark.long
def test_without_a_kill_both_runs_are_the_same_bit_for_bit(tmp_path: Path) -> None:
    demo = show(tmp_path / "kept", *SMALL, "--kill", "none", "--seed", "7")

    assert demo.exit_code == 0, demo.output
    assert list(demo.checks) == PROVED
    assert "KILLED" not in demo.output
    assert demo.checks["disturbance"][1].startswith("0 kills survived")


# The verdict is only worth something if it can be otherwise.


def first_notes(demo: Demo) -> Path:
    return min((demo.folder / "disturbed" / "notes").iterdir())


def lose_a_step(demo: Demo) -> None:
    lines = first_notes(demo).read_bytes().splitlines(keepends=True)
    first_notes(demo).write_bytes(b"".join(lines[1:]))


def repeat_a_sample(demo: Demo) -> None:
    *lines, last = first_notes(demo).read_bytes().splitlines()
    note = msgspec.json.decode(last)
    note["ids"].append(note["ids"][0])
    first_notes(demo).write_bytes(b"\n".join([*lines, msgspec.json.encode(note), b""]))


def flip_a_bit_of_a_checkpoint(demo: Demo) -> None:
    pack = max((demo.folder / "disturbed/checkpoints/packs").iterdir(), key=os.path.getsize)
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(data)


def change_a_weight_by_a_bit(demo: Demo) -> None:
    path = demo.folder / "disturbed" / "weights-1.npy"
    weights = np.load(path)
    weights.view(np.uint32)[5] ^= 1
    np.save(path, weights)


@pytest.mark.parametrize(
    ("damage", "failed"),
    [
        (lose_a_step, "samples"),
        (repeat_a_sample, "samples"),
        (flip_a_bit_of_a_checkpoint, "checkpoints"),
        (change_a_weight_by_a_bit, "weights"),
    ],
)
def test_proof_notices_what_went_wrong(whole: Demo, tmp_path: Path, damage, failed) -> None:
    copy = Demo("", 0, tmp_path / "kept")
    shutil.copytree(whole.folder, copy.folder)
    damage(copy)
    plan = msgspec.structs.replace(copy.plan, root=str(copy.folder))
    covered = tuple(EpochCoverage(e, 24_000, 24_000, 0, 0, complete=True) for e in range(3))
    ran = RunResult((), covered, 1.0)

    checks = judge(plan, Kill.NONE, ran, ran)

    assert failed in [check.name for check in checks if not check.passed]


@pytest.mark.parametrize(
    "change", [{"missing": 1}, {"repeated": 1}, {"assumed": 5}, {"complete": False}]
)
def test_proof_notices_an_epoch_that_the_coordinator_cannot_prove(change) -> None:
    plan = Scenario(root="/nowhere", epochs=2)
    good = EpochCoverage(0, 24_000, 24_000, 0, 0, complete=True)

    assert check_coverage(
        plan, RunResult((), (good, dataclasses.replace(good, epoch=1)), 1.0)
    ).passed
    bad = dataclasses.replace(good, epoch=1, **change)
    assert not check_coverage(plan, RunResult((), (good, bad), 1.0)).passed


def test_run_in_which_nobody_could_be_killed_proves_nothing() -> None:
    plan, calm = Scenario(root="/nowhere"), RunResult((), (), 1.0)

    check = check_disturbance(plan, Kill.WORKER, calm, calm)

    assert not check.passed
    assert "--epochs" in check.text


def test_comparison_with_a_run_that_was_disturbed_too_proves_nothing() -> None:
    plan, calm = Scenario(root="/nowhere"), RunResult((), (), 1.0)
    survived = RunResult((Incident(1, 1.0, "worker-2", 2, resumed_at=4.0),), (), 1.0)

    assert check_disturbance(plan, Kill.WORKER, survived, calm).passed
    assert check_disturbance(plan, Kill.NONE, survived, calm).passed
    assert not check_disturbance(plan, Kill.WORKER, survived, survived).passed


# Ending


@contextlib.contextmanager
def endless_demo(folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A demonstration that trains, with the process numbers of its coordinator and workers."""
    # Started in the background, a test run ignores SIGINT, and its children would inherit that.
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [*STRATA, *ENDLESS],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    assert process.stdout is not None
    output = ""
    signal.signal(signal.SIGINT, ignored)
    try:
        for line in process.stdout:
            output += line
            if "progress" in line:
                break
        pids = processes_in(output)
        assert all(still_running(pid) for pid in pids)
        yield process, pids
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.long
@pytest.mark.parametrize("is_killed", [False, True])
def test_dashboard_stays_until_somebody_has_seen_enough(tmp_path: Path, is_killed: bool) -> None:
    if not (static_folder() / "index.html").exists():
        pytest.skip("the dashboard is not built: make dashboard does it")
    command = [*STRATA, *SMALL, "--kill", "none", "--stay"]
    pipes: dict[str, Any] = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
    }
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, **pipes, text=True, env=env) as demo:
        assert demo.stdin is not None
        assert demo.stdout is not None
        output = ""
        for line in demo.stdout:
            output += line
            if "Enter ends the demo" in line:
                break
        found = re.search(r"look at it: (http://127\.0\.0\.1:\d+) ", output)
        assert found, output
        with urllib.request.urlopen(found[1], timeout=60) as page:
            assert b"<title>Strata" in page.read()
        with urllib.request.urlopen(f"{found[1]}/api/jobs", timeout=60) as jobs:
            assert len(json.load(jobs)["items"]) == 2
        assert demo.poll() is None
        if is_killed:
            demo.kill()
        demo.communicate("\n", timeout=60)
    assert demo.returncode == (-signal.SIGKILL if is_killed else 0)
    assert_all_ended(processes_in(output))


@pytest.mark.parametrize(
    ("number", "exit_code"),
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.long),
        (signal.SIGKILL, -9),
    ],
)
def test_ended_demo_leaves_no_process_behind(
    tmp_path: Path, number: signal.Signals, exit_code: int
) -> None:
    with endless_demo(tmp_path) as (demo, pids):
        demo.send_signal(number)
        output, _ = demo.communicate(timeout=60)

    assert demo.returncode == exit_code
    assert "Traceback" not in output
    assert_all_ended(pids)
    if number != signal.SIGKILL:
        assert "interrupted" in output
        assert list(tmp_path.iterdir()) == []


def test_worker_that_fails_ends_the_demo_with_its_log(tmp_path: Path) -> None:
    with endless_demo(tmp_path) as (demo, pids):
        os.kill(pids[2], signal.SIGTERM)  # a notice: the worker saves, leaves, and says so
        output, _ = demo.communicate(timeout=60)

    assert demo.returncode == 1
    assert f"✗ worker-1 (process {pids[2]}) ended with exit code 143" in output
    assert "worker.registered worker=worker-1" in output.partition("the end of its log:")[2]
    assert "--keep DIR" in output
    assert "Traceback" not in output
    assert_all_ended(pids)
    assert list(tmp_path.iterdir()) == []


# What it needs, and what it leaves alone


def test_demo_needs_no_torch() -> None:
    modules = "dtruntime.demo.worker, dtruntime.demo.terminal_view"
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_missing_pyarrow_is_named_with_its_remedy() -> None:
    without = "import sys; sys.modules['pyarrow'] = None; from dtruntime.cli.main import main; "
    done = subprocess.run(
        [sys.executable, "-c", without + "sys.exit(main(['demo']))"],
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.returncode == 1
    assert "pip install pyarrow" in done.stderr


def test_folder_with_other_peoples_files_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()

    done = subprocess.run(
        [*STRATA, *SMALL, "--keep", str(tmp_path)], capture_output=True, text=True, timeout=60
    )

    assert done.returncode == 1
    assert "was not made by the demo" in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]
