"""The examples run as their documentation says."""

import ast
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtruntime.client import Observer
from dtruntime.testing import LocalCoordinator, WorkerProcess, eventually
from tests.support.crews import TrainingCrew, last_saved

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAMS = sorted(EXAMPLES.rglob("*.py"))


@pytest.fixture(scope="module")
def coordinator() -> Iterator[LocalCoordinator]:
    # Deaths are noticed soon, and yet not where a busy machine only makes somebody late.
    with LocalCoordinator(heartbeat_interval_ms=500, heartbeat_timeout_ms=8_000) as running:
        yield running


def run(name: str, *arguments: object, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", **environment},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_every_example_says_what_it_shows_and_how_to_run_it(program: Path) -> None:
    tree = ast.parse(program.read_text())
    text = ast.get_docstring(tree) or ""
    assert text.splitlines()[0].endswith("."), "the first line says what it shows"
    assert str(program.relative_to(EXAMPLES.parent)) in text, "the docstring has its command"
    helps = [
        keyword.arg
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "ArgumentParser"
        for keyword in node.keywords
    ]
    assert helps in ([], ["description"])


@pytest.mark.long
def test_resumable_loader_ends_with_the_same_model_when_it_is_stopped(tmp_path: Path) -> None:
    sys.path.insert(0, str(EXAMPLES))
    try:
        from resumable_loader import make_data  # type: ignore[import-not-found]
    finally:
        sys.path.pop(0)
    data = tmp_path / "data"
    data.mkdir()
    make_data(data)
    whole, parts = tmp_path / "whole.json", tmp_path / "parts.json"
    run("resumable_loader.py", "--data", data, "--state", whole)
    run("resumable_loader.py", "--data", data, "--state", parts, "--stop-after", 70)
    output = run("resumable_loader.py", "--data", data, "--state", parts)
    assert "epoch 0: 130 steps" in output
    assert json.loads(whole.read_text()) == json.loads(parts.read_text())


def test_simplest_training_finishes_and_has_nothing_left_to_do_when_run_again(
    tmp_path: Path,
) -> None:
    first = run("real_training_simple.py", tmp_path)
    again = run("real_training_simple.py", tmp_path)
    assert first.startswith("finished after step 400, weight ")
    assert again == first


@pytest.mark.long
@pytest.mark.timeout(400)
def test_jax_training_that_was_killed_ends_with_the_same_bits(tmp_path: Path) -> None:
    options = ("--epochs", 2, "--save-steps", 10)
    run("jax_training.py", "--folder", tmp_path / "whole", *options)
    killed = tmp_path / "killed"
    arguments = ["--folder", killed, *options, "--step-seconds", 0.1]
    with WorkerProcess(
        EXAMPLES / "jax_training.py", list(map(str, arguments)), env={"JAX_PLATFORMS": "cpu"}
    ) as program:
        program.expect("step 20:", timeout=90)
        eventually(lambda: last_saved(killed / "checkpoints") >= 10, what="a save after step 0")
        program.kill()
    assert not (killed / "params.npy").exists()
    output = run("jax_training.py", "--folder", killed, *options)

    resumed = int(output.split("begins after step ")[1].split()[0])
    assert 10 <= resumed < 128, output
    assert "finished after step 128" in output
    one, other = ((tmp_path / name / "params.npy").read_bytes() for name in ("whole", "killed"))
    assert one == other


@pytest.mark.long
def test_numpy_training_that_lost_a_worker_ends_with_the_same_weights(
    tmp_path: Path, coordinator: LocalCoordinator
) -> None:
    def trained(name: str, *, with_a_kill: bool) -> str:
        checkpoints = tmp_path / name / "checkpoints"
        options = ["--samples", 4_000, "--epochs", 2, "--save-steps", 5]
        options += ["--step-seconds", 0.2 if with_a_kill else 0.0]
        arguments = ["--checkpoints", checkpoints, *options]
        with TrainingCrew(
            tmp_path / name, coordinator.url, 2, "numpy_training.py", *arguments
        ) as crew:
            victim, _ = crew.start()
            if with_a_kill:
                crew.until("a save after step 0", lambda: last_saved(checkpoints) > 0)
                victim.kill()
                crew.environment["RANK"] = re.findall(r"worker (\d) of 2", victim.log)[0]
                crew.start(1)
            crew.wait()
            logs = [trainer.log for trainer in crew.trainers if trainer.process.returncode == 0]
        assert sum(log.count("every sample once") for log in logs) == 2, logs
        (weights,) = {re.findall(r"finished after step 40, weights (\w+)", log)[0] for log in logs}
        assert any("begins after step 0" not in log for log in logs) == with_a_kill
        return str(weights)

    whole = trained("whole", with_a_kill=False)
    assert trained("killed", with_a_kill=True) == whole


@pytest.mark.long
def test_killed_searcher_is_not_replaced_and_every_key_is_tried_once(
    tmp_path: Path, coordinator: LocalCoordinator
) -> None:
    space, wanted = 400_000, 6
    arguments = ["--folder", tmp_path / "found", "--space", space, "--wanted", wanted]
    arguments += ["--batch-seconds", 0.3]
    with TrainingCrew(
        tmp_path / "search", coordinator.url, 3, "distributed_task.py", *arguments
    ) as crew:
        del crew.environment["WORLD_SIZE"]  # whoever comes takes part
        crew.start()
        victim = crew.trainers[1]
        crew.until("a commit of the victim", lambda: "has committed" in victim.log)
        victim.kill()
        crew.wait()
        logs = [trainer.log for trainer in crew.trainers if trainer is not victim]

    (log,) = (log for log in logs if "found [" in log)
    expected = sorted(random.Random(0).sample(range(space), wanted))
    assert f"found {expected}" in log
    assert f"proof: {space:,} of {space:,} keys tried, 0 missing, 0 repeated" in log
    # What the victim had committed nobody tried again, and everything else somebody did.
    tried = sum(int(count.replace(",", "")) for count in re.findall(r"\d: ([\d,]+)", _tried(log)))
    last = re.findall(r"has committed ([\d,]+) keys", victim.log)[-1]
    committed = int(last.replace(",", ""))
    assert space - tried in (committed, committed + 20_000), f"{log}\n{victim.log}"


def _tried(log: str) -> str:
    (line,) = (line for line in log.splitlines() if line.startswith("tried by rank: "))
    return line


@pytest.mark.long
def test_fifty_simulated_workers_train_and_meet_and_one_is_lost_and_returns(
    coordinator: LocalCoordinator,
) -> None:
    arguments = ["--workers", 50, "--coordinator", coordinator.url, "--job", "crowd"]
    arguments += ["--seconds", 12, "--step-seconds", 0.1, "--epoch-steps", 10, "--seed", 7]
    arguments += ["--die-every", 3, "--rejoin-seconds", 1, "--checkpoints"]
    with WorkerProcess(EXAMPLES / "simulated_worker.py", list(map(str, arguments))) as crowd:
        crowd.expect("50 registered")
        with Observer(coordinator.url) as observer:
            eventually(
                lambda: observer.status("crowd").checkpoint_count,
                what="an epoch that all have finished",
            )
            status = observer.status("crowd")
        assert crowd.wait(60) == 0, crowd.log
        lines = crowd.lines

    assert {worker.rank for worker in status.workers} == set(range(50))
    # All but those that have died and come back a moment ago.
    training = [worker for worker in status.workers if worker.step]
    assert len(training) > 40
    assert len({worker.step_seconds for worker in training}) > 40
    assert all(worker.metrics["loss"] > 0 for worker in training)
    died, returned = re.findall(r"(\d+) died, (\d+) came back", lines[-2])[0]
    assert 0 < int(returned) <= int(died)
    assert re.match(r"the coordinator sees \d+ live and \d dead, [1-9]\d* stragglers", lines[-1])
