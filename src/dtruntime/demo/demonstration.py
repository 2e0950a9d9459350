"""A whole demonstration: data, a coordinator, a run that is disturbed, the same undisturbed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Self

from ..dashboard import static_folder
from ..display import count, size
from .digits import write_shards
from .launcher import DemoCoordinator
from .progress import LogLine
from .proof import Check, judge
from .scenario import RunFiles, Scenario
from .timeline import Listener
from .trial import Kill, Ran, Trial

_TITLES = {
    Kill.WORKER: "run 1 of 2, in which a worker is killed",
    Kill.COORDINATOR: "run 1 of 2, in which the coordinator is killed",
    Kill.NONE: "run 1 of 2",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a demonstration has shown."""

    plan: Scenario
    disturbed: Ran
    undisturbed: Ran
    checks: tuple[Check, ...]
    seconds: float
    """From the first file written to the last check."""

    @property
    def passed(self) -> bool:
        """Whether every claim holds."""
        return all(check.passed for check in self.checks)


class Demonstration:
    """One demonstration, from an empty folder to a verdict.

    `run` raises `DemoFailed` when a process fails. The coordinator serves its dashboard until the
    ``with`` block ends. However that happens, also by an interrupt, no process stays behind.
    """

    def __init__(self, plan: Scenario, kill: Kill, audience: Listener) -> None:
        self._plan = plan
        self._kill = kill
        self._audience = audience
        self._began = time.time()
        self._coordinator = DemoCoordinator(plan)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._coordinator.stop()

    @property
    def dashboard(self) -> str | None:
        """Where the dashboard is; None when it is not built."""
        return self._coordinator.http_url if (static_folder() / "index.html").exists() else None

    def run(self) -> Outcome:
        """Do everything."""
        plan, coordinator = self._plan, self._coordinator
        plan.prepare()
        self._write_dataset()
        coordinator.start()
        self._say("coordinator", f"serves at {coordinator.url}, process {coordinator.pid}")
        no_dashboard = f"not built: make dashboard does it; its data is at {coordinator.http_url}"
        self._say("dashboard", self.dashboard or f"{no_dashboard}/api/dashboard")
        disturbed = self._trial(plan.disturbed, _TITLES[self._kill], self._kill)
        workers = count(plan.workers, "worker")
        self._say("again", f"the same run by {workers}, undisturbed, to compare with")
        undisturbed = self._trial(plan.undisturbed, "run 2 of 2, undisturbed", Kill.NONE)
        self._say("checking", "samples, checkpoints and weights of both runs")
        checks = judge(plan, self._kill, disturbed, undisturbed)
        return Outcome(plan, disturbed, undisturbed, checks, self._elapsed)

    def _trial(self, files: RunFiles, title: str, kill: Kill) -> Ran:
        trial = Trial(
            self._plan,
            files,
            title,
            kill=kill,
            coordinator=self._coordinator,
            audience=self._audience,
            began=self._began,
        )
        return trial.run()

    def _write_dataset(self) -> None:
        plan = self._plan
        total = write_shards(plan.data_folder, plan.total_samples, plan.shard_size, plan.seed)
        files = count(plan.shard_count, "parquet file")
        self._say("data", f"{plan.total_samples:,} noisy digits in {files}, {size(total)}")

    def _say(self, topic: str, text: str) -> None:
        self._audience.happened(LogLine(self._elapsed, topic, text))

    @property
    def _elapsed(self) -> float:
        return time.time() - self._began
