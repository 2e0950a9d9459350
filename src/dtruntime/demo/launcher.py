"""Keeps the workers of a run going, as torchrun, Slurm or Kubernetes would."""

from __future__ import annotations

from collections.abc import Collection
from types import TracebackType
from typing import Self

from .processes import DemoFailed, DemoWorker, describe_exit
from .scenario import Plan, RunFiles

REPLACEMENTS_MOST = 20


class Launcher:
    """All workers of a run, and those that replace the killed ones.

    Leaving the ``with`` block leaves no process behind.
    """

    def __init__(self, plan: Plan, files: RunFiles, url: str) -> None:
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
