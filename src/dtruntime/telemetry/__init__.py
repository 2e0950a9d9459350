"""What the process says of itself: a structured log, measurements, and spans (`tracing`)."""

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
