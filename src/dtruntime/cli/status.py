"""``strata status``: a coordinator, its jobs and their workers, once or live with keys."""

from __future__ import annotations

import argparse
import math
import os
import re
import select
import sys
import termios
import threading
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from ..client import Observer
from ..display import json_text, open_console
from ..errors import StrataError
from ..events import JournalEvent, level_of, sentence
from ..types import JobStatus, Membership, WorkerStatus
from .invocation import add_url, observing, whole_between
from .status_report import (
    CoordinatorReport,
    StatusReport,
    WorkerRow,
    checkpoint_line,
    headline,
    job_lines,
    one_line,
    read_status,
    rows_of,
    staleness,
    status_view,
    worker_lines,
)

SORTS = ("problems", "rank", "step", "heartbeat", "cpu", "memory")
EVENTS_KEPT = 200


def add_parser(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "status",
        help="show a coordinator's jobs and workers",
        description="Show a coordinator, its jobs and their workers; workers with a problem come "
        "first. Keys with --watch in a terminal: q quits, s sorts by something else, arrows and "
        "Page Up/Down scroll, Tab shows the next job, p pauses. When the coordinator goes away, "
        "it waits for it. Exit code 3: it cannot be reached, 1: the named job does not exist.",
    )
    add_url(parser)
    parser.add_argument("--job", help="only this job")
    parser.add_argument("--watch", action="store_true", help="refresh until q or Ctrl-C")
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="SECONDS", help="with --watch (default 1)"
    )
    parser.add_argument(
        "--sort", choices=SORTS, default=SORTS[0], help="order of the workers with --watch"
    )
    parser.add_argument(
        "--events",
        type=whole_between(0, EVENTS_KEPT),
        default=0,
        metavar="N",
        help="also print the newest N entries of the journal (not with --json or --watch)",
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object (with --watch: one per line)"
    )
    parser.set_defaults(run=observing(run))


def run(observer: Observer, url: str, options: argparse.Namespace) -> int:
    """Show the status, once or repeatedly."""
    console = open_console()
    if not options.watch:
        _write(read_status(observer, url, options.job), options, console)
        if options.events and not options.json:
            _write_events(observer, options, console)
    elif options.json or not console.is_terminal:
        _print_repeatedly(observer, url, options, console)
    else:
        watch(observer, url, options.job, options.sort, options.interval, console)
    return 0


def _write(report: StatusReport, options: argparse.Namespace, console: Console) -> None:
    if options.json:
        print(json_text(report, indent=not options.watch), flush=True)
    else:
        height = console.height if console.is_terminal else None
        console.print(status_view(report, console.width, height))


def _write_events(observer: Observer, options: argparse.Namespace, console: Console) -> None:
    console.print()
    for event in observer.events(options.job or "")[-options.events :]:
        console.print(event_line(event))


def _print_repeatedly(
    observer: Observer, url: str, options: argparse.Namespace, console: Console
) -> None:
    try:
        while True:
            _write(read_status(observer, url, options.job), options, console)
            time.sleep(options.interval)
    except KeyboardInterrupt:
        return


PACE_KEPT = 600
LEAST_SECONDS = 10.0
"""The pace is that of the last seconds: so many, or three heartbeats."""
SAME_BEAT = 0.05
"""Ages of the same heartbeat differ by the time of a call, which is less than this."""
_SORT_KEYS: dict[str, Callable[[WorkerStatus], float]] = {
    "rank": lambda worker: worker.rank,
    "step": lambda worker: math.inf if worker.step is None else worker.step,
    "heartbeat": lambda worker: -worker.heartbeat_age,
    "cpu": lambda worker: -worker.resources.cpu_percent,
    "memory": lambda worker: -worker.resources.memory_used_bytes,
}


class StepRate:
    """How fast the ranks advance, by their heartbeats of the last seconds."""

    def __init__(self) -> None:
        self.values: deque[float | None] = deque(maxlen=PACE_KEPT)
        """Steps per second of the rank in the middle, oldest first; None: nothing to measure."""
        self._beats: dict[tuple[str, int], deque[tuple[float, int]]] = {}
        """When each worker reported, and which step."""

    def add(self, job: JobStatus, at: float, heartbeat_seconds: float = 0.0) -> None:
        """Add what the workers have reported."""
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


