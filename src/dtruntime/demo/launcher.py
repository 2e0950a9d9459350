"""Keeps the workers of a run going, as torchrun, Slurm or Kubernetes would."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Self

from ..errors import StrataError
from ..testing import LocalCoordinator
from .scenario import RunFiles, Scenario

REPLACEMENTS_MOST = 20


class Launcher:
    """All workers of a run, and those that replace the killed ones.

    Leaving the ``with`` block leaves no process behind.
    """

    def __init__(self, plan: Scenario, files: RunFiles, url: str) -> None:
        self._plan = plan
        self._files = files
        self._url = url
        self._killed: dict[str, DemoWorker] = {}
        """Workers that have to be replaced."""
        self._collected: set[str] = set()
        self.workers: list[DemoWorker] = []

    def __enter__(self) -> Self:
        try:
            for rank in range(self._plan.workers):
                self._start(rank)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    @property
    def has_work(self) -> bool:
        """Whether a worker runs, or is to be replaced."""
        return bool(self._killed) or any(w.exit_code is None for w in self.workers)

    def named(self, name: str) -> DemoWorker | None:
        """The worker of a name."""
        return next((worker for worker in self.workers if worker.name == name), None)

    def collect(self) -> list[DemoWorker]:
        """Workers that were killed since the last call; raises `DemoFailed` when one failed."""
        ended = [w for w in self.workers if w.exit_code and w.name not in self._collected]
        for worker in ended:
            code = worker.exit_code or 0
            if code > 0 or len(self.workers) > self._plan.workers + REPLACEMENTS_MOST:
                raise DemoFailed(
                    f"{worker.name} (process {worker.pid}) {describe_exit(code)}", worker.log_path
                )
            self._collected.add(worker.name)
            self._killed[worker.name] = worker
        return ended

    def replace(self, live: Collection[str]) -> list[tuple[DemoWorker, DemoWorker]]:
        """Start replacements for killed workers that are not ``live`` members any more."""
        buried = [worker for name, worker in self._killed.items() if name not in live]
        pairs = []
        for worker in buried:
            del self._killed[worker.name]
            pairs.append((worker, self._start(None)))
        return pairs

    def _start(self, rank: int | None) -> DemoWorker:
        worker = DemoWorker(self._plan, self._files, self._url, len(self.workers), rank)
        self.workers.append(worker)
        return worker

    def _end(self) -> None:
        for worker in self.workers:
            worker.kill()


HEARTBEAT_MS = 200
SILENCE_MS = 2000
"""After so much silence the coordinator takes a worker for dead."""
TAIL_LINES = 12
_ONE_THREAD = ("MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Workers share the machine, and one thread adds up in the same order every time."""


class DemoFailed(StrataError):
    """The demonstration could not go on; ``log_path`` is the log that says why."""

    def __init__(self, message: str, log_path: Path) -> None:
        super().__init__(message)
        self.log_path = log_path
        self.tail = tail_of(log_path)


class DemoCoordinator:
    """The coordinator, which may be killed at any time and is started again."""

    def __init__(self, plan: Scenario) -> None:
        self._pid_file = plan.coordinator_pid_file
        self._process = LocalCoordinator(
            plan.coordinator_folder,
            heartbeat_interval_ms=HEARTBEAT_MS,
            heartbeat_timeout_ms=SILENCE_MS,
            http=True,
        )
        self.log_path = self._process.log_path
        self.pid = 0
        """Its process number, also after it has ended."""
        self._leash: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where workers find it."""
        return self._process.url

    @property
    def http_url(self) -> str:
        """Where people find it."""
        return self._process.http_url

    def start(self) -> None:
        """Start it, or start it again on the same port with the same state."""
        try:
            self._process.start()
        except StrataError as exc:
            raise DemoFailed("the coordinator did not start", self.log_path) from exc
        self.pid = self._process.pid
        self._pid_file.write_text(str(self.pid))
        if self._leash is None:
            self._leash = subprocess.Popen(
                [sys.executable, "-m", "dtruntime.demo.die_with_parent", str(self._pid_file)],
                stdin=subprocess.PIPE,
                start_new_session=True,
            )

    def kill(self) -> None:
        """Send it SIGKILL."""
        self._process.send_signal(signal.SIGKILL)

    def has_ended(self) -> bool:
        """Whether its process is gone."""
        try:
            self._process.wait(0.0)
        except StrataError:
            return False
        return True

    def stop(self) -> None:
        """End it in an orderly way."""
        self._process.stop()
        self._pid_file.unlink(missing_ok=True)
        if self._leash is not None:
            self._leash.communicate()


class DemoWorker:
    """One worker process."""

    def __init__(
        self, plan: Scenario, files: RunFiles, url: str, number: int, rank: int | None
    ) -> None:
        """Start it; without a rank it takes one that is free."""
        self.name = f"worker-{number}"
        self.log_path = files.logs / f"{self.name}.log"
        self.started_at = time.time()
        place = {} if rank is None else {"RANK": str(rank)}
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dtruntime.demo.worker", str(plan.path), files.root.name],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={
                    **os.environ,
                    **dict.fromkeys(_ONE_THREAD, "1"),
                    **place,
                    "COORDINATOR_URL": url,
                    "STRATA_CACHE_DIR": str(Path(plan.root, "cache")),
                    "STRATA_JOB": files.job,
                    "WORKER_ID": self.name,
                    "WORLD_SIZE": str(plan.workers),
                },
            )

    @property
    def pid(self) -> int:
        """Its process number."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """How it ended, ``None`` while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """End it with SIGKILL."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


def tail_of(path: Path) -> list[str]:
    """The last lines of a log."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.splitlines()[-TAIL_LINES:]
