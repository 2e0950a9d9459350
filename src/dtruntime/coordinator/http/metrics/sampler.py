"""The sampler: measures the coordinator and its jobs once a second."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict

import psutil

from ....events import sentence
from ....telemetry import EventLog
from ...state import Event, Job
from ...state.checkpoints.history import CHECKPOINTS_KEPT
from ..read_model import ObservedService, totals
from ..snapshot.datasets import DatasetBoard
from .job_metrics import RATE_SECONDS, JobMetrics
from .time_series import HistoryFiles, Rate

log = EventLog("http")

SAMPLE_SECONDS = 1.0
PROBE_SECONDS = 0.1
STORE_SECONDS = 60.0
LINGER = 60.0
"""The history of a job is still written this long after its last worker left."""
JOBS_KEPT = 64
"""How many jobs' metrics are in memory; those of others are in files."""
BEGINNINGS_KEPT = 20_000
MEMBERSHIP_EVENTS = frozenset({"worker.registered", "worker.dead", "worker.left"})


class Sampler:
    """Metrics of the process and of jobs that are or recently were active."""

    def __init__(self, service: ObservedService, files: HistoryFiles) -> None:
        self._service = service
        self._files = files
        self.requests_per_second: float | None = None
        self.event_loop_lag: float | None = None
        """The longest that a timer was late within the last second, in seconds."""
        self.memory_bytes = 0
        self.last_event_at: dict[str, float] = {}
        """By job, when the newest entry of the journal was made."""
        self.heard_at: dict[str, float] = {}
        """By job, when the newest heartbeat came."""
        self.durations: dict[str, dict[str, float]] = {}
        """By job and checkpoint, how long it took from its beginning to its commit."""
        self.memberships: dict[str, str] = {}
        """By job, the last change of its membership in words."""
        self.samples = 0
        """How often was looked."""
        self._jobs: OrderedDict[str, JobMetrics] = OrderedDict()
        self._boards: OrderedDict[str, DatasetBoard] = OrderedDict()
        self._begun: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._live_at: dict[str, float] = {}
        self._requests = Rate(RATE_SECONDS)
        self._lag = 0.0
        self._process = psutil.Process()
        self._journal_id = 0
        self._stored_at = service.clock()
        self._read_journal(first=True)

    async def run(self) -> None:
        """Look until cancelled."""
        probe = asyncio.create_task(self._probe())
        try:
            while True:
                try:
                    await self.sample()
                except Exception as exc:
                    log.error("sampling.failed", error=repr(exc))
                await asyncio.sleep(SAMPLE_SECONDS)
        finally:
            probe.cancel()

    async def sample(self) -> None:
        """Look once."""
        service, now = self._service, self._service.clock()
        calls, _ = totals(service.stats)
        self._requests.add(now, calls)
        self.requests_per_second = self._requests.value
        self.event_loop_lag, self._lag = self._lag, 0.0
        self.memory_bytes = self._process.memory_info().rss
        self._read_journal()
        for job in list(service.machine.jobs.values()):
            if job.roster.live_count:
                self._live_at[job.name] = now
                await self._sample_job(job, now)
            elif (figures := self._jobs.get(job.name)) is not None:
                figures.rest(now)
        self.samples += 1
        if now - self._stored_at >= STORE_SECONDS:
            self._stored_at = now
            await self.store()

    async def _sample_job(self, job: Job, now: float) -> None:
        figures, board = await self.figures(job.name), self.board(job.name)
        await board.refresh(job, now, self.memberships.get(job.name, ""))
        if board.consumed is not None:
            figures.note_consumed(board.refreshed_at, board.consumed)
        await figures.measure(
            job,
            now,
            self.requests_per_second,
            self.durations.get(job.name, {}),
            board.assignment_seconds,
        )
        self.heard_at[job.name] = figures.heard_at

    async def figures(self, job: str) -> JobMetrics:
        """The metrics of a job, with its history."""
        figures = self._jobs.get(job)
        if figures is None:
            stored = await asyncio.to_thread(self._files.read, job)
            seconds = self._service.config.heartbeat_interval_ms / 1000
            figures = self._jobs.setdefault(job, JobMetrics(job, stored, seconds))
            await self._forget_idle()
        self._jobs.move_to_end(job)
        return figures

    def board(self, job: str) -> DatasetBoard:
        """The datasets of a job, as the dashboard shows them."""
        board = self._boards.get(job)
        if board is None:
            board = self._boards[job] = DatasetBoard()
            while len(self._boards) > JOBS_KEPT:
                self._boards.popitem(last=False)
        self._boards.move_to_end(job)
        return board

    async def store(self) -> None:
        """Write the histories of recently measured jobs."""
        now = self._service.clock()
        for name, figures in list(self._jobs.items()):
            if now - self._live_at.get(name, 0.0) < LINGER + STORE_SECONDS:
                await asyncio.to_thread(self._files.write, figures.to_store())

    async def _forget_idle(self) -> None:
        while len(self._jobs) > JOBS_KEPT:
            _, figures = self._jobs.popitem(last=False)
            if not figures.is_stored:
                await asyncio.to_thread(self._files.write, figures.to_store())

    async def _probe(self) -> None:
        while True:
            due = time.monotonic() + PROBE_SECONDS
            await asyncio.sleep(PROBE_SECONDS)
            self._lag = max(self._lag, time.monotonic() - due)

    def _read_journal(self, first: bool = False) -> None:
        journal = self._service.machine.journal
        newest = journal.last_id
        if newest == self._journal_id:
            return
        for event in journal.after(self._journal_id):
            self._note(event, first)
        self._journal_id = newest

    def _note(self, event: Event, first: bool) -> None:
        self.last_event_at[event.job] = event.at
        if event.kind in MEMBERSHIP_EVENTS:
            self.memberships[event.job] = sentence(event)
        checkpoint = event.fields.get("checkpoint", "")
        if event.kind == "checkpoint.begun":
            self._begun[event.job, checkpoint] = event.at
            if len(self._begun) > BEGINNINGS_KEPT:
                self._begun.popitem(last=False)
        elif event.kind == "checkpoint.committed":
            begun = self._begun.pop((event.job, checkpoint), None)
            if begun is not None:
                durations = self.durations.setdefault(event.job, {})
                durations[checkpoint] = event.at - begun
                if len(durations) > CHECKPOINTS_KEPT:
                    del durations[next(iter(durations))]
        elif event.kind == "worker.dead" and not first:
            figures = self._jobs.get(event.job)
            if figures is not None:
                figures.note_loss(event)
