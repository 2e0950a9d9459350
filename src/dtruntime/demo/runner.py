"""Starts a demonstration's processes, watches them, and judges what they have done."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..client import DatasetRegistry, Observer
from ..display import count, size
from ..errors import ConnectionError
from ..testing import LocalCoordinator
from .dataset import write_shards
from .plan import DATASET, JOB, Plan
from .processes import Crew, DemoFailed, DemoWorker, describe_exit
from .progress import Happening, Progress, Watch
from .verdict import Verdict, judge

LOOK_SECONDS = 0.15
HEARTBEAT_MS = 250
SILENCE_MS = 10_000


class Audience(Protocol):
    """Who is shown a demonstration: a terminal, a log, a test."""

    def opened(self, plan: Plan, url: str) -> None:
        """The coordinator serves."""

    def happened(self, happening: Happening) -> None:
        """Something happened."""

    def advanced(self, elapsed: float, progress: Progress) -> None:
        """The run was looked at again."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished run."""

    plan: Plan
    verdict: Verdict
    progress: Progress
    """At the end."""
    seconds: float
    """From the first file written to the last check."""


class Demonstration:
    """One run, from an empty folder to a verdict.

    `run` raises `DemoFailed` when a process fails. However it ends, also by an interrupt, no
    process stays behind.
    """

    def __init__(self, plan: Plan, audience: Audience) -> None:
        self._plan = plan
        self._audience = audience
        self._began = time.time()
        self._progress = Progress()

    def run(self) -> Outcome:
        """Do everything."""
        plan = self._plan
        plan_path = plan.prepare()
        self._write_dataset()
        with LocalCoordinator(
            plan.coordinator_folder,
            heartbeat_interval_ms=HEARTBEAT_MS,
            heartbeat_timeout_ms=SILENCE_MS,
        ) as coordinator:
            try:
                self._train(coordinator, plan_path)
                proofs = DatasetRegistry(coordinator.url, job=JOB).coverage(DATASET)
            finally:
                # Leaving the block would kill it, and it could not tidy up after itself.
                coordinator.stop()
        last = self._progress
        verdict = judge(plan, last.checkpoint_count, last.latest_checkpoint, proofs)
        return Outcome(plan, verdict, last, self._elapsed)

    def _train(self, coordinator: LocalCoordinator, plan_path: Path) -> None:
        """Start the workers and watch them until they have ended."""
        plan, url, pid = self._plan, coordinator.url, coordinator.pid
        self._say("coordinator", f"serves at {url}, process {pid}")
        self._audience.opened(plan, url)
        with Observer(url) as observer, Crew(plan, plan_path, url, pid) as crew:
            processes = " ".join(str(worker.pid) for worker in crew.workers)
            self._say("started", f"{count(plan.workers, 'worker')}, processes {processes}")
            try:
                self._watch(crew, Watch(observer, self._began))
            except ConnectionError as exc:
                raise DemoFailed(
                    f"the coordinator (process {pid}) does not answer any more\n"
                    "  the demo has stopped",
                    coordinator.log_path,
                ) from exc

    def _write_dataset(self) -> None:
        plan = self._plan
        total = write_shards(plan.data_folder, plan.total_samples, plan.shard_size, plan.seed)
        files = count(plan.shard_count, "parquet file")
        self._say("data", f"{plan.total_samples:,} noisy digits in {files}, {size(total)}")

    def _watch(self, crew: Crew, watch: Watch) -> None:
        """Look until all workers have ended; raises when one fails."""
        running = True
        while running:
            # Asked before looking, so that the last look sees the last worker's last words.
            running = crew.running
            failed = crew.failed()
            if failed is not None:
                raise self._failure(failed)
            self._progress, happenings = watch.look()
            for happening in happenings:
                self._audience.happened(happening)
            self._audience.advanced(self._elapsed, self._progress)
            if running:
                time.sleep(LOOK_SECONDS)

    def _failure(self, worker: DemoWorker) -> DemoFailed:
        seen = self._progress.worker(worker.rank)
        where = (
            f"in epoch {seen.epoch + 1} at step {seen.step or 0:,}" if seen else "while starting"
        )
        return DemoFailed(
            f"{worker.name} (process {worker.pid}) {describe_exit(worker.exit_code or 0)} {where}\n"
            "  the demo needs all its workers and has stopped",
            worker.log_path,
        )

    def _say(self, topic: str, text: str) -> None:
        self._audience.happened(Happening(self._elapsed, topic, text))

    @property
    def _elapsed(self) -> float:
        return time.time() - self._began
