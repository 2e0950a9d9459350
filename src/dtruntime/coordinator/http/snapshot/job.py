"""Snapshots of a job: all sections taken at one moment, without yielding to the event loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec
from msgspec.structs import replace

from ...._version import __version__
from ....types import WorkerState
from ...state import Job, Machine
from ...state.barriers import Round
from ...state.checkpoints.history import RetentionForecasts, users_metadata, written_bytes
from ...state.records import copied
from .. import event_log, views
from ..metrics.job_metrics import NO_METRICS, JobMetrics, duration_of, milliseconds
from ..metrics.sampler import Sampler
from ..read_model import ObservedService, in_slices, totals
from .workers import SeenWorker, WorkersSnapshot, read_workers

CHECKPOINTS_SHOWN = 500
LOGS_SHOWN = 200
LOGS_IN_CHANGE = 2000
JOBS_SHOWN = 1000
ROWS_AT_ONCE = 64
MISSING_SHOWN = 256
LONGEST_WAIT_MS = 24 * 3600 * 1000.0
"""The bound of the last bucket: no barrier may wait longer."""

CheckpointsVersion = tuple[int, int]
"""How often something about checkpoints has changed, and how many durations are known."""


NO_BARRIERS = views.Barriers([], 0, 0, None, None, [])


class JobSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one job at one moment."""

    job: str
    coordinator: views.Coordinator
    jobs: list[views.Job]
    datasets: list[views.Dataset] = []
    checkpoints: list[views.Checkpoint] | None = []
    """None: they have not changed."""
    barriers: views.Barriers = NO_BARRIERS
    metrics: views.Metrics
    tasks: list[views.Task] = []
    actions: list[views.Action] = []
    logs: list[views.LogEntry]
    workers: WorkersSnapshot
    last_event: int
    """The newest entry of the journal."""
    checkpoints_version: CheckpointsVersion = (0, 0)


class SnapshotReader:
    """Takes snapshots of jobs."""

    def __init__(self, service: ObservedService, sampler: Sampler) -> None:
        self.service = service
        self.sampler = sampler
        self.machine = service.machine
        self.grpc_address = ""
        self.http_address = ""
        self.jobs = Jobs(service.machine, sampler)
        self.forecasts = RetentionForecasts()

    def resolve(self, name: str) -> str:
        """The named job, or the last active one; empty: there is none."""
        return self.machine.job(name).name if name else self.jobs.latest()

    def coordinator(self) -> views.Coordinator:
        """The process."""
        service, sampler = self.service, self.sampler
        now, (calls, errors) = service.clock(), totals(service.stats)
        return views.Coordinator(
            version=__version__,
            grpc_address=self.grpc_address,
            http_address=self.http_address,
            transport=service.transport,
            started_at=service.started_at,
            now=now,
            uptime_seconds=max(0.0, now - service.started_at),
            requests_total=calls,
            requests_per_second=sampler.requests_per_second,
            errors_total=errors,
            event_loop_lag_ms=milliseconds(sampler.event_loop_lag),
            memory_bytes=sampler.memory_bytes,
            heartbeat_interval_ms=service.config.heartbeat_interval_ms,
            heartbeat_timeout_ms=service.config.heartbeat_timeout_ms,
        )

    async def figures(self, job: Job) -> JobMetrics:
        """The figures of a job, whose datasets are up to date."""
        figures = await self.sampler.figures(job.name)
        await self.sampler.board(job.name).refresh(job, self.service.clock())
        return figures

    def metrics(self, job: Job | None, figures: JobMetrics | None) -> views.Metrics:
        """The current figures of a job, or of none."""
        requests = self.sampler.requests_per_second
        if job is None or figures is None:
            return replace(NO_METRICS, requests_per_second=requests)
        assignment = self.sampler.board(job.name).assignment_seconds
        return figures.current(job, self.service.clock(), requests, assignment)

    async def take(
        self, name: str, *, since_event: int = 0, unless: CheckpointsVersion | None = None
    ) -> JobSnapshot:
        """A snapshot of a job, with what is newer in the journal than ``since_event``.

        Checkpoints are left out when their version is still ``unless``.
        """
        job = self.machine.jobs.get(name)
        figures = await self.figures(job) if job is not None else None
        # No await from here on: everything is of one moment.
        now = self.service.clock()
        common: dict[str, Any] = {
            "job": name,
            "coordinator": self.coordinator(),
            "jobs": self.jobs.show()[:JOBS_SHOWN],
            "logs": self._logs(name, since_event),
            "last_event": self.machine.journal.last_id,
            "metrics": self.metrics(job, figures),
        }
        if job is None or figures is None:
            return JobSnapshot(**common, workers=WorkersSnapshot([], 0.0, now))
        durations, datasets = self.sampler.durations.get(name, {}), self.sampler.board(name).rows
        version = job.checkpoints.history.version, len(durations)
        newest = None
        if version != unless:
            newest = checkpoints(job, durations, self.forecasts, CHECKPOINTS_SHOWN)
        return JobSnapshot(
            **common,
            workers=read_workers(job, now),
            datasets=datasets,
            checkpoints=newest,
            barriers=barriers(job, figures, now),
            tasks=tasks(job, figures, datasets),
            actions=[copied(record, views.Action) for record in job.actions.pending.values()],
            checkpoints_version=version,
        )

    def _logs(self, job: str, since: int) -> list[views.LogEntry]:
        events = reversed(self.machine.journal.after(since))
        newest = (event for event in events if event_log.concerns(event, job))
        return [event_log.entry(x) for x in islice(newest, LOGS_IN_CHANGE if since else LOGS_SHOWN)]


