"""What ``strata top`` shows of what it knows: order, place, pause, and the pace so far."""

from __future__ import annotations

from collections import deque
from statistics import median

from ..types import JobStatus, Membership
from .top_polling import StatusFrame
from .worker_table import WorkerRow, rows_of

SORTS = ("problems", "rank", "step", "heartbeat", "cpu", "memory")
PACE_KEPT = 600
LEAST_SECONDS = 10.0
"""The pace is that of the last so many seconds, or of three heartbeats."""
SAME_BEAT = 0.05
"""Ages of one heartbeat differ by the time that answers take, which is less than this."""
_FAR = 2**62


class Pace:
    """How fast the ranks' steps advance, by their heartbeats of the last seconds."""

    def __init__(self) -> None:
        self.values: deque[float | None] = deque(maxlen=PACE_KEPT)
        """Steps per second of the rank in the middle, oldest first; None: nothing to measure."""
        self._beats: dict[tuple[str, int], deque[tuple[float, int]]] = {}
        """When each was heard, and at which step it was."""

    def add(self, job: JobStatus, at: float, heartbeat_seconds: float = 0.0) -> None:
        """Take another look."""
        since = at - max(LEAST_SECONDS, 3 * heartbeat_seconds)
        known, self._beats = self._beats, {}
        for worker in job.workers:
            if worker.membership is not Membership.LIVE or worker.step is None:
                continue
            key = worker.worker_id, worker.incarnation
            beats = self._beats[key] = known.get(key, deque())
            heard = at - worker.heartbeat_age
            if not beats or heard > beats[-1][0] + SAME_BEAT:
                beats.append((heard, worker.step))
            while beats and beats[0][0] < since:
                beats.popleft()
        rates = [rate for beats in self._beats.values() if (rate := _rate(beats)) is not None]
        if rates or self.values:
            self.values.append(median(rates) if rates else None)


def _rate(beats: deque[tuple[float, int]]) -> float | None:
    """Steps per second from the first heartbeat to the last; None of a single one."""
    if len(beats) < 2:
        return None
    (then, before), (now, after) = beats[0], beats[-1]
    return max(0, after - before) / (now - then)


class TopState:
    """The newest look, and what the keys have made of it."""

    def __init__(self, look: StatusFrame, sort: str = SORTS[0]) -> None:
        self.look = look
        self.sort = sort
        self.first = 0
        """The first worker that is shown."""
        self.page = 1
        """How many are; the picture says so."""
        self.paused = False
        self.done = False
        self.pace = Pace()
        self._chosen: str | None = None
        if look.job is not None:
            self._note_pace(look.job, look)

    @property
    def job_name(self) -> str | None:
        """The job that is shown; None when there is none."""
        shown = self.look.job.job if self.look.job is not None else None
        return self._chosen or shown

    def see(self, look: StatusFrame) -> None:
        """Take a newer look, unless it is paused."""
        if look is self.look or self.paused:
            return
        before, job = self.look.job, look.job
        if job is not None:
            if self._chosen not in (None, job.job):
                return  # of the job that was shown before
            if before is None or before.job != job.job:
                self.pace, self.first = Pace(), 0
            if look.at != self.look.at:
                self._note_pace(job, look)
        self.look = look

    def press(self, key: str) -> None:
        """Do what a key asks for."""
        match key:
            case "quit":
                self.done = True
            case "pause":
                self.paused = not self.paused
            case "sort":
                self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]
                self.first = 0
            case "next job":
                self._show_next_job()
            case _:
                self._scroll(key)

    def rows(self) -> list[WorkerRow]:
        """All workers in the chosen order."""
        if self.look.job is None:
            return []
        rows = rows_of(self.look.job, self.look.coordinator.heartbeat_timeout_ms / 1000)
        match self.sort:
            case "rank":
                rows.sort(key=lambda row: row.worker.rank)
            case "step":
                rows.sort(key=lambda row: _FAR if row.worker.step is None else row.worker.step)
            case "heartbeat":
                rows.sort(key=lambda row: -row.worker.heartbeat_age)
            case "cpu":
                rows.sort(key=lambda row: -row.worker.resources.cpu_percent)
            case "memory":
                rows.sort(key=lambda row: -row.worker.resources.memory_used_bytes)
        return rows

    def _note_pace(self, job: JobStatus, look: StatusFrame) -> None:
        self.pace.add(job, look.at, look.coordinator.heartbeat_interval_ms / 1000)

    def _scroll(self, key: str) -> None:
        total = len(self.look.job.workers) if self.look.job is not None else 0
        moves = {
            "up": -1,
            "down": 1,
            "page up": -self.page,
            "page down": self.page,
            "home": -total,
            "end": total,
        }
        last = max(0, total - self.page)
        self.first = min(last, max(0, self.first + moves.get(key, 0)))

    def _show_next_job(self) -> None:
        names = self.look.jobs
        if names:
            at = names.index(self.job_name) if self.job_name in names else -1
            self._chosen = names[(at + 1) % len(names)]
            self.paused = False
