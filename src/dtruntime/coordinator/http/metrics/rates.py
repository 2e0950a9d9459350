"""Small measurements over time: rates of counters, quantiles of what is recent."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....telemetry import Histogram, quantile

RECENT_SECONDS = 600.0
VALUES_KEPT = 1024
UNUSUAL = 3.0
"""What is said so many times as late as the time before does not come any more."""


class Rate:
    """How fast a counter grows, over the last seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._readings: deque[tuple[float, float]] = deque()

    def add(self, at: float, value: float) -> None:
        """Read the counter; one that went back begins anew."""
        if self._readings and value < self._readings[-1][1]:
            self._readings.clear()
        self._readings.append((at, value))
        while len(self._readings) > 2 and self._readings[1][0] <= at - self._seconds:
            self._readings.popleft()

    @property
    def value(self) -> float | None:
        """Per second; none before there are two readings."""
        if len(self._readings) < 2:
            return None
        (then, before), (now, after) = self._readings[0], self._readings[-1]
        return (after - before) / (now - then) if now > then else None


class Quantiles(NamedTuple):
    """Quantiles of values that were observed, and of how many."""

    values: int
    p50: float | None
    """None: nothing was observed."""
    p99: float | None


class RecentQuantiles:
    """Quantiles of what a histogram observed in the last minutes.

    They are of the values themselves: of those that come in one second, the newest that the
    histogram keeps; of all, the newest `VALUES_KEPT`.
    """

    def __init__(self, seconds: float = RECENT_SECONDS) -> None:
        self._seconds = seconds
        self._kept: deque[tuple[float, float]] = deque(maxlen=VALUES_KEPT)
        self._seen = 0

    def add(self, at: float, histogram: Histogram) -> Quantiles:
        """Take what is new."""
        count = histogram.count
        fresh = min(count - self._seen, len(histogram.newest))
        self._seen = count
        if fresh:
            self._kept.extend((at, value) for value in list(histogram.newest)[-fresh:])
        while self._kept and self._kept[0][0] <= at - self._seconds:
            self._kept.popleft()
        if not self._kept:
            return Quantiles(0, None, None)
        values = [value for _, value in self._kept]
        return Quantiles(len(values), quantile(values, 0.5), quantile(values, 0.99))


class TimeShare:
    """Which share of the time, over the last minutes, was good."""

    def __init__(self, seconds: float = RECENT_SECONDS) -> None:
        self._seconds = seconds
        self._kept: deque[tuple[float, int, int]] = deque()

    def add(self, at: float, good: int, total: int) -> None:
        """One more sample: how many of how many were good."""
        self._kept.append((at, good, total))
        while self._kept[0][0] <= at - self._seconds:
            self._kept.popleft()

    @property
    def value(self) -> float | None:
        """From 0 to 1; none where nothing was counted."""
        total = sum(total for _, _, total in self._kept)
        return sum(good for _, good, _ in self._kept) / total if total else None


class ReportAge(NamedTuple):
    """What somebody said, and since when that has not changed."""

    what: Any
    since: float
    lasted: float
    """How long what was said before stood."""

    @classmethod
    def after(cls, before: ReportAge | None, what: Any, at: float) -> ReportAge:
        """The same as before, or something else."""
        if before is None:
            return cls(what, at, 0.0)
        return before if before.what == what else cls(what, at, at - before.since)

    def is_new(self, now: float, seconds: float) -> bool:
        """Whether it is of the last ``seconds``, or has not stood much longer than usual."""
        return now - self.since <= max(seconds, UNUSUAL * self.lasted)


Numbers = NDArray[np.int64]
Times = NDArray[np.float64]


class RankRates:
    """How fast what the ranks count advances, from their heartbeats: steps, or samples."""

    def __init__(self, samples: int = 10) -> None:
        self._kept: deque[tuple[Numbers, Numbers, Times]] = deque(maxlen=samples + 1)

    def add(self, incarnations: Numbers, counts: Numbers, beats: Times) -> None:
        """What is known of the members that beat, in any order; count -1: none."""
        self._kept.append((incarnations, counts, beats))

    @property
    def median(self) -> float | None:
        """Per second, of the rank in the middle; none where no rank can be measured."""
        rates = self._rates()
        return None if rates is None else float(np.median(rates))

    @property
    def total(self) -> float | None:
        """Per second, of all ranks that can be measured; none where there is none."""
        rates = self._rates()
        return None if rates is None else float(rates.sum())

    def _rates(self) -> Times | None:
        if len(self._kept) < 2:
            return None
        (was, before, then), (now, after, beats) = self._kept[0], self._kept[-1]
        _, first, last = np.intersect1d(was, now, assume_unique=True, return_indices=True)
        took, advanced = beats[last] - then[first], after[last] - before[first]
        known = (before[first] >= 0) & (advanced >= 0) & (took > 0)
        if not known.any():
            return None
        rates: Times = advanced[known] / took[known]
        return rates
