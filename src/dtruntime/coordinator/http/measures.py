"""Small measurements over time: rates of counters, quantiles of what is recent."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from ...telemetry import Histogram


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


class RecentQuantiles:
    """Quantiles of what a histogram counted in the last minutes."""

    def __init__(self, seconds: float = 600.0, every: float = 10.0) -> None:
        self._every = every
        self._kept: deque[tuple[float, list[int]]] = deque(maxlen=int(seconds / every) + 1)

    def add(self, at: float, histogram: Histogram) -> tuple[float | None, float | None]:
        """The median and the 99th percentile, in milliseconds; none: nothing was counted."""
        if not self._kept:
            self._kept.append((at, [0] * len(histogram.counts)))
        before = self._kept[0][1]
        recent = Histogram(histogram.bounds)
        recent.counts = [now - then for now, then in zip(histogram.counts, before, strict=True)]
        if at - self._kept[-1][0] >= self._every:
            self._kept.append((at, list(histogram.counts)))
        if not any(recent.counts):
            return None, None
        return recent.quantile(0.5) * 1000, recent.quantile(0.99) * 1000


class Share:
    """Which share of the time, over the last minutes, was good."""

    def __init__(self, samples: int = 600) -> None:
        self._kept: deque[tuple[int, int]] = deque(maxlen=samples)

    def add(self, good: int, total: int) -> None:
        """One more sample: how many of how many were good."""
        self._kept.append((good, total))

    @property
    def value(self) -> float | None:
        """From 0 to 1; none where nothing was counted."""
        total = sum(total for _, total in self._kept)
        return sum(good for good, _ in self._kept) / total if total else None


Numbers = NDArray[np.int64]
Times = NDArray[np.float64]


class RankRates:
    """How fast what the ranks count advances, from their heartbeats: steps, or samples."""

    def __init__(self, samples: int = 10) -> None:
        self._kept: deque[tuple[Numbers, Numbers, Times]] = deque(maxlen=samples + 1)

    def add(self, incarnations: Numbers, counts: Numbers, beats: Times) -> None:
        """What is known of each rank; count -1: none, incarnation 0: nobody."""
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
        size = min(len(was), len(now))
        took, advanced = beats[:size] - then[:size], after[:size] - before[:size]
        known = (was[:size] == now[:size]) & (before[:size] >= 0) & (advanced >= 0) & (took > 0)
        if not known.any():
            return None
        rates: Times = advanced[known] / took[known]
        return rates
