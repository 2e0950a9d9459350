"""Preemption notices: SIGTERM or a file that appears, and the grace period that follows."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from enum import IntEnum
from types import FrameType
from typing import Any, TypeVar

from ..telemetry import EventLog

log = EventLog("run")

PREEMPTED = 143
"""The exit status of a process that SIGTERM has ended."""
LOOK_SECONDS = 0.5
WATCH_SECONDS = 0.1
RESERVE_SECONDS = 3.0
"""This much of the grace period, or a quarter of it, is kept for leaving without a checkpoint."""
LEAST_SECONDS = 1.0
"""The least time to leave in."""

R = TypeVar("R")


class Leaving(BaseException):
    """A notice came while this process waited, or its time is up.

    Not an ``Exception``: like ``KeyboardInterrupt`` it comes from outside, wherever the run is.
    """


class Interrupts(IntEnum):
    """When a notice ends what the run's thread is doing."""

    NEVER = 0
    """The program's own code runs."""
    WHEN_LATE = 1
    """When the grace period is nearly over: until then a checkpoint may be saved."""
    AT_ONCE = 2
    """There is nothing to save."""


class PreemptionNotices:
    """Watches for notices that this process is going to be stopped.

    The first SIGTERM is a notice; the second one does what it would do without a run. The handler
    only takes a note, unless `during` allows it to interrupt the run.

    With ``grace_seconds``, a process that still runs that long after a notice is ended, whatever
    it does: also in the program's own code, and at the exit of the interpreter.
    """

    def __init__(
        self,
        file: str | os.PathLike[str] | None,
        *,
        signals: bool,
        grace_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = file or os.environ.get("STRATA_PREEMPTION_FILE") or None
        self._signals = signals
        self._grace = grace_seconds
        self._clock = clock
        self._looked = -LOOK_SECONDS
        self._previous: Any = None
        self._installed = False
        self._process = 0
        self._signalled = False
        self._waking = False
        self._since: float | None = None
        self._interrupts = Interrupts.NEVER
        self._lock = threading.RLock()
        self._removed = threading.Event()
        self._exiting = False
        self.reason = ""
        """What the notice was."""
        self.progress: Callable[[], Mapping[str, object]] = dict
        """How far the run is, for the last log entry of a process whose time is up."""

    @property
    def seconds(self) -> float:
        """The time since the notice."""
        return 0.0 if self._since is None else self._clock() - self._since

    @property
    def is_late(self) -> bool:
        """Whether there is no time left but to leave."""
        if self._since is None or self._grace is None:
            return False
        return self.seconds > self._grace - min(RESERVE_SECONDS, self._grace / 4)

    def seconds_left(self, most: float) -> float:
        """``most``, or what is left of the grace period after a notice."""
        if self._since is None or self._grace is None:
            return most
        return min(most, max(LEAST_SECONDS / 2, self._grace - self.seconds))

    def install(self) -> None:
        """Listen for SIGTERM, which only the main thread can, and for the file."""
        self._process = os.getpid()
        if self._signals and threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._on_signal)
            self._installed = True
        if self._grace is not None:
            threading.Thread(target=self._watch, name="strata-notices", daemon=True).start()

    def remove(self) -> None:
        """Stop listening. After a notice the exit of the interpreter is still bounded."""
        if self._since is not None and self._grace is not None:
            try:
                # The function registered last is called first.
                threading._register_atexit(self._exits)  # type: ignore[attr-defined]
            except RuntimeError:
                self._exits()
        else:
            # Breaks a cycle, so that the run is freed without garbage collection. That would end
            # the queues of a DataLoader before its processes, for which torch then waits 5 s each.
            self.progress = dict
        self._removed.set()
        with self._lock:
            if self._installed:
                self._installed = False
                signal.signal(signal.SIGTERM, self._previous or signal.SIG_DFL)

    def look(self) -> bool:
        """Whether there is a notice; looks for the file every half second."""
        if self._since is not None:
            return True
        now = self._clock()
        if self._file and now - self._looked >= LOOK_SECONDS:
            self._looked = now
            if os.path.exists(self._file):
                self._since, self.reason = now, f"{os.fspath(self._file)} appeared"
        return self._since is not None

    @contextmanager
    def during(self, interrupts: Interrupts) -> Iterator[None]:
        """Raise `Leaving` in a block of the run's thread when it is time to leave."""
        before, self._interrupts = self._interrupts, interrupts
        try:
            self.check()
            yield
        finally:
            self._interrupts = before

    def check(self) -> None:
        """Raise `Leaving` if it is time to leave; for waits in threads that get no signals."""
        if self._interrupts is not Interrupts.NEVER and self.look() and self._may_interrupt():
            raise Leaving(self.reason)

    def _may_interrupt(self) -> bool:
        if self._interrupts is Interrupts.WHEN_LATE:
            return self.is_late
        return self._interrupts is Interrupts.AT_ONCE

    def wait(self, future: Future[R]) -> R:
        """Wait for work on the I/O thread; it is cancelled when it is time to leave."""
        try:
            while True:
                try:
                    return future.result(WATCH_SECONDS)
                except TimeoutError:
                    if future.done():
                        raise
                self.check()
        except BaseException:
            future.cancel()
            raise

    def pause(self, seconds: float) -> None:
        """Sleep, unless it is time to leave."""
        time.sleep(seconds)
        self.check()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process or (self._signalled and not self._waking):
            # A forked child, or the second signal.
            self.remove()
            os.kill(os.getpid(), number)
            return
        if not self._waking:
            self._signalled = True
            if self._since is None:
                self._since, self.reason = self._clock(), "SIGTERM"
        self._waking = False
        self.check()

    def _exits(self) -> None:
        self._exiting = True

    # On a thread of its own

    def _watch(self) -> None:
        """Interrupt the run's thread when it is time to leave; end the process at last."""
        while not self.look():
            if self._removed.wait(WATCH_SECONDS) and self._since is None:
                return
        while not (self._is_over() and (self._is_leaving() or not self._removed.is_set())):
            time.sleep(WATCH_SECONDS)
            self._interrupt()
        self._end()

    def _interrupt(self) -> None:
        """Run the handler again in the main thread: it raises if it may."""
        if self._may_interrupt():
            main = threading.main_thread().ident
            with self._lock:
                ours = self._installed and signal.getsignal(signal.SIGTERM) == self._on_signal
                if ours and not self._waking and main is not None:
                    self._waking = True
                    signal.pthread_kill(main, signal.SIGTERM)

    def _is_over(self) -> bool:
        assert self._grace is not None
        return self.seconds > max(self._grace, LEAST_SECONDS)

    def _is_leaving(self) -> bool:
        """Whether the interpreter exits. A program that goes on without its run is left alone."""
        return self._exiting or not threading.main_thread().is_alive()

    def _end(self) -> None:
        # In a thread: what does not end may hold the lock of a log or of a stream.
        logging = threading.Thread(target=self._log_end, daemon=True)
        logging.start()
        logging.join(LEAST_SECONDS)
        os._exit(PREEMPTED)

    def _log_end(self) -> None:
        log.error(
            "run.grace_over",
            reason=self.reason,
            grace_seconds=self._grace,
            doing="the process did not end by itself, and is ended",
            **self.progress(),
        )
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
