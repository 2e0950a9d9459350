"""Time series of metrics at two resolutions, kept over restarts, and the windows behind them."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from ....telemetry import EventLog, Histogram, quantile
from ..views import History, Point, Recovery

log = EventLog("http")

FINE_SECONDS = 1.0
FINE_KEPT = 600
COARSE_SECONDS = 10.0
COARSE_KEPT = 2160
POINTS_SENT = 2160

_MEANS = (
    "steps_per_second",
    "samples_per_second",
    "requests_per_second",
    "checkpoint_bytes_per_second",
    "barrier_p50_ms",
    "barrier_p99_ms",
    "loss",
)


class StoredHistory(msgspec.Struct, frozen=True):
    """One job's history in its file."""

    job: str
    fine: list[Point]
    coarse: list[Point]
    recoveries: list[Recovery]


class Rings:
    """The points of one job: each second for ten minutes, every ten seconds for six hours."""

    def __init__(self, fine: list[Point] | None = None, coarse: list[Point] | None = None) -> None:
        self.fine: deque[Point] = deque(fine or (), maxlen=FINE_KEPT)
        self.coarse: deque[Point] = deque(coarse or (), maxlen=COARSE_KEPT)
        self._gathered: list[Point] = []

    def add(self, point: Point) -> None:
        """One more second."""
        self.fine.append(point)
        if self._gathered and _slot(self._gathered[0]) != _slot(point):
            self.coarse.append(_average(self._gathered))
            self._gathered = []
        self._gathered.append(point)

    def read(self, seconds: float, now: float, recoveries: list[Recovery]) -> History:
        """The last ``seconds``, as fine as they are kept."""
        since = now - seconds
        fine = seconds <= FINE_KEPT * FINE_SECONDS
        ring = self.fine if fine else self.coarse
        points = [point for point in ring if point.at >= since]
        return History(
            resolution_seconds=FINE_SECONDS if fine else COARSE_SECONDS,
            points=points[-POINTS_SENT:],
            recoveries=[r for r in recoveries if r.detected_at >= since],
        )


def _slot(point: Point) -> int:
    return int(point.at / COARSE_SECONDS)


def _average(points: list[Point]) -> Point:
    """The last of some points, with means for rates."""
    means: dict[str, float | None] = {}
    for name in _MEANS:
        values = [x for point in points if (x := getattr(point, name)) is not None]
        means[name] = fmean(values) if values else None
    return msgspec.structs.replace(points[-1], **means)


class HistoryFiles:
    """A file for each job in the data directory; losing one loses nothing but charts."""

    def __init__(self, data_dir: str) -> None:
        self._folder = Path(data_dir, "history")

    def read(self, job: str) -> StoredHistory | None:
        """What is kept of a job, if it can be read."""
        path = self._path(job)
        try:
            stored = msgspec.json.decode(path.read_bytes(), type=StoredHistory)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as exc:
            log.warning("history.unreadable", file=str(path), error=str(exc))
            return None
        return stored if stored.job == job else None

    def write(self, stored: StoredHistory) -> None:
        """Write a job's file; for another thread."""
        path = self._path(stored.job)
        partial = path.with_suffix(".partial")
        try:
            path.parent.mkdir(exist_ok=True)
            partial.write_bytes(msgspec.json.encode(stored))
            os.replace(partial, path)
        except OSError as exc:
            log.warning("history.not_written", file=str(path), error=str(exc))
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)

    def _path(self, job: str) -> Path:
        return self._folder / f"{xxhash.xxh3_64_hexdigest(job.encode())}.json"


RECENT_SECONDS = 600.0
VALUES_KEPT = 1024
UNUSUAL = 3.0
"""A report this many times as late as the one before is not expected any more."""


class Rate:
    """How fast a counter grows, over the last seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._readings: deque[tuple[float, float]] = deque()

    def add(self, at: float, value: float) -> None:
        """Add a reading of the counter; a lower one starts over."""
        if self._readings and value < self._readings[-1][1]:
            self._readings.clear()
        self._readings.append((at, value))
        while len(self._readings) > 2 and self._readings[1][0] <= at - self._seconds:
            self._readings.popleft()

    @property
    def value(self) -> float | None:
        """Per second; None before there are two readings."""
        if len(self._readings) < 2:
            return None
        (then, before), (now, after) = self._readings[0], self._readings[-1]
        return (after - before) / (now - then) if now > then else None


class Quantiles(NamedTuple):
    """Quantiles of observed values, and their number."""

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
    """The share of good time over the last minutes."""

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
        """From 0 to 1; None if nothing was counted."""
        total = sum(total for _, _, total in self._kept)
        return sum(good for _, good, _ in self._kept) / total if total else None


class ReportAge(NamedTuple):
    """A report, and since when it has not changed."""

    what: Any
    since: float
    lasted: float
    """How long the report before it was unchanged."""

    @classmethod
    def after(cls, before: ReportAge | None, what: Any, at: float) -> ReportAge:
        """The same report as before, or a new one."""
        if before is None:
            return cls(what, at, 0.0)
        return before if before.what == what else cls(what, at, at - before.since)

    def is_new(self, now: float, seconds: float) -> bool:
        """Whether it is of the last ``seconds``, or not much older than usual."""
        return now - self.since <= max(seconds, UNUSUAL * self.lasted)


Numbers = NDArray[np.int64]
Times = NDArray[np.float64]


class RankRates:
    """Rates of the ranks' counters (steps or samples), from their heartbeats."""

    def __init__(self, samples: int = 10) -> None:
        self._kept: deque[tuple[Numbers, Numbers, Times]] = deque(maxlen=samples + 1)

    def add(self, incarnations: Numbers, counts: Numbers, beats: Times) -> None:
        """Counters of the members with heartbeats, in any order; -1: no count."""
        self._kept.append((incarnations, counts, beats))

    @property
    def median(self) -> float | None:
        """Per second, of the median rank; None if no rank can be measured."""
        rates = self._rates()
        return None if rates is None else float(np.median(rates))

    @property
    def total(self) -> float | None:
        """Per second, of all ranks together; None if no rank can be measured."""
        rates = self._rates()
        return None if rates is None else float(rates.sum())

    def _rates(self) -> Times | None:
        if len(self._kept) < 2:
            return None
        (was, before, then), (now, after, beats) = self._kept[0], self._kept[-1]
        _, first, last = np.intersect1d(was, now, assume_unique=True, return_indices=True)
        took, advanced = beats[last] - then[first], after[last] - before[first]
        measured = (before[first] >= 0) & (advanced >= 0) & (took > 0)
        if not measured.any():
            return None
        rates: Times = advanced[measured] / took[measured]
        return rates