class WatchState:
    """The newest frame, and what the keys have chosen to show of it."""

    def __init__(self, frame: StatusFrame, sort: str = SORTS[0]) -> None:
        self.frame = frame
        self.sort = sort
        self.first = 0
        """The first worker that is shown."""
        self.page = 1
        """How many are; `watch_view` sets it."""
        self.paused = False
        self.done = False
        self.pace = StepRate()
        self._chosen: str | None = None
        self._all_jobs = frame.all_jobs is not None
        if frame.job is not None:
            self._note_pace(frame.job, frame)

    @property
    def job_name(self) -> str | None:
        """The job that is shown; None when all are, or when there is none."""
        if self._all_jobs:
            return None
        shown = self.frame.job.job if self.frame.job is not None else None
        return self._chosen or shown

    def show(self, frame: StatusFrame) -> None:
        """Show a newer frame, unless paused."""
        if frame is self.frame or self.paused or not self._is_of_chosen_job(frame):
            return
        before, job = self.frame.job, frame.job
        self._all_jobs = frame.all_jobs is not None
        if job is not None:
            if before is None or before.job != job.job:
                self.pace, self.first = StepRate(), 0
            if frame.at != self.frame.at:
                self._note_pace(job, frame)
        self.frame = frame

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
        if self.frame.job is None:
            return []
        rows = rows_of(self.frame.job, self.frame.coordinator.heartbeat_timeout_ms / 1000)
        key = _SORT_KEYS.get(self.sort)
        return rows if key is None else sorted(rows, key=lambda row: key(row.worker))

    def _is_of_chosen_job(self, frame: StatusFrame) -> bool:
        """False for a frame that was read before another job, or all jobs, were chosen."""
        if self._all_jobs:
            return frame.all_jobs is not None or len(frame.jobs) < 2
        if frame.all_jobs is not None:
            return self._chosen is None and self.frame.job is None
        return frame.job is None or self._chosen in (None, frame.job.job)

    def _note_pace(self, job: JobStatus, frame: StatusFrame) -> None:
        self.pace.add(job, frame.at, frame.coordinator.heartbeat_interval_ms / 1000)

    def _scroll(self, key: str) -> None:
        total = len(self.frame.job.workers) if self.frame.job is not None else 0
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
        """After the last come all jobs, and then the first."""
        names = self.frame.jobs
        if names:
            at = names.index(self.job_name) if self.job_name in names else -1
            self._all_jobs = at + 1 == len(names) > 1
            self._chosen = None if self._all_jobs else names[(at + 1) % len(names)]
            self.paused = False


_KEYS = {
    code: name
    for name, codes in {
        "up": (b"\x1b[A", b"\x1bOA", b"k"),
        "down": (b"\x1b[B", b"\x1bOB", b"j"),
        "page up": (b"\x1b[5~",),
        "page down": (b"\x1b[6~", b" "),
        "home": (b"\x1b[H", b"\x1b[1~"),
        "end": (b"\x1b[F", b"\x1b[4~"),
        "next job": (b"\t",),
        "sort": (b"s",),
        "pause": (b"p",),
        "quit": (b"q", b"Q", b"\x04"),
    }.items()
    for code in codes
}
_ONE = re.compile(rb"\x1b\[[0-9;]*[A-Za-z~]|\x1bO[A-Za-z]|[\s\S]")


def keys_in(data: bytes) -> list[str]:
    """The keys that were pressed; those without a meaning are left out."""
    return [_KEYS[key] for key in _ONE.findall(data) if key in _KEYS]


class KeyReader:
    """Reads keys in a ``with`` block; the terminal is as before when it ends.

    Where input is no terminal (None) there are no keys: Ctrl-C ends the program.
    """

    def __init__(self, terminal: int | None) -> None:
        self._terminal = terminal
        self._before: list[Any] = []
        self._bell = -1, -1

    def wake(self) -> None:
        """Let `read` return, from any thread."""
        os.write(self._bell[1], b"!")

    def read(self, seconds: float) -> list[str]:
        """The keys pressed meanwhile; waits so long for one."""
        watched = [end for end in (self._terminal, self._bell[0]) if end is not None]
        ready, _, _ = select.select(watched, [], [], seconds)
        if self._bell[0] in ready:
            os.read(self._bell[0], 4096)
        if self._terminal is None or self._terminal not in ready:
            return []
        data = os.read(self._terminal, 1024)
        return keys_in(data) if data else ["quit"]

    def __enter__(self) -> Self:
        self._bell = os.pipe()
        if self._terminal is not None:
            self._before = termios.tcgetattr(self._terminal)
            tty.setcbreak(self._terminal)
        return self

    def __exit__(self, *_: object) -> None:
        if self._terminal is not None:
            termios.tcsetattr(self._terminal, termios.TCSADRAIN, self._before)
        for end in self._bell:
            os.close(end)


