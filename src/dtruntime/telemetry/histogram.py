"""Histograms that are cheap enough for hot paths."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable

LATENCY_BOUNDS = tuple(base * 10.0**exponent for exponent in range(-5, 2) for base in (1, 2, 5))
"""Bucket bounds in seconds: 10 µs to 50 s, three per decade."""
NEWEST_KEPT = 1024
"""How many of the newest values a histogram keeps; quantiles are taken from these."""


class Histogram:
    """Counts of values in fixed buckets, and the newest values themselves; for use by one thread.

    The buckets allow histograms to be added up. Quantiles come from observed values: a bucket does
    not say where in it they lie.
    """

    __slots__ = ("bounds", "counts", "newest", "total")

    def __init__(self, bounds: tuple[float, ...] = LATENCY_BOUNDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self.newest: deque[float] = deque(maxlen=NEWEST_KEPT)
        """The newest values, oldest first."""

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value
        self.newest.append(value)

    @property
    def count(self) -> int:
        """How many values were observed."""
        return sum(self.counts)

    def quantile(self, q: float) -> float:
        """The ``q``-quantile of the newest values; 0 if there are none."""
        return quantile(self.newest, q) if self.newest else 0.0


def quantile(values: Iterable[float], q: float) -> float:
    """The smallest value that the share ``q`` of all does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


class MethodStats:
    """The errors and latencies of one remote method."""

    __slots__ = ("errors", "latency")

    def __init__(self) -> None:
        self.errors = 0
        self.latency = Histogram()
