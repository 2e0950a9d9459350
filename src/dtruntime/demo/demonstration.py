"""A whole demonstration: data, a coordinator, a run with a kill, and the same run without.

Its processes are kept going as torchrun, Slurm or Kubernetes would. None stays behind when this
process ends, however it does: it holds the other end of their standard input and never writes, so
that the input ends with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from ..client import DatasetRegistry, Observer
from ..dashboard import static_folder
from ..display import count, duration, size
from ..errors import ConnectionError, StrataError
from ..testing import LocalCoordinator
from ..types import JobStatus, Membership, WorkerStatus
from .digits import write_shards
from .proof import Kill, Outcome, RunResult, judge
from .scenario import DATASET, RunFiles, Scenario
from .terminal_view import TerminalView
from .timeline import NoteReader, RunSnapshot, Timeline

POLL_SECONDS = 0.1
PATIENCE = 0.2
REPLACEMENTS_MOST = 20
HEARTBEAT_MS = 200
SILENCE_MS = 2000
"""How long a worker may be silent before the coordinator declares it dead."""
TAIL_LINES = 12
_ONE_THREAD = dict.fromkeys(("MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
"""Workers share the machine, and one thread adds up in the same order every time."""


class DemoFailed(StrataError):
    """The demonstration could not go on; ``tail`` is the end of the log that says why."""

    def __init__(self, message: str, log_path: Path) -> None:
        super().__init__(message)
        self.tail: list[str] = []
        with contextlib.suppress(OSError):
            text = log_path.read_text(encoding="utf-8", errors="replace")
            self.tail = text.splitlines()[-TAIL_LINES:]


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
        victim = {Kill.WORKER: "a worker", Kill.COORDINATOR: "the coordinator"}.get(self._kill)
        title = f"run 1 of 2, in which {victim} is killed" if victim else "run 1 of 2"
        disturbed = self._watch(plan.disturbed, title, self._kill)
        workers = count(plan.workers, "worker")
        say("again", f"the same run by {workers}, undisturbed, to compare with")
        undisturbed = self._watch(plan.undisturbed, "run 2 of 2, undisturbed", Kill.NONE)
        say("checking", "samples, checkpoints and weights of both runs")
        checks = judge(plan, self._kill, disturbed, undisturbed)
        return Outcome(disturbed, undisturbed, checks, self._view.elapsed)

    def _watch(self, files: RunFiles, title: str, kill: Kill) -> RunResult:
        return _WatchedRun(self._plan, files, title, kill, self._coordinator, self._view).run()


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


class DemoWorker(subprocess.Popen[bytes]):
    """One worker process; without a rank it takes a free one."""

    def __init__(
        self, plan: Scenario, files: RunFiles, url: str, number: int, rank: int | None
    ) -> None:
        self.name = f"worker-{number}"
        self.log_path = files.logs / f"{self.name}.log"
        self.is_reported = False
        """Whether its end was reported."""
        environment = {
            **os.environ,
            **_ONE_THREAD,
            **({} if rank is None else {"RANK": str(rank)}),
            "COORDINATOR_URL": url,
            "STRATA_CACHE_DIR": str(Path(plan.root, "cache")),
            "STRATA_JOB": files.job,
            "WORKER_ID": self.name,
            "WORLD_SIZE": str(plan.workers),
        }
        with self.log_path.open("wb") as log:
            super().__init__(
                [sys.executable, "-m", "dtruntime.demo.worker", str(plan.path), files.root.name],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=environment,
            )

    def end(self) -> None:
        """End it with SIGKILL."""
        self.kill()
        self.wait()
        if self.stdin is not None:
            self.stdin.close()


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
        self._timeline = Timeline(plan.workers, view.say)
        self._notes = NoteReader(files.notes)
        self._workers: list[DemoWorker] = []
        self._to_replace: list[DemoWorker] = []
        self._job: JobStatus | None = None
        self._last_event = 0

    def run(self) -> RunResult:
        """Start the workers, and watch until all have ended; raises `DemoFailed`."""
        url, tally = self._coordinator.url, self._timeline.tally
        try:
            for rank in range(self._plan.workers):
                self._start(rank)
            pids = " ".join(str(worker.pid) for worker in self._workers)
            self._view.say("started", f"{count(len(self._workers), 'worker')}, processes {pids}")
            with Observer(url, patience=PATIENCE) as observer:
                while self._to_replace or any(w.poll() is None for w in self._workers):
                    self._poll(observer)
                    time.sleep(POLL_SECONDS)
                self._poll(observer)
        finally:
            for worker in self._workers:
                worker.end()
        with DatasetRegistry(url, job=self._files.job) as registry:
            coverage = registry.coverage(DATASET)
        seconds = tally.last_at - tally.first_at
        self._view.say("finished", f"after step {tally.step:,}; {duration(seconds)} of training")
        return RunResult(tuple(self._timeline.incidents), tuple(coverage), seconds)

    def _start(self, rank: int | None) -> DemoWorker:
        url, number = self._coordinator.url, len(self._workers)
        worker = DemoWorker(self._plan, self._files, url, number, rank)
        self._workers.append(worker)
        return worker

    def _poll(self, observer: Observer) -> None:
        """Read what has happened, restart what was killed, and kill what is to be killed."""
        timeline, coordinator = self._timeline, self._coordinator
        if coordinator.has_ended():
            outage = timeline.down(coordinator.last_pid)
            self._view.show(self._snapshot(is_alone=True))
            coordinator.start()
            timeline.restarted(outage, coordinator.pid)
        self._collect_killed()
        timeline.noted(self._notes.news())
        try:
            self._read_job(observer)
        except ConnectionError:
            return
        live = {w.worker_id for w in self._members if w.membership is Membership.LIVE}
        for worker in [worker for worker in self._to_replace if worker.name not in live]:
            self._to_replace.remove(worker)
            replacement = self._start(None)
            timeline.replaced(worker.name, replacement.name, replacement.pid)
        self._view.show(self._snapshot())
        if timeline.tally.step >= self._plan.kill_step and not timeline.incidents:
            self._disturb()

    def _collect_killed(self) -> None:
        """Report workers that were killed; raises `DemoFailed` when one failed."""
        for worker in self._workers:
            if not worker.poll() or worker.is_reported:
                continue
            code = worker.returncode
            if code > 0 or len(self._workers) > self._plan.workers + REPLACEMENTS_MOST:
                how = f"ended with exit code {code}" if code > 0 else f"was killed ({code})"
                raise DemoFailed(f"{worker.name} (process {worker.pid}) {how}", worker.log_path)
            worker.is_reported = True
            self._to_replace.append(worker)
            ranks = {member.worker_id: member.rank for member in self._members}
            self._timeline.killed(worker.name, worker.pid, ranks.get(worker.name))

    @property
    def _members(self) -> Sequence[WorkerStatus]:
        return self._job.workers if self._job else ()

    def _read_job(self, observer: Observer) -> None:
        """Read the job's state, and what its journal has gained."""
        job = self._files.job
        if job not in observer.jobs():
            return
        # Events first, so that the status knows of all of them.
        events = observer.events(job, self._last_event)
        self._job = observer.status(job)
        for event in events:
            self._timeline.journal(event.at, event.kind, event.fields)
            self._last_event = event.id

    def _disturb(self) -> None:
        if self._kill is Kill.COORDINATOR:
            self._timeline.down(self._coordinator.pid)
            self._coordinator.send_signal(signal.SIGKILL)
        elif self._kill is Kill.WORKER:
            victim = self._snapshot().worker(self._plan.workers // 2)
            for worker in self._workers:
                if victim is not None and worker.name == victim.worker_id:
                    self._timeline.killed(worker.name, worker.pid, victim.rank)
                    worker.end()
                    self._view.show(self._snapshot())

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
