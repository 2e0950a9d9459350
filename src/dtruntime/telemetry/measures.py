"""Measurements that the hot paths can afford."""

from __future__ import annotations

from bisect import bisect_left

LATENCY_BOUNDS = tuple(base * 10.0**exponent for exponent in range(-5, 2) for base in (1, 2, 5))
"""Bucket bounds in seconds: 10 µs to 50 s, three per decade."""


class Histogram:
    """Counts of values in fixed buckets; for use by one thread."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...] = LATENCY_BOUNDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        """How many values were observed."""
        return sum(self.counts)

    def quantile(self, q: float) -> float:
        """The value below which the share ``q`` lies, interpolated within its bucket."""
        wanted, below = q * self.count, 0
        if wanted == 0:
            return 0.0
        for index, inside in enumerate(self.counts):
            if inside and below + inside >= wanted:
                low = self.bounds[index - 1] if index else 0.0
                high = self.bounds[min(index, len(self.bounds) - 1)]
                return low + (high - low) * (wanted - below) / inside
            below += inside
        return self.bounds[-1]


class MethodStats:
    """What one remote method was asked, and how it answered."""

    __slots__ = ("errors", "latency")

    def __init__(self) -> None:
        self.errors = 0
        self.latency = Histogram()
