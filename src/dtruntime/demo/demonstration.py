"""A whole demonstration: data, a coordinator, a run that is disturbed, the same undisturbed."""

from __future__ import annotations

import signal
import time
from typing import Any, Self

from ..client import DatasetRegistry, Observer
from ..dashboard import static_folder
from ..display import count, duration, size
from ..errors import ConnectionError
from ..types import JobStatus, Membership
from .digits import write_shards
from .launcher import DemoCoordinator, DemoWorker, Launcher
from .progress import NoteReader, RunSnapshot
from .proof import Kill, Outcome, RunResult, judge
from .scenario import DATASET, RunFiles, Scenario
from .terminal_view import TerminalView
from .timeline import Timeline

POLL_SECONDS = 0.1
PATIENCE = 0.2
_TITLES = {
    Kill.WORKER: "run 1 of 2, in which a worker is killed",
    Kill.COORDINATOR: "run 1 of 2, in which the coordinator is killed",
    Kill.NONE: "run 1 of 2",
}


class Demonstration:
    """One demonstration, from an empty folder to a verdict.

    `run` raises `DemoFailed` when a process fails. The coordinator serves its dashboard until the
    ``with`` block ends. However that happens, also by an interrupt, no process stays behind.
    """

    def __init__(self, plan: Scenario, kill: Kill, view: TerminalView) -> None:
        self._plan, self._kill, self._view = plan, kill, view
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
        plan, coordinator, say = self._plan, self._coordinator, self._view.say
        plan.prepare()
        total = write_shards(plan.data_folder, plan.total_samples, plan.shard_size, plan.seed)
        files = count(plan.shard_count, "parquet file")
        say("data", f"{plan.total_samples:,} noisy digits in {files}, {size(total)}")
        coordinator.start()
        say("coordinator", f"serves at {coordinator.url}, process {coordinator.pid}")
        no_dashboard = f"not built: make dashboard does it; its data is at {coordinator.http_url}"
        say("dashboard", self.dashboard or f"{no_dashboard}/api/dashboard")
        disturbed = self._watch(plan.disturbed, _TITLES[self._kill], self._kill)
        workers = count(plan.workers, "worker")
        say("again", f"the same run by {workers}, undisturbed, to compare with")
        undisturbed = self._watch(plan.undisturbed, "run 2 of 2, undisturbed", Kill.NONE)
        say("checking", "samples, checkpoints and weights of both runs")
        checks = judge(plan, self._kill, disturbed, undisturbed)
        return Outcome(disturbed, undisturbed, checks, self._view.elapsed)

    def _watch(self, files: RunFiles, title: str, kill: Kill) -> RunResult:
        return _WatchedRun(self._plan, files, title, kill, self._coordinator, self._view).run()


class _WatchedRun:
    """One run, watched from its first process to its last, and disturbed if asked to."""

    def __init__(
        self,
        plan: Scenario,
        files: RunFiles,
        title: str,
        kill: Kill,
        coordinator: DemoCoordinator,
        view: TerminalView,
    ) -> None:
        self._plan, self._files, self._title, self._kill = plan, files, title, kill
        self._coordinator, self._view = coordinator, view
        self._timeline = Timeline(plan.workers, view)
        self._notes = NoteReader(files.notes)
        self._job: JobStatus | None = None
        self._last_event = 0

    def run(self) -> RunResult:
        """Start the workers, and watch until all have ended; raises `DemoFailed`."""
        url, timeline = self._coordinator.url, self._timeline
        with (
            Observer(url, patience=PATIENCE) as observer,
            Launcher(self._plan, self._files, url) as launcher,
        ):
            pids = " ".join(str(worker.pid) for worker in launcher.workers)
            workers = count(self._plan.workers, "worker")
            self._view.say("started", f"{workers}, processes {pids}")
            while launcher.has_work:
                self._poll(launcher, observer)
                time.sleep(POLL_SECONDS)
            self._poll(launcher, observer)
        with DatasetRegistry(url, job=self._files.job) as registry:
            coverage = registry.coverage(DATASET)
        tally = timeline.tally
        seconds = tally.last_at - tally.first_at
        self._view.say("finished", f"after step {tally.step:,}; {duration(seconds)} of training")
        return RunResult(tuple(timeline.incidents), tuple(coverage), seconds)

    def _poll(self, launcher: Launcher, observer: Observer) -> None:
        """Read what has happened, restart what was killed, and kill what is to be killed."""
        timeline = self._timeline
        if self._coordinator.has_ended():
            self._restart_coordinator()
        for worker in launcher.collect():
            timeline.killed(worker, self._rank_of(worker), time.time())
        timeline.noted(self._notes.news())
        try:
            events = self._read_job(observer)
        except ConnectionError:
            return
        for event in events:
            timeline.journal(event.at, event.kind, event.fields)
        members = self._job.workers if self._job else ()
        live = {w.worker_id for w in members if w.membership is Membership.LIVE}
        for lost, replacement in launcher.replace(live):
            timeline.replaced(lost, replacement)
        self._view.show(self._snapshot())
        if timeline.tally.step >= self._plan.kill_step and not timeline.incidents:
            self._disturb(launcher)

    def _read_job(self, observer: Observer) -> list[Any]:
        """Read the job's state; returns what its journal has gained."""
        if self._files.job not in observer.jobs():
            return []
        # Events first: what one tells of is then known to the status, too.
        events = observer.events(self._files.job, self._last_event)
        self._job = observer.status(self._files.job)
        if events:
            self._last_event = events[-1].id
        return events

    def _disturb(self, launcher: Launcher) -> None:
        if self._kill is Kill.COORDINATOR:
            self._timeline.down(self._coordinator.pid, time.time())
            self._coordinator.send_signal(signal.SIGKILL)
        elif self._kill is Kill.WORKER:
            status = self._snapshot().worker(self._plan.workers // 2)
            for worker in launcher.workers:
                if status is not None and worker.name == status.worker_id:
                    self._timeline.killed(worker, status.rank, time.time())
                    worker.kill()
                    self._view.show(self._snapshot())

    def _restart_coordinator(self) -> None:
        outage = self._timeline.down(self._coordinator.last_pid, time.time())
        self._view.show(self._snapshot(is_alone=True))
        self._coordinator.start()
        self._timeline.restarted(outage, self._coordinator.pid)

    def _rank_of(self, worker: DemoWorker) -> int | None:
        members = self._job.workers if self._job else ()
        return next((w.rank for w in members if w.worker_id == worker.name), None)

    def _snapshot(self, *, is_alone: bool = False) -> RunSnapshot:
        losses = [loss for loss in self._timeline.losses if not loss.is_over]
        return RunSnapshot(
            self._plan,
            self._title,
            self._view.elapsed,
            self._job,
            self._timeline.tally,
            frozenset(loss.worker for loss in losses if not loss.detected_at),
            frozenset(loss.rank for loss in losses if loss.started_at),
            is_held=bool(losses),
            is_alone=is_alone,
        )
