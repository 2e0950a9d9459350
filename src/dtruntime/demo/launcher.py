"""The processes of the demonstration, kept going as torchrun, Slurm or Kubernetes would.

None of them stays behind when this process ends, however it does. It holds the other end of their
standard input and never writes: the input ends with the holder, also when that was killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection
from pathlib import Path
from typing import Self

from ..errors import StrataError
from ..testing import LocalCoordinator
from .scenario import RunFiles, Scenario

REPLACEMENTS_MOST = 20
HEARTBEAT_MS = 200
SILENCE_MS = 2000
"""After so much silence the coordinator takes a worker for dead."""
TAIL_LINES = 12
_ONE_THREAD = ("MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Workers share the machine, and one thread adds up in the same order every time."""


class DemoFailed(StrataError):
    """The demonstration could not go on; ``tail`` is the end of the log that says why."""

    def __init__(self, message: str, log_path: Path) -> None:
        super().__init__(message)
        self.tail: list[str] = []
        with contextlib.suppress(OSError):
            text = log_path.read_text(encoding="utf-8", errors="replace")
            self.tail = text.splitlines()[-TAIL_LINES:]


def end_with_parent() -> None:
    """End this process with the one that holds its standard input."""

    def watch() -> None:
        # Not sys.stdin: its lock, held by this thread, would stop the interpreter's end.
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


class DemoCoordinator(LocalCoordinator):
    """The coordinator, which may be killed at any time and is started again."""

    def __init__(self, plan: Scenario) -> None:
        super().__init__(
            plan.coordinator_folder,
            heartbeat_interval_ms=HEARTBEAT_MS,
            heartbeat_timeout_ms=SILENCE_MS,
            http=True,
        )
        self._pid_file = plan.coordinator_folder / "pid"
        self._guard: subprocess.Popen[bytes] | None = None
        """Ends the coordinator when this process is gone."""
        self.last_pid = 0
        """Its process number, also after it has ended."""

    def start(self) -> Self:
        """Start it, or start it again on the same port with the same state."""
        try:
            super().start()
        except StrataError as exc:
            raise DemoFailed("the coordinator did not start", self.log_path) from exc
        self.last_pid = self.pid
        self._pid_file.write_text(str(self.pid))
        if self._guard is None:
            self._guard = subprocess.Popen(
                ["sh", "-c", 'read -r line; kill "$(cat "$0")"', str(self._pid_file)],
                stdin=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        return self

    def has_ended(self) -> bool:
        """Whether its process is gone."""
        try:
            self.wait(0.0)
        except StrataError:
            return False
        return True

    def stop(self) -> int:
        """End it in an orderly way."""
        code = super().stop()
        self._pid_file.unlink(missing_ok=True)
        if self._guard is not None:
            self._guard.communicate()
        return code


class DemoWorker:
    """One worker process."""

    def __init__(
        self, plan: Scenario, files: RunFiles, url: str, number: int, rank: int | None
    ) -> None:
        """Start it; without a rank it takes one that is free."""
        self.name = f"worker-{number}"
        self.log_path = files.logs / f"{self.name}.log"
        self.started_at = time.time()
        self.is_reported = False
        """Whether its end was told."""
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dtruntime.demo.worker", str(plan.path), files.root.name],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={
                    **os.environ,
                    **dict.fromkeys(_ONE_THREAD, "1"),
                    **({} if rank is None else {"RANK": str(rank)}),
                    "COORDINATOR_URL": url,
                    "STRATA_CACHE_DIR": str(Path(plan.root, "cache")),
                    "STRATA_JOB": files.job,
                    "WORKER_ID": self.name,
                    "WORLD_SIZE": str(plan.workers),
                },
            )
        self.pid = self.process.pid

    def kill(self) -> None:
        """End it with SIGKILL."""
        self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()


class Launcher:
    """All workers of a run, and those that replace the killed ones.

    Leaving the ``with`` block leaves no process behind.
    """

    def __init__(self, plan: Scenario, files: RunFiles, url: str) -> None:
        self._plan, self._files, self._url = plan, files, url
        self._to_replace: list[DemoWorker] = []
        self.workers: list[DemoWorker] = []

    def __enter__(self) -> Self:
        try:
            for rank in range(self._plan.workers):
                self._start(rank)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.kill()

    @property
    def has_work(self) -> bool:
        """Whether a worker runs, or is to be replaced."""
        return bool(self._to_replace) or any(w.process.poll() is None for w in self.workers)

    def collect(self) -> list[DemoWorker]:
        """Workers that were killed since the last call; raises `DemoFailed` when one failed."""
        ended = [w for w in self.workers if w.process.poll() and not w.is_reported]
        for worker in ended:
            code = worker.process.returncode
            if code > 0 or len(self.workers) > self._plan.workers + REPLACEMENTS_MOST:
                text = f"{worker.name} (process {worker.pid}) {_exit_in_words(code)}"
                raise DemoFailed(text, worker.log_path)
            worker.is_reported = True
        self._to_replace += ended
        return ended

    def replace(self, live: Collection[str]) -> list[tuple[DemoWorker, DemoWorker]]:
        """Start replacements for killed workers that are not ``live`` members any more."""
        dead = [worker for worker in self._to_replace if worker.name not in live]
        self._to_replace = [worker for worker in self._to_replace if worker.name in live]
        return [(worker, self._start(None)) for worker in dead]

    def _start(self, rank: int | None) -> DemoWorker:
        worker = DemoWorker(self._plan, self._files, self._url, len(self.workers), rank)
        self.workers.append(worker)
        return worker


def _exit_in_words(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
