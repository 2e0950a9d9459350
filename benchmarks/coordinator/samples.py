"""What one run of a load generator measured, and the median over several."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Microseconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sample:
    """One run against one server."""

    rate: float
    """Completed operations per second."""
    p50_ms: float
    p99_ms: float
    calls: int
    """Calls sent; a barrier of n is n of them."""
    failed: int
    """Calls that the generator lost, or that carried no complete reply."""
    server_cpu_us: float
    """CPU time the server spent per call, in microseconds."""
    server_share: float
    """Part of its cores that the server used."""
    load_share: float
    """Part of its cores that the generator used: near 1, it is the limit itself."""
    foreign_share: float
    """Part of the server's cores or of the load's that other processes took meanwhile."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Medians over the runs against one server."""

    rate: float
    lowest_rate: float
    highest_rate: float
    p50_ms: float
    p99_ms: float
    server_cpu_us: float
    server_share: float
    foreign_share: float
    load_share: float
    calls: int
    failed: int
    runs: int


def summarize(samples: Sequence[Sample]) -> Summary:
    """The median of each figure; calls and failures add up."""
    rates = [sample.rate for sample in samples]
    return Summary(
        rate=statistics.median(rates),
        lowest_rate=min(rates),
        highest_rate=max(rates),
        p50_ms=statistics.median(sample.p50_ms for sample in samples),
        p99_ms=statistics.median(sample.p99_ms for sample in samples),
        server_cpu_us=statistics.median(sample.server_cpu_us for sample in samples),
        server_share=statistics.median(sample.server_share for sample in samples),
        foreign_share=statistics.median(sample.foreign_share for sample in samples),
        load_share=statistics.median(sample.load_share for sample in samples),
        calls=sum(sample.calls for sample in samples),
        failed=sum(sample.failed for sample in samples),
        runs=len(samples),
    )


def percentiles_ms(latencies_us: Microseconds) -> tuple[float, float]:
    """The median and the 99th percentile, in milliseconds."""
    p50, p99 = np.percentile(latencies_us / 1000.0, [50, 99])
    return float(p50), float(p99)