@dataclass(frozen=True, slots=True)
class StatusFrame:
    """A job, or all of them, at one moment."""

    coordinator: CoordinatorReport
    job: JobStatus | None
    """None: there is none yet, or all are shown."""
    jobs: tuple[str, ...]
    events: tuple[JournalEvent, ...]
    """The newest entries of the journal, oldest first."""
    at: float
    """By the monotonic clock."""
    stale_since: float | None = None
    """Since when the coordinator has not answered; None: it does."""
    all_jobs: StatusReport | None = None
    """Where no job was named and there are several."""

    @property
    def report(self) -> StatusReport:
        """What ``strata status`` shows of it."""
        shown = (self.job,) if self.job is not None else ()
        return self.all_jobs or StatusReport(self.coordinator, shown)


def read_frame(
    observer: Observer, url: str, job: str | None, seen: tuple[JournalEvent, ...] = ()
) -> StatusFrame:
    """Read a job; without a name all of them, or the only one."""
    report = read_status(observer, url, job)
    if len(report.jobs) > 1:
        every = tuple(one.job for one in report.jobs)
        return StatusFrame(report.coordinator, None, every, (), time.monotonic(), all_jobs=report)
    chosen = next(iter(report.jobs), None)
    name = chosen.job if chosen is not None else ""
    known = seen if all(event.job in ("", name) for event in seen) else ()
    fresh = observer.events(name, known[-1].id if known else 0)
    names = tuple(observer.jobs())
    events = (*known, *fresh)[-EVENTS_KEPT:]
    return StatusFrame(report.coordinator, chosen, names, events, time.monotonic())