class Jobs:
    """The list of jobs."""

    def __init__(self, machine: Machine, sampler: Sampler) -> None:
        self._machine = machine
        self._sampler = sampler
        self._created: dict[str, float] = {}
        """From the journal, for jobs whose records do not have it."""
        events = machine.journal.after(0)
        if len(events) == machine.journal.last_id:
            for event in events:
                self._created.setdefault(event.job, event.at)

    def latest(self) -> str:
        """The job that was active last; empty when there is none."""
        return max(self._machine.jobs, key=self.last_active_at, default="")

    def last_active_at(self, name: str) -> float:
        """When a job last had an event, or was last heard from."""
        job = self._machine.jobs[name]
        noted = self._sampler.last_event_at.get(name, 0.0)
        if not job.roster.live_count:
            return noted
        return max(noted, self._sampler.heard_at.get(name, 0.0))

    def show(self) -> list[views.Job]:
        """All of them, those active last first."""
        rows = [self._show(job) for job in self._machine.jobs.values()]
        return sorted(rows, key=lambda row: (-row.last_active_at, row.job))

    def _show(self, job: Job) -> views.Job:
        roster = job.roster
        return views.Job(
            job=job.name,
            generation=roster.generation,
            world_size=roster.world_size,
            live_workers=roster.live_count,
            dead_workers=job.roster.dead_count,
            epoch=roster.epoch,
            created_at=roster.created_at or self._created.get(job.name),
            last_active_at=self.last_active_at(job.name),
        )


def checkpoints(
    job: Job,
    durations: Mapping[str, float],
    forecasts: RetentionForecasts,
    count: int,
    skip: int = 0,
) -> list[views.Checkpoint]:
    """The newest checkpoints, newest first."""
    forecast = forecasts.of(job)
    return [
        copied(
            record,
            views.Checkpoint,
            duration_seconds=duration_of(record, durations),
            written_bytes=written_bytes(record),
            verified_at=record.verified_at if record.verified is not None else None,
            will_be_dropped=forecast.will_be_dropped(record),
            metadata=users_metadata(record.metadata),
        )
        for record in islice(job.checkpoints.history.newest(), skip, skip + count)
    ]


def barriers(job: Job, figures: JobMetrics, now: float) -> views.Barriers:
    """Open rounds, and how long completed ones took."""
    latency = job.barriers.latency
    recent = figures.barriers(job, now)
    bounds = [*(bound * 1000 for bound in latency.bounds), LONGEST_WAIT_MS]
    return views.Barriers(
        open=[_open_barrier(job, round_, now) for round_ in job.barriers.open.values()],
        completed_total=job.barriers.completed_total,
        measured=recent.values,
        p50_ms=milliseconds(recent.p50),
        p99_ms=milliseconds(recent.p99),
        histogram=[
            views.Bucket(round(bound, 6), count)
            for bound, count in zip(bounds, latency.counts, strict=True)
        ],
    )


def _open_barrier(job: Job, round_: Round, now: float) -> views.OpenBarrier:
    missing = job.barriers.missing(round_, MISSING_SHOWN)
    return views.OpenBarrier(
        barrier_id=round_.barrier_id,
        round=round_.number,
        arrived=len(round_.arrived),
        expected=len(round_.expected),
        open_seconds=max(0.0, now - round_.opened_at),
        missing=[views.MissingWorker(m.worker_id, m.last_step) for m in missing],
    )


EPOCHS, STEPS = "epochs", "steps"
"""Metrics in which workers report how many epochs or steps there will be."""


