"""A run that is told to go goes: whatever it does at that moment, and whoever is gone by then."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from dtruntime.client.observer import Observer
from dtruntime.testing import eventually
from dtruntime.types import Membership
from tests.integration.run.test_operator_requests import WORKER, crew_of, saved

PROMPT = 20.0
"""Far less than what was waited for before: an outage of 60 s, a round of 30 s."""


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a program with arguments and variables; what is left of it is killed afterwards."""
    with ExitStack() as stack:

        def begin(program: Path, *arguments: object, **environment: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, str(program), *map(str, arguments)],
                env={**os.environ, "STRATA_LOG": "info", **environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield begin


def unused_url() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def left_without_training(process: subprocess.Popen[str], folder: Path) -> str:
    """What a process said that was told to go before it trained."""
    said, _ = process.communicate(timeout=PROMPT)
    assert process.returncode == 143, said
    assert "Traceback" not in said, said
    assert said.count("run.left_before_training") == 1, said
    assert not list(folder.glob("steps-*")), "the body of the with statement was run"
    return said


@pytest.mark.parametrize("notice", ["signal", "file"])
def test_notice_is_heard_while_there_is_no_coordinator(tmp_path, notice, start):
    told = tmp_path / "notice"
    process = start(WORKER, tmp_path, f"notice={told}", COORDINATOR_URL=unused_url())
    assert process.stdout is not None
    for line in process.stdout:
        if "coordinator.unreachable" in line:
            break
    told.touch() if notice == "file" else process.send_signal(signal.SIGTERM)
    said = left_without_training(process, tmp_path)
    assert ("SIGTERM" if notice == "signal" else f"{told} appeared") in said


@pytest.mark.parametrize("notice", ["signal", "file"])
def test_notice_is_heard_in_assembly_and_the_worker_leaves_the_job(
    coordinator, job, tmp_path, notice
):
    told = tmp_path / "notice"
    with crew_of(tmp_path, coordinator, job, 2, started=1, notice=told) as crew:
        (waiting,) = crew.trainers
        with Observer(coordinator.url) as observer:
            crew.until("registration", lambda: "worker.registered" in waiting.log)
            eventually(lambda: any(b.arrived for b in observer.status(job).barriers))
            if notice == "file":
                told.touch()
            else:
                waiting.process.send_signal(signal.SIGTERM)
            assert waiting.process.wait(PROMPT) == 143, waiting.log
            first, _ = sorted(observer.status(job).workers, key=lambda worker: worker.rank)
            assert first.membership == Membership.LEFT, first
    assert "Traceback" not in waiting.log, waiting.log
    assert waiting.log.count("run.left_before_training") == 1, waiting.log
    assert not list(tmp_path.glob("steps-*")), "the body of the with statement was run"


SLOW_RESTORE = """
import os, sys, time
from dtruntime import Run

class Slow:
    def state_dict(self):
        return {"x": 1}

    def load_state_dict(self, state):
        open(sys.argv[1] + "/restoring", "w").close()
        while len(sys.argv) > 2:
            time.sleep(60)

with Run(sys.argv[1] + "/checkpoints", max_steps=10, save_steps=5, track={"slow": Slow()},
         preemption_file=sys.argv[1] + "/notice") as run:
    for step in run:
        if len(sys.argv) > 2:
            open(sys.argv[1] + "/steps-1", "w").close()
        if run.step == 7:
            os._exit(0)
"""


@pytest.mark.parametrize("notice", ["signal", "file"])
def test_notice_is_heard_while_a_run_restores(tmp_path, notice, start):
    program = tmp_path / "program.py"
    program.write_text(SLOW_RESTORE)
    first = start(program, tmp_path)
    assert first.wait(60) == 0, first.communicate()
    process = start(program, tmp_path, "slow")
    eventually(lambda: (tmp_path / "restoring").exists(), within=60)
    if notice == "file":
        (tmp_path / "notice").touch()
    else:
        process.send_signal(signal.SIGTERM)
    left_without_training(process, tmp_path)


@pytest.mark.long
def test_grace_bounds_everything_while_the_coordinator_is_gone(own_coordinator, tmp_path):
    """Saves wait for the coordinator, the gate does, and so does the goodbye."""
    options = {"save_steps": 5, "grace": 4, "hold": 23, "apart": 1}
    with crew_of(tmp_path, own_coordinator, "gone", 2, **options) as crew:
        crew.until("the step to hold at", lambda: crew.last_step >= 23)
        crew.until("saves", lambda: saved(tmp_path)[-1] == 20)
        own_coordinator.kill()
        (tmp_path / "go").touch()
        crew.until("a save that waits", lambda: crew.last_step >= 27)
        told = time.monotonic()
        for trainer in crew.trainers:
            trainer.process.send_signal(signal.SIGTERM)
        for trainer in crew.trainers:
            assert trainer.process.wait(60) == 143, trainer.log
        print(f"gone after {time.monotonic() - told:.1f} s with a grace time of 4 s")
        for trainer in crew.trainers:
            assert re.search(r"run\.leaves_unsaved step=\d+ last_saved=20\b", trainer.log), (
                trainer.log
            )
            assert "Traceback" not in trainer.log, trainer.log


HANGING_EXIT = """
import atexit, os, signal, sys, time
from dtruntime import Run

atexit.register(time.sleep, 600)
with Run(sys.argv[1], max_steps=1000, grace_seconds=1.5) as run:
    for step in run:
        if run.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
print("unreached")
"""


def test_grace_bounds_exit_hooks_too(tmp_path, start):
    program = tmp_path / "program.py"
    program.write_text(HANGING_EXIT)
    process = start(program, tmp_path / "checkpoints")
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 143, said
    assert "run.grace_over" in said, said
    assert "unreached" not in said


LATE_STEP = """
import os, signal, sys, time
from dtruntime import Run

with Run(sys.argv[1], max_steps=1000, save_steps=2, grace_seconds=1) as run:
    for step in run:
        if run.step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(600)
"""


def test_grace_bounds_a_step_that_does_not_end(tmp_path, start):
    program = tmp_path / "program.py"
    program.write_text(LATE_STEP)
    process = start(program, tmp_path / "checkpoints")
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 143, said
    assert re.search(r"run\.grace_over .*last_saved=4\b", said), said


CAUGHT = """
import os, signal, sys, time
from dtruntime import Run

try:
    with Run(sys.argv[1], max_steps=1000, grace_seconds=1) as run:
        for step in run:
            if run.step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
except SystemExit as ended:
    time.sleep(2.5)
    print("went on after", ended.code)
"""


def test_program_that_goes_on_after_its_run_has_left_is_not_ended(tmp_path, start):
    program = tmp_path / "program.py"
    program.write_text(CAUGHT)
    process = start(program, tmp_path / "checkpoints")
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert "went on after 143" in said
