"""Crews of real training processes that tests kill, stop and replace."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from dtruntime import CheckpointManager

EXAMPLES = Path(__file__).parents[2] / "examples"
PATIENCE = 120.0


class Trainer:
    """One worker process, with its log."""

    def __init__(self, crew: "TrainingCrew", number: int) -> None:
        self.log_path = crew.folder / f"worker-{number}.log"
        with self.log_path.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, *map(str, crew.command)],
                env={**os.environ, **crew.environment},
                cwd=crew.cwd,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class TrainingCrew:
    """Processes of a training program that share a folder and a coordinator."""

    def __init__(self, folder: Path, url: str, workers: int, program: str, *arguments: Any) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.command = [EXAMPLES / program, *arguments]
        self.environment = {
            "COORDINATOR_URL": url,
            "WORLD_SIZE": str(workers),
            "STRATA_JOB": folder.name,
            "STRATA_LOG": "info",
            "OMP_NUM_THREADS": "1",
        }
        self.size = workers
        self.trainers: list[Trainer] = []
        self.traces = "trace/*.jsonl"
        self.cwd: Path | None = None
        """Where the processes run; in that of the tests by default."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for trainer in self.running:
            trainer.kill()

    @property
    def job(self) -> str:
        return self.environment["STRATA_JOB"]

    def resize(self, workers: int) -> None:
        """Processes that are started from now on are of so many."""
        self.size = workers
        self.environment["WORLD_SIZE"] = str(workers)

    @property
    def running(self) -> list[Trainer]:
        return [trainer for trainer in self.trainers if trainer.is_running]

    def start(self, count: int | None = None) -> list[Trainer]:
        begun = []
        for _ in range(self.size if count is None else count):
            begun.append(Trainer(self, len(self.trainers)))
            self.trainers.append(begun[-1])
        return begun

    def wait(self, *also: int) -> None:
        """Wait until all processes have ended: well, killed, or with one of these statuses."""
        deadline = time.monotonic() + PATIENCE
        while self.running:
            assert time.monotonic() < deadline, f"still training:\n{self.logs()}"
            time.sleep(0.05)
        ended = [t for t in self.trainers if t.process.returncode not in (0, -9, *also)]
        assert not ended, f"{len(ended)} failed:\n{self.logs()}"

    def until(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert self.running, f"nobody trains any more while waiting for {what}\n{self.logs()}"
            assert time.monotonic() < deadline, f"waited in vain for {what}\n{self.logs()}"
            time.sleep(0.02)

    def logs(self) -> str:
        return "\n".join(f"--- {t.log_path.name}\n{t.log[-3000:]}" for t in self.trainers)

    # What was trained

    @property
    def steps(self) -> dict[int, list[dict[str, Any]]]:
        """What each step had, by step, of all processes and attempts."""
        found: dict[int, list[dict[str, Any]]] = {}
        for file in sorted(self.folder.glob(self.traces)):
            for line in file.read_text().splitlines():
                try:
                    entry = json.loads(line)
                except ValueError:
                    continue  # the process was killed while it wrote it
                found.setdefault(entry["step"], []).append(entry)
        return found

    @property
    def last_step(self) -> int:
        return max(self.steps, default=0)

    @property
    def worlds(self) -> list[int]:
        """How many workers there were in each step."""
        return [entries[-1]["world"] for _, entries in sorted(self.steps.items())]

    def weights(self) -> Any:
        return np.load(self.folder / "weights.npy")


def last_saved(checkpoints: Path) -> int:
    """The step of the newest checkpoint that is committed."""
    with CheckpointManager(checkpoints) as manager:
        return max(manager.steps(), default=0)


def sequence(crew: TrainingCrew) -> dict[int, frozenset[int]]:
    """Which samples each step had in all; attempts at a step must have had the same ones."""
    found = {}
    for step, entries in crew.steps.items():
        found[step] = frozenset(number for entry in entries for number in entry["ids"])
    return found
