"""The demonstration's worker processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from ..errors import StrataError
from .plan import Plan
from .worker import LOST_A_PEER

GRACE_SECONDS = 2.0
POLL_SECONDS = 0.02
TAIL_LINES = 12
_ONE_THREAD = ("MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Workers share the machine, and one thread adds up in the same order every time."""


class DemoFailed(StrataError):
    """The demonstration could not go on; ``tail`` is the end of the log that says why."""

    def __init__(self, message: str, log_path: Path) -> None:
        super().__init__(message)
        self.tail = tail_of(log_path)


class DemoWorker:
    """One worker."""

    def __init__(self, plan: Plan, plan_path: Path, rank: int, url: str, coordinator: int) -> None:
        """Start it; ``coordinator`` is the coordinator's process number."""
        self.rank = rank
        self.log_path = plan.worker_file(rank, "log")
        command = [sys.executable, "-m", "dtruntime.demo.worker", "--plan", str(plan_path)]
        command += ["--url", url, "--rank", str(rank), "--coordinator-pid", str(coordinator)]
        settings = {"STRATA_CACHE_DIR": str(plan.cache_folder), **dict.fromkeys(_ONE_THREAD, "1")}
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **settings},
                start_new_session=True,
            )

    @property
    def name(self) -> str:
        """Its worker id."""
        return f"worker-{self.rank}"

    @property
    def pid(self) -> int:
        """Its process number."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """How it ended, ``None`` while it runs."""
        return self._process.poll()

    def terminate(self) -> None:
        """Ask it to end."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def reap(self) -> None:
        """Make sure that it has ended."""
        try:
            self._process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        finally:
            if self._process.stdin is not None:
                self._process.stdin.close()


class Crew:
    """All workers of a demonstration; leaving the ``with`` block leaves none behind."""

    def __init__(self, plan: Plan, plan_path: Path, url: str, coordinator: int) -> None:
        self._plan, self._plan_path = plan, plan_path
        self._url, self._coordinator = url, coordinator
        self.workers: list[DemoWorker] = []

    def __enter__(self) -> Self:
        try:
            for rank in range(self._plan.workers):
                self.workers.append(
                    DemoWorker(self._plan, self._plan_path, rank, self._url, self._coordinator)
                )
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    @property
    def running(self) -> bool:
        """Whether a worker has not ended yet."""
        return any(worker.exit_code is None for worker in self.workers)

    def failed(self) -> DemoWorker | None:
        """The worker whose failure began it all, if one failed."""
        if not any(worker.exit_code for worker in self.workers):
            return None
        deadline = time.monotonic() + GRACE_SECONDS
        while True:
            # Others stop because the first one is gone, and may be quicker to end.
            failed = [worker for worker in self.workers if worker.exit_code]
            causes = [worker for worker in failed if worker.exit_code != LOST_A_PEER]
            if causes or not self.running or time.monotonic() > deadline:
                return (causes or failed)[0]
            time.sleep(POLL_SECONDS)

    def end(self) -> None:
        """End what still runs."""
        for worker in self.workers:
            worker.terminate()
        for worker in self.workers:
            worker.reap()


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code == LOST_A_PEER:
        return "stopped because it lost another worker"
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
