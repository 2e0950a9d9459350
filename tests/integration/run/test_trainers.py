"""Lightning and the Trainer of transformers: killed, told to go, asked for checkpoints."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from dtruntime import CheckpointManager
from dtruntime.errors import CheckpointDamagedError
from dtruntime.integrations.transformers import FILES, read_folder, write_folder
from dtruntime.testing import LocalCoordinator, eventually
from tests.support.http_api import Api
from tests.support.paths import PROGRAMS

LIBRARIES = ("transformers", "lightning")
STEPS = 24
PATIENCE = 110.0


class Training:
    """Processes that train one after the other, with one place for checkpoints."""

    def __init__(self, folder: Path, library: str, url: str = "") -> None:
        self._script = PROGRAMS / f"{library}_worker.py"
        self.checkpoints = folder / "checkpoints"
        self._folder = folder
        self._outputs = 0
        self._url = url
        self.log = ""

    @contextlib.contextmanager
    def process(self, seconds: float = 0.0, hold: int = 0) -> Iterator[subprocess.Popen[str]]:
        """A training on a machine of its own: it finds nothing but the checkpoints.

        In step ``hold`` it waits until somebody waits for its end.
        """
        self._outputs += 1
        self.output = self._folder / f"output{self._outputs}"
        shutil.rmtree(self.output, ignore_errors=True)
        environment = {**os.environ, "COORDINATOR_URL": self._url} if self._url else {**os.environ}
        running = subprocess.Popen(
            [sys.executable, self._script, self.output, self.checkpoints, str(seconds), str(hold)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        try:
            yield running
        finally:
            running.kill()
            running.wait()
            for pipe in (running.stdin, running.stdout):
                assert pipe is not None
                pipe.close()

    def until(self, running: subprocess.Popen[str], line: str) -> None:
        """Read what it prints up to a line."""
        assert running.stdout is not None
        for text in running.stdout:
            self.log += text
            if text.startswith(line):
                return
        raise AssertionError(f"it ended without {line!r}\n{self.log}")

    def ends(self, running: subprocess.Popen[str]) -> str:
        assert running.stdin is not None
        assert running.stdout is not None
        running.stdin.close()
        rest = running.stdout.read()
        self.log += rest
        assert running.wait(PATIENCE) == 0, self.log
        return rest

    def run(self) -> str:
        with self.process() as running:
            return self.ends(running)

    def weights(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = torch.load(self.output / "final.pt", weights_only=True)
        return found

    def steps(self) -> list[int]:
        with CheckpointManager(self.checkpoints) as manager:
            return sorted({info.step for info in manager.checkpoints()})


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("library", LIBRARIES)
def test_killed_and_told_to_go_the_weights_are_those_of_an_undisturbed_run(
    tmp_path: Path, library: str
) -> None:
    calm = Training(tmp_path / "calm", library)
    assert "finished" in calm.run()

    run = Training(tmp_path / "disturbed", library)
    with run.process(hold=8) as killed:
        run.until(killed, "step 8")
        eventually(lambda: run.steps() == [5], within=PATIENCE, what="the checkpoint of step 5")
        killed.kill()
    assert run.steps() == [5]
    with run.process(hold=12) as told:
        run.until(told, "begins with")
        run.until(told, "step 12")
        told.send_signal(signal.SIGTERM)
        assert "finished" not in run.ends(told)
    last = run.steps()[-1]
    assert 12 <= last <= 14, run.log
    assert "finished" in run.run()
    assert same(run.weights(), calm.weights())


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("library", LIBRARIES)
def test_operator_sees_the_training_and_is_obeyed(tmp_path: Path, library: str) -> None:
    with LocalCoordinator(http=True) as coordinator:
        run = Training(tmp_path, library, coordinator.url)
        with run.process(1.0) as running, Api(coordinator.http_url) as api:
            run.until(running, "step 2")
            (worker,) = eventually(
                lambda: [w for w in api.ask("/api/workers").json()["items"] if w["step"]],
                within=PATIENCE,
                what="a step in the API",
            )
            assert worker["state"] == "training"
            assert api.post("/api/actions", {"job": "default", "kind": "stop"}).status_code == 200
            assert "finished" not in run.ends(running)
        assert run.steps(), run.log
        assert "finished" in run.run()


def test_folder_comes_back_as_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-3"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "weights.bin").write_bytes(bytes(range(256)) * 99)
    (folder / "empty").touch()
    with CheckpointManager(tmp_path / "kept") as manager:
        manager.save(read_folder(folder), 3).wait()
        back = tmp_path / "back" / "checkpoint-3"
        back.parent.mkdir()
        write_folder(manager.load_state(), back)
    found = {p.relative_to(back).as_posix(): p.read_bytes() for p in back.rglob("*") if p.is_file()}
    assert found == {"deep/weights.bin": bytes(range(256)) * 99, "empty": b""}


@pytest.mark.parametrize("name", ["../outside", "/etc/outside", "a/../../outside", "a\\b", ""])
def test_file_that_is_to_lie_outside_is_refused(tmp_path: Path, name: str) -> None:
    state = {FILES: {name: np.zeros(3, np.uint8)}}
    with pytest.raises(CheckpointDamagedError, match="outside"):
        write_folder(state, tmp_path / "checkpoint-1")
    assert not (tmp_path / "outside").exists()


def test_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointDamagedError, match="holds no folder"):
        write_folder({"model": 1}, tmp_path / "checkpoint-1")
