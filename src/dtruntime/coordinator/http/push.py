"""The same metrics as ``/metrics``, sent to an OpenTelemetry collector when one is configured."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from ...config import TelemetryConfig
from ...telemetry import EventLog, tracing
from .metrics.prometheus import Exporter

if TYPE_CHECKING:
    from .metrics.otlp_export import MetricsSender

log = EventLog("http")

CLOSE_SECONDS = 3.0


def open_push(exporter: Exporter, config: TelemetryConfig) -> Push | None:
    """What sends metrics; None where that is not asked for, or cannot be."""
    if not config.otlp_endpoint or not config.metrics_interval_ms or not tracing.is_on():
        return None
    from .metrics.otlp_export import MetricsSender

    sender = MetricsSender(config.otlp_endpoint)
    return Push(exporter, sender, config.metrics_interval_ms / 1000)


class Push:
    """Reads all metrics again and again, and has them sent by another thread."""

    def __init__(self, exporter: Exporter, sender: MetricsSender, seconds: float) -> None:
        self._exporter = exporter
        self._sender = sender
        self._seconds = seconds

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            await asyncio.sleep(self._seconds)
            try:
                await self._send()
            except Exception as exc:
                log.error("telemetry.metrics_failed", error=repr(exc))

    async def close(self) -> None:
        """Send once more, so that the last figures are known; not for long."""
        try:
            await asyncio.wait_for(self._send(), CLOSE_SECONDS)
        except Exception as exc:
            log.debug("telemetry.metrics_failed", error=repr(exc))

    async def _send(self) -> None:
        await self._exporter.refresh()
        families = list(self._exporter.collect())
        await asyncio.to_thread(self._sender.send, families, time.time_ns())
