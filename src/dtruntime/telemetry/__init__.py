"""Logs, metrics and traces of the process; read ``logs`` first.

An *event* is a line of the structured log (``logs``), a *histogram* counts measurements
(``histogram``), a *span* is a traced operation (``tracing``; ``otlp`` sends them).
"""

from .histogram import LATENCY_BOUNDS, Histogram, MethodStats, quantile
from .logs import ROOT, EventLog, configure_logging, level_from_environment

__all__ = [
    "LATENCY_BOUNDS",
    "ROOT",
    "EventLog",
    "Histogram",
    "MethodStats",
    "configure_logging",
    "level_from_environment",
    "quantile",
]