def tasks(job: Job, figures: JobMetrics, datasets: list[views.Dataset]) -> list[views.Task]:
    """The run of a job, if it has ever had members."""
    figures.take_last_reports(job)
    started_at = figures.started_at
    if started_at is None:
        registered = (m.record.registered_at for m in job.roster.slots.held())
        started_at = min(registered, default=None)
    if started_at is None:
        return []
    lengths = (EPOCHS, STEPS)
    reported = {name: value for name, value in figures.reported.items() if name not in lengths}
    epochs, total_steps = (_length(figures.reported.get(name)) for name in lengths)
    state = _state(job, figures)
    samples, total = _samples(datasets, job.roster.epoch, epochs)
    step = _step(job, figures, state)
    metrics = figures.metrics if job.roster.live_count else None
    steps_rate = metrics.steps_per_second if metrics else None
    # Steps are known at any time, samples when an epoch ends.
    way = _Way(step, total_steps, steps_rate)
    if not way.is_known:
        way = _Way(samples, total, metrics.samples_per_second if metrics else None)
    return [
        views.Task(
            task_id=job.name,
            job=job.name,
            state=state,
            epoch=job.roster.epoch,
            epochs=epochs,
            completed_epochs=job.completed_epochs,
            step=step,
            total_steps=total_steps,
            samples=samples,
            total_samples=total,
            progress=1.0 if state == "finished" else way.progress,
            eta_seconds=way.seconds_left if state == "running" else None,
            started_at=started_at,
            steps_per_second=steps_rate,
            metrics=reported,
        )
    ]


def _step(job: Job, figures: JobMetrics, state: views.TaskState) -> int | None:
    """The highest reported step; of a finished run, the saved one."""
    latest = job.checkpoints.latest
    if latest is not None and (figures.step is None or state == "finished"):
        return latest.step
    return figures.step


@dataclass(frozen=True, slots=True)
class _Way:
    """Progress: how far, of how much, and how fast."""

    done: int | None
    whole: int | None
    rate: float | None

    @property
    def is_known(self) -> bool:
        return self.done is not None and bool(self.whole)

    @property
    def progress(self) -> float | None:
        return min(1.0, self.done / self.whole) if self.done is not None and self.whole else None

    @property
    def seconds_left(self) -> float | None:
        if not self.done or not self.whole or not self.rate:
            return None
        return max(0, self.whole - self.done) / self.rate


def _length(reported: float | None) -> int | None:
    return round(reported) if reported is not None and reported >= 1 else None


def _samples(
    datasets: list[views.Dataset], epoch: int, epochs: int | None
) -> tuple[int | None, int | None]:
    """How many samples were consumed, of how many: in all epochs, or in the current one.

    None if nobody reports it, or if a past epoch is unknown.
    """
    epochs_known = {c.epoch for dataset in datasets for c in dataset.coverage}
    epochs_needed = {epoch} if epochs is None else set(range(min(epoch + 1, epochs)))
    if not epochs_needed or epochs_needed - epochs_known:
        return None, None
    coverages = [c for dataset in datasets for c in dataset.coverage if c.epoch in epochs_needed]
    done = sum(c.covered + c.assumed + c.dropped for c in coverages)
    whole = sum(c.covered + c.assumed + c.dropped + c.missing for c in coverages)
    if epochs is None or len(epochs_needed) == epochs:
        return done, whole
    newest = max(epochs_needed)
    last = [c for c in coverages if c.epoch == newest]
    each = sum(c.covered + c.assumed + c.dropped + c.missing for c in last)
    return done, whole + each * (epochs - len(epochs_needed))


def _state(job: Job, figures: JobMetrics) -> views.TaskState:
    roster, states = job.roster, figures.states
    if not roster.live_count:
        return "finished" if job.has_finished else "stopped"
    waits_for_steps = figures.recoveries.open and figures.step is not None
    if states[WorkerState.RECOVERING] or waits_for_steps:
        return "recovering"
    if any(states[s] for s in (WorkerState.TRAINING, WorkerState.CHECKPOINTING)):
        return "running"
    if states[WorkerState.FINISHED] == roster.live_count:
        return "finished"
    if states[WorkerState.LOADING]:
        return "running"
    if states[WorkerState.WAITING] or roster.world_size > roster.live_count:
        return "waiting"
    return "idle"


async def encode(
    rest: dict[str, Any], name: str, workers: WorkersSnapshot, members: list[SeenWorker]
) -> bytes:
    """A JSON object of ``rest`` and of workers under ``name``, encoded in slices."""
    parts = [msgspec.json.encode(rest)[:-1], b"," if rest else b"", b'"%s":[' % name.encode()]
    async for some in in_slices(members, ROWS_AT_ONCE):
        parts += (msgspec.json.encode(workers.show(some))[1:-1], b",")
    if members:
        parts.pop()
    parts.append(b"]}")
    return b"".join(parts)
