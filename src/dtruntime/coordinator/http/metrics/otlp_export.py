"""Export of the Prometheus metrics over OTLP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from itertools import groupby, pairwise

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import export as sdk
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client.core import Metric
from prometheus_client.samples import Sample

from ...._version import __version__
from ....telemetry import EventLog
from ....telemetry.otlp import EXPORT_SECONDS, Sending, resource, signal_url
from .prometheus import Exporter

log = EventLog("http")

CLOSE_SECONDS = 3.0
SERVICE = "strata-coordinator"
_CUMULATIVE = sdk.AggregationTemporality.CUMULATIVE


class MetricsExport:
    """Sends all metrics periodically; what cannot be sent is dropped."""

    def __init__(self, exporter: Exporter, endpoint: str, seconds: float) -> None:
        self._source = exporter
        self._seconds = seconds
        url = signal_url(endpoint, "metrics")
        self._exporter = OTLPMetricExporter(url, timeout=EXPORT_SECONDS)
        self._resource = resource(SERVICE)
        self._scope = InstrumentationScope("dtruntime", __version__)
        self._sending = Sending("metrics")
        self._since = time.time_ns()

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            await asyncio.sleep(self._seconds)
            try:
                await self._send()
            except Exception as exc:
                log.error("telemetry.metrics_failed", error=repr(exc))

    async def close(self) -> None:
        """Send the last figures, within a few seconds."""
        try:
            await asyncio.wait_for(self._send(), CLOSE_SECONDS)
        except Exception as exc:
            log.debug("telemetry.metrics_failed", error=repr(exc))

    async def _send(self) -> None:
        await self._source.refresh()
        families, now = list(self._source.collect()), time.time_ns()
        metrics = [made for family in families if (made := self._metric(family, now))]
        scope = sdk.ScopeMetrics(self._scope, metrics, "")
        data = sdk.MetricsData([sdk.ResourceMetrics(self._resource, [scope], "")])

        def export() -> bool:
            return self._exporter.export(data) is sdk.MetricExportResult.SUCCESS

        await asyncio.to_thread(self._sending.attempt, export, len(metrics))

    def _metric(self, family: Metric, now: int) -> sdk.Metric | None:
        if not family.samples:
            return None
        data: sdk.DataT
        if family.type == "histogram":
            data = sdk.Histogram(self._histograms(family.samples, now), _CUMULATIVE)
        elif family.type == "counter":
            data = sdk.Sum(self._numbers(family.samples, now), _CUMULATIVE, is_monotonic=True)
        else:
            data = sdk.Gauge(self._numbers(family.samples, now))
        return sdk.Metric(family.name, family.documentation, "", data)

    def _numbers(self, samples: Iterable[Sample], now: int) -> list[sdk.NumberDataPoint]:
        return [
            sdk.NumberDataPoint(dict(sample.labels), self._since, now, sample.value)
            for sample in samples
        ]

    def _histograms(self, samples: Iterable[Sample], now: int) -> list[sdk.HistogramDataPoint]:
        return [
            self._histogram(labels, list(some), now)
            for labels, some in groupby(samples, key=_without_bound)
        ]

    def _histogram(
        self, labels: tuple[tuple[str, str], ...], samples: list[Sample], now: int
    ) -> sdk.HistogramDataPoint:
        buckets = [sample for sample in samples if sample.name.endswith("_bucket")]
        total = sum(sample.value for sample in samples if sample.name.endswith("_sum"))
        cumulative = [0, *(int(sample.value) for sample in buckets)]
        return sdk.HistogramDataPoint(
            attributes=dict(labels),
            start_time_unix_nano=self._since,
            time_unix_nano=now,
            count=cumulative[-1],
            sum=total,
            bucket_counts=[after - before for before, after in pairwise(cumulative)],
            explicit_bounds=[float(sample.labels["le"]) for sample in buckets[:-1]],
            # Optional in OTLP, and not measured.
            min=None,  # type: ignore[arg-type]
            max=None,  # type: ignore[arg-type]
        )


def _without_bound(sample: Sample) -> tuple[tuple[str, str], ...]:
    labels: Mapping[str, str] = sample.labels
    return tuple((name, value) for name, value in labels.items() if name != "le")
