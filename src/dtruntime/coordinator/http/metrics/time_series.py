"""Figures over time, in a fine and a coarse ring, kept roughly over restarts."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import msgspec
import xxhash

from ....telemetry import EventLog
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
    """The last of some points, with the means of what fluctuates."""
    means: dict[str, float | None] = {}
    for name in _MEANS:
        known = [x for point in points if (x := getattr(point, name)) is not None]
        means[name] = fmean(known) if known else None
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

    def writer(self, stored: StoredHistory) -> Callable[[], None]:
        """What writes a job's file; for another thread."""
        path = self._path(stored.job)

        def write() -> None:
            partial = path.with_suffix(".partial")
            try:
                path.parent.mkdir(exist_ok=True)
                partial.write_bytes(msgspec.json.encode(stored))
                os.replace(partial, path)
            except OSError as exc:
                log.warning("history.not_written", file=str(path), error=str(exc))
                with contextlib.suppress(OSError):
                    partial.unlink(missing_ok=True)

        return write

    def _path(self, job: str) -> Path:
        return self._folder / f"{xxhash.xxh3_64_hexdigest(job.encode())}.json"
