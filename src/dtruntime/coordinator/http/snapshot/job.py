"""A job as it is at one moment, all parts of it taken without letting go of the event loop."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from ...state import Job
from ...state.checkpoints.history import RetentionForecasts
from ...state.records import copied
from .. import event_log, views
from ..metrics.job_metrics import JobMetrics
from ..metrics.sampler import Sampler
from ..read_model import ObservedService, in_slices
from . import sections
from .workers import SeenWorker, WorkersSnapshot, read_workers

CHECKPOINTS_SHOWN = 500
LOGS_SHOWN = 200
LOGS_IN_CHANGE = 2000
JOBS_SHOWN = 1000
ROWS_AT_ONCE = 64


CheckpointsAt = tuple[int, int]
"""How often something about checkpoints has changed, and how many durations are known."""


class JobSnapshot(NamedTuple):
    """What was seen."""

    job: str
    crew: WorkersSnapshot
    coordinator: views.Coordinator
    jobs: list[views.Job]
    datasets: list[views.Dataset]
    checkpoints: list[views.Checkpoint] | None
    """None: they are as they were."""
    barriers: views.Barriers
    metrics: views.Metrics
    tasks: list[views.Task]
    actions: list[views.Action]
    logs: list[views.LogEntry]
    event: int
    """The newest entry of the journal."""
    checkpoints_at: CheckpointsAt


class SnapshotReader:
    """Takes looks; knows where everything is."""

    def __init__(self, service: ObservedService, sampler: Sampler) -> None:
        self.service = service
        self.sampler = sampler
        self.machine = service.machine
        self.grpc_address = ""
        self.http_address = ""
        self.jobs = sections.Jobs(service.machine, sampler)
        self.fates = RetentionForecasts()

    def resolve(self, name: str) -> str:
        """The job that is meant: the one named, or the one active last; empty: there is none."""
        return self.machine.job(name).name if name else self.jobs.latest()

    def coordinator(self) -> views.Coordinator:
        """The process."""
        return sections.coordinator(
            self.service, self.sampler, self.grpc_address, self.http_address
        )

    async def figures(self, job: Job) -> JobMetrics:
        """The figures of a job, whose datasets are up to date."""
        figures = await self.sampler.figures(job.name)
        await self.sampler.board(job.name).refresh(job, self.service.clock())
        return figures

    def metrics(self, job: Job, figures: JobMetrics) -> views.Metrics:
        """The current figures of a job."""
        dead, now = self.jobs.dead(job), self.service.clock()
        return sections.metrics(job, figures, dead, self.sampler, now)

    def no_metrics(self) -> views.Metrics:
        """The figures where there is no job."""
        requests = self.sampler.requests_per_second
        return msgspec.structs.replace(sections.NO_METRICS, requests_per_second=requests)

    async def look(
        self, name: str, *, since_event: int = 0, checkpoints_at: CheckpointsAt | None = None
    ) -> JobSnapshot:
        """See a job, of the journal what is newer, and the checkpoints if they have changed."""
        job = self.machine.jobs.get(name)
        if job is None:
            return self._empty(name, since_event)
        figures = await self.figures(job)
        # From here on nothing is waited for: everything is of one moment.
        now, durations = self.service.clock(), self.sampler.durations.get(name, {})
        datasets = self.sampler.board(name).rows
        newest_at = job.checkpoints.history.version, len(durations)
        newest = None
        if newest_at != checkpoints_at:
            newest = sections.checkpoints(job, durations, self.fates, CHECKPOINTS_SHOWN)
        return JobSnapshot(
            job=name,
            crew=read_workers(job, now),
            coordinator=self.coordinator(),
            jobs=self.jobs.show()[:JOBS_SHOWN],
            datasets=datasets,
            checkpoints=newest,
            barriers=sections.barriers(job, figures, now),
            metrics=self.metrics(job, figures),
            tasks=sections.tasks(job, figures, datasets),
            actions=[copied(record, views.Action) for record in job.actions.pending.values()],
            logs=self._logs(name, since_event),
            event=self.machine.journal.last_id,
            checkpoints_at=newest_at,
        )

    def _empty(self, name: str, since_event: int) -> JobSnapshot:
        return JobSnapshot(
            job=name,
            crew=WorkersSnapshot([], 0.0, self.service.clock()),
            coordinator=self.coordinator(),
            jobs=self.jobs.show()[:JOBS_SHOWN],
            datasets=[],
            checkpoints=[],
            barriers=sections.NO_BARRIERS,
            metrics=self.no_metrics(),
            tasks=[],
            actions=[],
            logs=self._logs(name, since_event),
            event=self.machine.journal.last_id,
            checkpoints_at=(0, 0),
        )

    def _logs(self, job: str, since: int) -> list[views.LogEntry]:
        events = self.machine.journal.after(since)
        found = [event for event in reversed(events) if event_log.concerns(event, job)]
        return [
            event_log.entry(event) for event in found[: LOGS_IN_CHANGE if since else LOGS_SHOWN]
        ]


async def encode(
    rest: dict[str, Any], name: str, crew: WorkersSnapshot, members: list[SeenWorker]
) -> bytes:
    """A JSON object of ``rest`` and of workers under ``name``, written part by part."""
    parts = [msgspec.json.encode(rest)[:-1], b"," if rest else b"", b'"%s":[' % name.encode()]
    async for some in in_slices(members, ROWS_AT_ONCE):
        parts += (msgspec.json.encode(crew.show(some))[1:-1], b",")
    if members:
        parts.pop()
    parts.append(b"]}")
    return b"".join(parts)
