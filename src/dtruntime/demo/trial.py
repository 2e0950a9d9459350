"""One run of all workers, watched from its first process to its last, and disturbed if asked to."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import StrEnum

from ..client import DatasetRegistry, Observer
from ..display import count, duration
from ..errors import ConnectionError
from ..types import EpochCoverage
from .launcher import DemoCoordinator, DemoWorker, Launcher
from .progress import Follower, JobWatch, Members, RunSnapshot
from .scenario import DATASET, RunFiles, Scenario
from .timeline import Incident, Listener, Timeline

LOOK_SECONDS = 0.1
PATIENCE = 0.2


class Kill(StrEnum):
    """Who is killed in the middle."""

    WORKER = "worker"
    COORDINATOR = "coordinator"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Ran:
    """A run whose workers have all ended well."""

    incidents: tuple[Incident, ...]
    coverage: tuple[EpochCoverage, ...]
    """What the coordinator can prove."""
    training_seconds: float
    """From the first step to the last."""


class Trial:
    """Runs it. However it ends, also by an interrupt, no worker stays behind."""

    def __init__(
        self,
        plan: Scenario,
        files: RunFiles,
        title: str,
        *,
        kill: Kill,
        coordinator: DemoCoordinator,
        audience: Listener,
        began: float,
    ) -> None:
        """``began`` is the time, in seconds since 1970, that is shown as 0."""
        self._plan, self._files, self._title = plan, files, title
        self._kill = kill
        self._coordinator = coordinator
        self._audience = audience
        self._began = began
        self._chronicle = Timeline(plan.workers, audience, began)
        self._follower = Follower(files.notes)
        self._members = Members()

    def run(self) -> Ran:
        """Start the workers, and look until all have ended; raises `DemoFailed` when one fails."""
        url, story = self._coordinator.url, self._chronicle
        with Observer(url, patience=PATIENCE) as observer:
            watch = JobWatch(observer, self._files.job)
            with Launcher(self._plan, self._files, url) as launcher:
                pids = " ".join(str(worker.pid) for worker in launcher.workers)
                story.say("started", f"{count(self._plan.workers, 'worker')}, processes {pids}")
                while launcher.has_work:
                    self._look(launcher, watch)
                    time.sleep(LOOK_SECONDS)
                self._look(launcher, watch)
        with DatasetRegistry(url, job=self._files.job) as registry:
            coverage = registry.coverage(DATASET)
        seconds = story.tally.last_at - story.tally.first_at
        story.say("finished", f"after step {story.tally.step:,}; {duration(seconds)} of training")
        return Ran(tuple(story.incidents), tuple(coverage), seconds)

    def _look(self, launcher: Launcher, watch: JobWatch) -> None:
        """Learn what has happened, mend what is broken, and break what is to be broken."""
        if self._coordinator.has_ended():
            self._bring_back_coordinator()
        for worker in launcher.collect():
            self._chronicle.killed(worker, self._rank_of(worker), time.time())
        self._chronicle.noted(self._follower.news())
        try:
            self._members, events = watch.look()
        except ConnectionError:
            return
        for event in events:
            self._chronicle.journal(event.at, event.kind, event.fields)
        for lost, replacement in launcher.replace(self._members.live):
            self._chronicle.replaced(lost, replacement)
        self._show()
        self._strike_if_due(launcher)

    def _strike_if_due(self, launcher: Launcher) -> None:
        is_due = self._chronicle.tally.step >= self._plan.kill_step
        if self._kill is Kill.NONE or not is_due or self._chronicle.incidents:
            return
        if self._kill is Kill.COORDINATOR:
            self._chronicle.down(self._coordinator.pid, time.time())
            self._coordinator.kill()
            return
        status = self._members.rank(self._plan.workers // 2)
        worker = None if status is None else launcher.named(status.worker_id)
        if worker is not None:
            self._chronicle.killed(worker, self._rank_of(worker), time.time())
            worker.kill()
            self._show()

    def _bring_back_coordinator(self) -> None:
        outage = self._chronicle.down(self._coordinator.pid, time.time())
        self._show(is_alone=True)
        self._coordinator.start()
        self._chronicle.restarted(outage, self._coordinator.pid)

    def _rank_of(self, worker: DemoWorker) -> int | None:
        known = (w.rank for w in self._members.workers if w.worker_id == worker.name)
        return next(known, None)

    def _show(self, *, is_alone: bool = False) -> None:
        losses = [loss for loss in self._chronicle.losses if not loss.is_over]
        self._audience.advanced(
            RunSnapshot(
                self._plan,
                self._title,
                time.time() - self._began,
                self._members,
                self._chronicle.tally,
                frozenset(loss.worker for loss in losses if not loss.detected_at),
                frozenset(loss.rank for loss in losses if loss.started_at),
                is_held=bool(losses),
                is_alone=is_alone,
            )
        )
