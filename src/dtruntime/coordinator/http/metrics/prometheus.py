"""Prometheus metrics, read from the service's counters on each scrape.

Their names and meanings are in ``docs/metrics.md``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector, CollectorRegistry

from ...._version import __version__
from ....telemetry import Histogram
from ...state import Job
from ..event_stream import JobStreams
from ..snapshot.job import SnapshotReader
from .job_metrics import JobMetrics, duration_of

JOBS_MOST = 100
"""Only this many jobs, the last active ones, have metrics of their own."""


class Exporter(Collector):
    """All metrics of the coordinator."""

    def __init__(self, snapshots: SnapshotReader, streams: JobStreams) -> None:
        self._snapshots = snapshots
        self._streams = streams
        self.http_requests: dict[tuple[str, str], int] = {}
        """By path as in the table of routes, and status."""
        self._figures: dict[str, JobMetrics] = {}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def count(self, path: str, status: int) -> None:
        """Count an answer."""
        key = path, str(status)
        self.http_requests[key] = self.http_requests.get(key, 0) + 1

    async def expose(self, accept: str) -> tuple[bytes, str]:
        """The text that Prometheus reads, and its type."""
        await self.refresh()
        encode, media_type = choose_encoder(accept)
        return encode(self._registry), media_type

    async def refresh(self) -> None:
        """Fetch the metrics that `collect` reports."""
        recent = [row.job for row in self._snapshots.jobs.show()[:JOBS_MOST]]
        jobs = self._snapshots.machine.jobs
        self._figures = {
            name: await self._snapshots.sampler.figures(name) for name in recent if name in jobs
        }

    def describe(self) -> Iterable[Metric]:
        """Nothing: the metrics differ from scrape to scrape."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Read everything."""
        yield from self._process()
        yield from self._methods()
        jobs = self._snapshots.machine.jobs
        measured = [
            (jobs[name], figures) for name, figures in self._figures.items() if name in jobs
        ]
        yield from self._membership(measured)
        yield from self._progress(measured)
        yield from self._storage(measured)

    def _process(self) -> Iterator[Metric]:
        snapshots, service = self._snapshots, self._snapshots.service
        info = InfoMetricFamily("strata_coordinator", "The coordinator's version and transport.")
        info.add_metric([], {"version": __version__, "transport": service.transport})
        yield info
        yield GaugeMetricFamily(
            "strata_coordinator_start_time_seconds",
            "When the coordinator started, in seconds since 1970.",
            value=service.started_at,
        )
        yield GaugeMetricFamily(
            "strata_coordinator_resident_memory_bytes",
            "Memory that the coordinator's process occupies.",
            value=snapshots.sampler.memory_bytes,
        )
        lag = snapshots.sampler.event_loop_lag
        if lag is not None:
            yield GaugeMetricFamily(
                "strata_coordinator_event_loop_lag_seconds",
                "The longest that a timer was late within the last second.",
                value=lag,
            )
        yield GaugeMetricFamily(
            "strata_http_event_streams", "Open streams of events.", value=self._streams.readers
        )
        requests = CounterMetricFamily(
            "strata_http_requests", "HTTP requests answered.", labels=["path", "status"]
        )
        for (path, status), number in sorted(self.http_requests.items()):
            requests.add_metric([path, status], number)
        yield requests

    def _methods(self) -> Iterator[Metric]:
        errors = CounterMetricFamily(
            "strata_rpc_errors", "gRPC calls that were refused or failed.", labels=["method"]
        )
        durations = HistogramMetricFamily(
            "strata_rpc_duration_seconds",
            "How long gRPC calls took, those that are held with their wait.",
            labels=["method"],
        )
        for name, stats in self._snapshots.service.stats.items():
            errors.add_metric([name], stats.errors)
            durations.add_metric([name], *_buckets(stats.latency))
        yield errors
        yield durations

    def _membership(self, jobs: list[tuple[Job, JobMetrics]]) -> Iterator[Metric]:
        workers = GaugeMetricFamily(
            "strata_workers", "Workers by membership.", labels=["job", "membership"]
        )
        states = GaugeMetricFamily(
            "strata_workers_in_state", "Live workers by what they do.", labels=["job", "state"]
        )
        for job, figures in jobs:
            workers.add_metric([job.name, "live"], job.roster.live_count)
            workers.add_metric([job.name, "dead"], job.roster.dead_count)
            for state, number in sorted(figures.states.items()):
                states.add_metric([job.name, str(state)], number)
        yield workers
        yield states
        yield _per_job(
            CounterMetricFamily,
            "strata_heartbeats",
            "Heartbeats since the coordinator started.",
            ((job.name, job.heartbeats) for job, _ in jobs),
        )
        yield _gauges(
            "strata_job_generation",
            "The number of the membership.",
            ((job.name, job.roster.generation) for job, _ in jobs),
        )
        yield _gauges(
            "strata_job_epoch",
            "The highest epoch that a worker has reached, counted from 0.",
            ((job.name, job.roster.epoch) for job, _ in jobs),
        )

    def _progress(self, jobs: list[tuple[Job, JobMetrics]]) -> Iterator[Metric]:
        measured = [(job.name, self._snapshots.metrics(job, f)) for job, f in jobs]
        for name, what, help_text in (
            ("strata_steps_per_second", "steps_per_second", "Steps per second, the median rank's."),
            ("strata_samples_per_second", "samples_per_second", "Samples consumed per second."),
            ("strata_goodput_ratio", "goodput", "Share of the last 10 minutes spent training."),
            ("strata_stragglers", "stragglers", "Workers markedly slower than the others."),
            (
                "strata_heartbeat_age_max_seconds",
                "heartbeat_age_max_seconds",
                "How long the most silent live worker has not been heard.",
            ),
            (
                "strata_recovery_last_seconds",
                "last_recovery_seconds",
                "How long the newest recovery took, from the last sign of life to training.",
            ),
            (
                "strata_losses_last_hour",
                "losses_last_hour",
                "Workers lost within the last hour, counted up to 64.",
            ),
        ):
            values = ((job, getattr(metrics, what)) for job, metrics in measured)
            yield _gauges(name, help_text, ((job, x) for job, x in values if x is not None))
        steps = ((job.name, f.step) for job, f in jobs if job.roster.live_count)
        yield _gauges(
            "strata_job_step",
            "The highest step that a live worker reports.",
            ((name, step) for name, step in steps if step is not None),
        )

    def _storage(self, jobs: list[tuple[Job, JobMetrics]]) -> Iterator[Metric]:
        barriers = HistogramMetricFamily(
            "strata_barrier_duration_seconds",
            "From the opening of a barrier's round to its completion.",
            labels=["job"],
        )
        for job, _ in jobs:
            barriers.add_metric([job.name], *_buckets(job.barriers.latency))
        yield barriers
        yield _gauges(
            "strata_barriers_open",
            "Barriers that wait for somebody.",
            ((job.name, len(job.barriers.open)) for job, _ in jobs),
        )
        yield _gauges(
            "strata_checkpoints",
            "Committed checkpoints that are remembered, and not known to be deleted.",
            ((job.name, job.checkpoints.history.present) for job, _ in jobs),
        )
        latest = [(job.name, r) for job, _ in jobs if (r := job.checkpoints.latest) is not None]
        yield _gauges(
            "strata_checkpoint_last_size_bytes",
            "The size of the newest checkpoint.",
            ((job, record.size_bytes) for job, record in latest),
        )
        yield _gauges(
            "strata_checkpoint_last_commit_timestamp_seconds",
            "When the newest checkpoint was committed, in seconds since 1970.",
            ((job, record.committed_at) for job, record in latest),
        )
        durations = self._snapshots.sampler.durations
        took = ((job, duration_of(r, durations.get(job, {}))) for job, r in latest)
        yield _gauges(
            "strata_checkpoint_last_duration_seconds",
            "How long the newest checkpoint took from its beginning to its commit.",
            ((job, seconds) for job, seconds in took if seconds is not None),
        )


def _per_job(
    kind: type[CounterMetricFamily | GaugeMetricFamily],
    name: str,
    text: str,
    values: Iterable[tuple[str, float]],
) -> Metric:
    family = kind(name, text, labels=["job"])
    for job, value in values:
        family.add_metric([job], value)
    return family


_gauges = partial(_per_job, GaugeMetricFamily)


def _buckets(histogram: Histogram) -> tuple[list[tuple[str, float]], float]:
    """Cumulative buckets, as Prometheus has them, and the sum."""
    buckets: list[tuple[str, float]] = []
    below = 0
    for bound, inside in zip(histogram.bounds, histogram.counts, strict=False):
        below += inside
        buckets.append((f"{bound:g}", float(below)))
    buckets.append(("+Inf", float(histogram.count)))
    return buckets, histogram.total
