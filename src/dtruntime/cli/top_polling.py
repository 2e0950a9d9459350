"""Looks at a job again and again, in a thread, so that keys are answered at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ..client import Observer
from ..errors import StrataError
from ..rpc.gen import coordinator_pb2 as pb
from ..types import JobStatus
from .status_report import CoordinatorReport, read_status

EVENTS_KEPT = 200


@dataclass(frozen=True, slots=True)
class StatusFrame:
    """A job as it was at one moment."""

    coordinator: CoordinatorReport
    job: JobStatus | None
    """None: there is none yet."""
    jobs: tuple[str, ...]
    events: tuple[pb.Event, ...]
    """The newest entries of the journal, oldest first."""
    at: float
    """By the monotonic clock."""
    stale_since: float | None = None
    """Since when the coordinator has not answered; None: it does."""


def read_frame(
    observer: Observer, url: str, job: str | None, seen: tuple[pb.Event, ...] = ()
) -> StatusFrame:
    """See a job, by default the one with the most live workers."""
    report = read_status(observer, url, job)
    chosen = max(report.jobs, key=lambda one: one.live_workers, default=None)
    name = chosen.job if chosen is not None else ""
    known = seen if all(event.job in ("", name) for event in seen) else ()
    fresh = observer.events(name, known[-1].id if known else 0)
    names = tuple(observer.jobs())
    events = (*known, *fresh)[-EVENTS_KEPT:]
    return StatusFrame(report.coordinator, chosen, names, events, time.monotonic())


class Poller:
    """The newest look, of the job that is asked for."""

    def __init__(self, observer: Observer, url: str, interval: float, first: StatusFrame) -> None:
        self._observer = observer
        self._url = url
        self._interval = interval
        self._stopped = threading.Event()
        self.job: str | None = None
        """The job to look at; None: the one with the most live workers."""
        self.newest = first

    @contextmanager
    def running(self, tell: Callable[[], None]) -> Iterator[Poller]:
        """StatusFrame until the block ends; ``tell`` is called after each look."""
        thread = threading.Thread(target=self._run, args=(tell,), name="strata-top", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._stopped.set()
            thread.join()

    def _run(self, tell: Callable[[], None]) -> None:
        answered = time.monotonic()
        look = self.newest
        while not self._stopped.wait(self._interval):
            try:
                look = read_frame(self._observer, self._url, self.job, look.events)
                answered = time.monotonic()
                self.newest = look
            except StrataError:
                # Also a job that is gone with the data of the coordinator: it may come back.
                self.newest = replace(self.newest, stale_since=answered)
            if not self._stopped.is_set():
                tell()