class Poller:
    """Reads the chosen job in the background; `newest` is its newest frame."""

    def __init__(self, observer: Observer, url: str, interval: float, first: StatusFrame) -> None:
        self._observer = observer
        self._url = url
        self._interval = interval
        self._stopped = threading.Event()
        self.job: str | None = None
        """The job to read; None: all of them."""
        self.newest = first

    @contextmanager
    def running(self, tell: Callable[[], None]) -> Iterator[Poller]:
        """Read until the block ends; ``tell`` is called after each frame."""
        thread = threading.Thread(target=self._run, args=(tell,), name="strata-watch", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._stopped.set()
            thread.join()

    def _run(self, tell: Callable[[], None]) -> None:
        answered = time.monotonic()
        frame = self.newest
        while not self._stopped.wait(self._interval):
            try:
                frame = read_frame(self._observer, self._url, self.job, frame.events)
                answered = time.monotonic()
                self.newest = frame
            except StrataError:
                # Also a job that is gone with the data of the coordinator: it may come back.
                self.newest = replace(self.newest, stale_since=answered)
            if not self._stopped.is_set():
                tell()


JOURNAL_LINES = 8
LEAST_WORKERS = 4
WORKERS_FIRST = 16
"""Older checkpoints are shown only if this many workers and the journal have room."""
CHECKPOINT_LINES = 4
BARS = "▁▂▃▄▅▆▇█"
_STYLES = {"warning": "yellow", "error": "red"}
_KEY_HELP = "q quit   s sort   ↑↓ scroll   tab next job   p pause"
FRAME_SECONDS = 0.5
"""How often the screen is drawn without news: ages grow, and windows are resized."""


def watch(
    observer: Observer, url: str, job: str | None, sort: str, interval: float, console: Console
) -> None:
    """Draw until q or Ctrl-C, and leave the last status on the terminal."""
    frame = read_frame(observer, url, job)
    state = WatchState(frame, sort)
    poller = Poller(observer, url, interval, frame)
    poller.job = state.job_name
    terminal = sys.stdin.fileno() if sys.stdin.isatty() else None
    with (
        suppress(KeyboardInterrupt),
        KeyReader(terminal) as keys,
        Live(console=console, screen=True, auto_refresh=False) as live,
        poller.running(keys.wake),
    ):
        while not state.done:
            live.update(watch_view(state, console.width, console.height), refresh=True)
            for key in keys.read(FRAME_SECONDS):
                state.press(key)
            poller.job = state.job_name
            state.show(poller.newest)
    last = state.frame
    console.print(status_view(last.report, console.width, console.height, last.stale_since))


def watch_view(state: WatchState, width: int, height: int | None) -> RenderableType:
    """Everything in ``height`` lines; ``None``: in as many as it takes."""
    frame = state.frame
    if frame.job is None:
        shown_jobs = status_view(frame.report, width, height, frame.stale_since)
        return Group(shown_jobs, _foot(state, "all jobs"))
    head = [headline(frame.coordinator), *staleness(frame.stale_since)]
    rows = state.rows()
    lines = [*job_lines(frame.job), _pace(state, width)]
    older = [checkpoint_line(one) for one in frame.job.checkpoints[1:CHECKPOINT_LINES]]
    needed = len(head) + len(lines) + min(len(rows), WORKERS_FIRST) + JOURNAL_LINES + 5
    if height is None or height >= needed + len(older):
        lines[2:2] = older  # below the newest
    head += lines
    journal = [event_line(event) for event in frame.events]
    if height is None:
        return Group(*head, Text(), *worker_lines(rows, width), *_journal(journal, JOURNAL_LINES))
    # Empty lines before both tables, their headings, and the line of keys.
    room = max(LEAST_WORKERS, height - len(head) - 3)
    logged = min(JOURNAL_LINES, len(journal), max(0, room - LEAST_WORKERS - 2))
    page = room - (logged + 2 if logged else 0)
    if len(rows) < page:
        logged = min(len(journal), logged + page - len(rows)) if logged else 0
        page = len(rows)
    state.page = page = max(1, page)
    state.first = min(state.first, max(0, len(rows) - page))
    shown = rows[state.first : state.first + page]
    body = [Text(), *worker_lines(shown, width), *_journal(journal, logged)]
    space = [Text()] * max(0, height - len(head) - len(body) - 1)
    place = f"workers {state.first + 1:,} to {state.first + len(shown):,} of {len(rows):,}"
    return Group(*head, *body, *space, _foot(state, f"{place}, by {state.sort}"))


def sparkline(values: Sequence[float | None], width: int) -> str:
    """The newest values as bars, the highest of them full; a gap where there is none."""
    newest = values[-width:]
    most = max((value for value in newest if value is not None), default=0.0) or 1.0
    bars = (round((value or 0.0) / most * (len(BARS) - 1)) for value in newest)
    return "".join(
        " " if value is None else BARS[bar] for value, bar in zip(newest, bars, strict=True)
    )


def _pace(state: WatchState, width: int) -> Text:
    values = list(state.pace.values)
    if not values:
        text = "  pace        not known yet: it takes two reports of steps"
        return one_line((text, "dim"))
    bars, newest = sparkline(values, max(8, min(60, width - 50))), values[-1]
    highest = max(value for value in values if value is not None)
    return one_line(
        ("  pace        ", "dim"),
        (bars, "cyan"),
        "  no steps" if newest is None else f"  {newest:.2f} steps/s",
        (f"   highest {highest:.2f}", "dim"),
    )


def _journal(lines: list[Text], count: int) -> list[Text]:
    """The newest entries, newest last, with a heading."""
    return [Text(), Text("  journal", "dim"), *lines[-count:]] if count and lines else []


def event_line(event: JournalEvent) -> Text:
    """An entry of the journal in one line."""
    stamp = time.strftime("%H:%M:%S", time.localtime(event.at))
    return one_line(
        (f"  {stamp}  ", "dim"),
        (sentence(event), _STYLES.get(level_of(event.kind), "")),
    )


def _foot(state: WatchState, place: str) -> Text:
    return one_line(
        (" PAUSED ", "reverse") if state.paused else "",
        (f" {place}   {_KEY_HELP}", "dim"),
    )
