"""The workers of a round, under a supervisor that starts them again."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .forming import MARK

ROOT = Path(__file__).parents[3]
CRASHED_SECONDS = 0.3
"""A worker that ended with an error is started again after so long."""
PREEMPTED = 143


@dataclass(eq=False)
class Worker:
    """One process."""

    slot: int
    process: subprocess.Popen[bytes]
    log_path: Path
    started_at: float
    restart_seconds: float = CRASHED_SECONDS
    is_paused: bool = False
    is_ghost: bool = False
    """Whether another one has taken its place."""
    was_killed: bool = False
    was_told: bool = False
    """Whether it got notice to leave."""

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    @property
    def outcome(self) -> dict[str, Any]:
        """What it said at its end, if it came to an end by itself."""
        with contextlib.suppress(ValueError, IndexError):
            found = json.loads(self.log.strip().splitlines()[-1])
            if isinstance(found, dict) and "ending" in found:
                return found
        return {}

    def send(self, number: signal.Signals) -> None:
        if self.is_running:
            self.process.send_signal(number)


@dataclass
class Crew:
    """As many workers as there are slots, each started again until it has finished."""

    folder: Path
    size: int
    options: dict[str, Any]
    environment: dict[str, str]
    workers: list[Worker] = field(default_factory=list)
    """All that were ever started."""
    finished: set[int] = field(default_factory=set)
    """The slots whose workers came to the end."""
    errors: list[str] = field(default_factory=list)
    """Why workers ended that nobody had told to."""
    restarts: int = 0
    _due: dict[int, float] = field(default_factory=dict)
    """When slots are filled."""
    _seen: set[Worker] = field(default_factory=set)
    _forming_restart: float = CRASHED_SECONDS
    """After how long a worker that died while a crew formed is replaced."""

    @property
    def running(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.is_running]

    @property
    def victims(self) -> list[Worker]:
        """Workers that something can be done to."""
        return [w for w in self.running if not w.is_paused and not w.is_ghost]

    @property
    def is_done(self) -> bool:
        return len(self.finished) == self.size and not self.running

    def start(self, slot: int) -> Worker:
        path = self.folder / f"worker-{len(self.workers)}.log"
        command = [sys.executable, "-m", "tests.chaos.torture.worker", json.dumps(self.options)]
        with path.open("wb") as log:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **self.environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        worker = Worker(slot, process, path, time.monotonic())
        self.workers.append(worker)
        return worker

    def start_all(self) -> None:
        for slot in range(self.size):
            self.start(slot)

    def replace(self, worker: Worker, seconds: float) -> None:
        """Let another one take a worker's place, although its process is still there."""
        worker.is_ghost = True
        self._due[worker.slot] = time.monotonic() + seconds

    def kill(self, worker: Worker, restart_seconds: float) -> None:
        worker.was_killed = True
        worker.restart_seconds = restart_seconds
        worker.send(signal.SIGKILL)

    def die_at(self, point: str, restart_seconds: float) -> None:
        """Let the worker that comes first to a point of forming die there."""
        self._forming_restart = restart_seconds
        whole = self._traces / f"{MARK}.part"
        whole.write_text(point)
        whole.rename(self._traces / MARK)

    @property
    def _traces(self) -> Path:
        return Path(self.options["traces"])

    def look(self) -> None:
        """See who has ended, and start whoever is due."""
        for worker in self.workers:
            if worker not in self._seen and not worker.is_running:
                self._seen.add(worker)
                self._ended(worker)
        now = time.monotonic()
        for slot, due in list(self._due.items()):
            if now >= due:
                del self._due[slot]
                self.restarts += 1
                self.start(slot)

    def _ended(self, worker: Worker) -> None:
        code = worker.process.returncode
        if (self._traces / f"died-{worker.process.pid}").exists():
            worker.was_killed = True
            worker.restart_seconds = self._forming_restart
        finished = code == 0 and worker.outcome.get("ending") == "finished"
        if not finished and not worker.was_killed and code != PREEMPTED:
            tail = worker.log.strip().splitlines()[-1:] or ["nothing"]
            self.errors.append(f"{worker.log_path.name} ended with {code}: {tail[0][-400:]}")
        if worker.is_ghost:
            return
        if finished:
            self.finished.add(worker.slot)
        else:
            self._due[worker.slot] = time.monotonic() + worker.restart_seconds

    def close(self) -> None:
        for worker in self.running:
            worker.process.kill()
        for worker in self.workers:
            worker.process.wait()

    def logs(self, size: int = 1500) -> str:
        return "\n".join(f"--- {w.log_path.name}\n{w.log[-size:]}" for w in self.workers[-8:])
