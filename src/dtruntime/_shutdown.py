"""The end of the process: background work is finished first, or its loss is reported.

Python ends a process in stages: functions of ``threading._register_atexit``, then the join of all
non-daemon threads, then functions of ``atexit``, then the output streams; daemon threads are cut
off wherever they are. A child of ``multiprocessing`` may be gone after the second stage. Work that
must not be lost is done by daemon threads, which can be given up if storage hangs, and registered
here:

1. When the main thread ends, it waits for work in progress.
2. For what other threads begin afterwards a *keeper* waits, a non-daemon thread that lives only
   while something is in progress.
3. What functions of ``atexit`` began is waited for; from then on nothing is accepted.

A wait ends when there was no progress for as long as the work allows, or at the second Ctrl-C. What
is lost is then written to stderr, and the exit status is 120: Python's own for an error in the
cleanup after the program. Forked children of ``multiprocessing`` exit with 1.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - its pools have to end after our first stage
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from typing import Any, Protocol

TICK = 0.1
CLEANUP_FAILED = 120
NOTICE_SECONDS = 2.0
"""An exit that takes longer says what it waits for."""


class Work(Protocol):
    """Background work of one owner. Any thread may call these."""

    @property
    def exit_seconds(self) -> float:
        """How long the exit waits for it without progress."""

    @property
    def is_busy(self) -> bool:
        """Whether something is in progress."""

    @property
    def is_needed(self) -> bool:
        """Whether something is in progress, left for the end, or has failed unreported."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is in progress; returns whether that is so."""

    def finish(self) -> None:
        """Wait for what is in progress, and do what is left for the end."""

    def unfinished(self) -> list[str]:
        """Names of what is in progress, such as "the checkpoint of step 5 in /data"."""

    def failures(self) -> list[str]:
        """A sentence for each failure that has not been reported."""


class Stage(IntEnum):
    """How far the exit of the process has come."""

    RUNNING = 0
    MAIN_ENDED = 1
    JOINING = 2
    CLOSED = 3


class Shutdown:
    """The work that this process has to finish before it exits."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], None]] = []
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._stage = Stage.RUNNING
        self._held: dict[int, Work] = {}
        self._keeper: threading.Thread | None = None
        self._finishing: dict[int, threading.Event] = {}
        self._moved = time.monotonic()
        self._given_up = ""
        """Why waiting was given up."""
        self._interrupts = 0
        self._losses: list[str] = []
        self._reported = 0
        self._reporting = threading.RLock()

    def hold(self, work: Work) -> None:
        """Register work that has just become busy, until nothing is left to do for it."""
        with self._lock:
            self._held[id(work)] = work
            if self._keeper is None and not self._given_up:
                keeper = threading.Thread(target=self._keep, name="strata-keeper", daemon=False)
                try:
                    keeper.start()
                except RuntimeError:  # too late for threads: the last stage waits for it
                    return
                self._keeper = keeper

    def release(self, work: Work) -> None:
        """Unregister work that its owner has ended."""
        with self._lock:
            self._drop(id(work))

    def moved(self) -> None:
        """Note progress."""
        self._moved = time.monotonic()

    def refusal(self) -> str:
        """Why this thread cannot begin work that has to be finished; empty if it can."""
        if self._stage is Stage.CLOSED:
            return "the program has ended: save before its exit functions have"
        if self._given_up:
            return f"the program is ending, and what it was storing was given up: {self._given_up}"
        thread = threading.current_thread()
        if self._stage >= Stage.MAIN_ENDED and thread.daemon:
            return (
                f"the main thread has ended, and the daemon thread {thread.name!r} is about to be "
                "cut off: join it before the program ends, or start it with daemon=False"
            )
        return ""

    def lose(self, sentence: str) -> None:
        """Note a loss; it is reported at the end, or at once if that has begun."""
        with self._lock:
            self._losses.append(sentence)
        if self._stage is not Stage.RUNNING:
            self._report()

    def at_end(self, callback: Callable[[], None]) -> None:
        """Call a function when all work is done; the last one registered is called first."""
        self._callbacks.append(callback)

    @property
    def is_ending(self) -> bool:
        """Whether the main thread has ended."""
        return self._stage is not Stage.RUNNING

    def main_ended(self) -> None:
        """The first stage, in the main thread."""
        self._stage = max(self._stage, Stage.MAIN_ENDED)
        self._settle()
        self._report()
        self._stage = max(self._stage, Stage.JOINING)
        if _leaves_without_exit_functions() and (self._callbacks or self._held):
            threading.Thread(target=self._end_child, name="strata-end", daemon=False).start()

    def ended(self) -> None:
        """The last stage."""
        self._stage = max(self._stage, Stage.JOINING)
        self._settle()
        self._stage = Stage.CLOSED
        self._settle()  # what came in between
        with self._lock:
            busy = [work for work in self._held.values() if work.is_busy]
        self._give_up(busy, self._given_up or "the program has ended")
        self._report()
        self._call_back()

    def after_fork_in_child(self) -> None:
        """Forget the parent's work: its threads do not exist here."""
        self._reset()

    def _keep(self) -> None:
        """Live while something is in progress, so that the interpreter waits."""
        while True:
            with self._lock:
                busy = [work for work in self._held.values() if work.is_busy]
                if not busy or self._given_up:
                    self._keeper = None
                    self._let_go()
                    break
            if self._stage >= Stage.JOINING:
                self._settle()
            else:
                busy[0].wait(1.0)
        if self._stage >= Stage.JOINING:
            self._report()

    def _end_child(self) -> None:
        """The last stage of a process without exit functions, after all threads have ended."""
        own = threading.main_thread(), threading.current_thread()
        while others := [t for t in threading.enumerate() if not t.daemon and t not in own]:
            for thread in others:
                thread.join()
        self._settle()
        self._report()
        self._call_back()

    def _settle(self) -> None:
        """Finish registered work, as long as there is progress and nobody gives it up."""
        began = time.monotonic()
        self._moved = max(self._moved, began)
        noticed = False
        while not self._given_up:
            try:
                pending = self._begin_to_finish()
                if not pending:
                    break
                self._wait_for(pending[0])
                now = time.monotonic()
                if not noticed and now - began > NOTICE_SECONDS:
                    noticed = True
                    _say(f"the program ends when this is stored: {_names(pending)}")
                seconds = max(work.exit_seconds for work in pending)
                if now - self._moved > seconds:
                    self._give_up(pending, f"nothing was written for {seconds:g} s")
            except KeyboardInterrupt:
                self._interrupted()
        with self._lock:
            self._let_go()

    def _begin_to_finish(self) -> list[Work]:
        """Have each work finished by a thread of its own; returns those that are not yet."""
        with self._lock:
            needed = [work for work in self._held.values() if work.is_needed]
        for work in needed:
            ended = self._finishing.get(id(work))
            if ended is None or (ended.is_set() and work.is_busy):
                self._finishing[id(work)] = _finished(work)
        return [work for work in needed if not self._finishing[id(work)].is_set()]

    def _wait_for(self, work: Work) -> None:
        ended = self._finishing[id(work)]
        if isinstance(ended, _Unaided):
            ended.done = work.wait(TICK)
        else:
            ended.wait(TICK)

    def _interrupted(self) -> None:
        with self._lock:
            busy = [work for work in self._held.values() if work.unfinished()]
        self._interrupts += 1
        if self._interrupts > 1:
            self._give_up(busy, "it was given up by Ctrl-C")
        elif busy:
            _say(f"still storing {_names(busy)}: press Ctrl-C again to give it up")

    def _give_up(self, works: list[Work], why: str) -> None:
        self._given_up = why
        lost = [f"{name} is not stored: {why}" for work in works for name in work.unfinished()]
        with self._lock:
            self._losses += lost
            for work in works:
                self._drop(id(work))

    def _let_go(self) -> None:
        """Drop work for which nothing is left to do; the lock is held."""
        for key, work in list(self._held.items()):
            if not work.is_needed:
                self._drop(key)

    def _drop(self, key: int) -> None:
        self._held.pop(key, None)
        self._finishing.pop(key, None)

    def _report(self) -> None:
        """Write what is lost to stderr, and set the exit status.

        The last stage waits here for a keeper that reports: the interpreter would cut it off
        between the two.
        """
        with self._reporting:
            with self._lock:
                for key, work in list(self._held.items()):
                    if failures := work.failures():
                        self._losses += failures
                        if not work.is_busy:
                            self._drop(key)
                fresh, self._reported = self._losses[self._reported :], len(self._losses)
            if fresh:
                _fail_the_process()
            for sentence in fresh:
                _say(sentence)

    def _call_back(self) -> None:
        while self._callbacks:
            try:
                self._callbacks.pop()()
            except Exception:
                traceback.print_exc()


class _Unaided(threading.Event):
    """Set when work is done, if no thread could be started to finish it."""

    done = False

    def is_set(self) -> bool:
        return self.done


def _finished(work: Work) -> threading.Event:
    """Finish work in a thread that can be abandoned; the event is set when it is done."""
    ended = threading.Event()

    def finish() -> None:
        try:
            work.finish()
        finally:
            ended.set()

    try:
        threading.Thread(target=finish, name="strata-finish", daemon=True).start()
    except RuntimeError:  # too late for threads, which includes those that work may need
        return _Unaided()
    return ended


def _names(works: list[Work]) -> str:
    return ", ".join(name for work in works for name in work.unfinished()) or "an upload"


def _leaves_without_exit_functions() -> bool:
    """Whether this is a child of multiprocessing, which may not call exit functions."""
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def _say(sentence: str) -> None:
    """Write to stderr, even if no log is set up."""
    with suppress(AttributeError, OSError, ValueError):
        print(f"strata: {sentence}\n", end="", file=sys.stderr, flush=True)


class _FailingStream:
    """A stream whose last flush fails, for which Python sets the exit status."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def closed(self) -> bool:
        """Always False, or nobody would flush it."""
        return False

    def flush(self) -> None:
        """Flush; raises in the last flush by the interpreter or multiprocessing."""
        if self._stream is not None and not getattr(self._stream, "closed", False):
            self._stream.flush()
        if _is_last_flush():
            raise SystemExit(CLEANUP_FAILED)


def _is_last_flush() -> bool:
    try:
        caller = sys._getframe(2)
    except ValueError:
        return True  # called by the interpreter itself
    return caller.f_globals.get("__name__") == "multiprocessing.util"


def _fail_the_process() -> None:
    """Set the exit status of a failed cleanup; nothing else changes."""
    if not isinstance(sys.stderr, _FailingStream):
        sys.stderr = _FailingStream(sys.stderr)


shutdown = Shutdown()
"""The exit of this process."""

threading._register_atexit(shutdown.main_ended)  # type: ignore[attr-defined]
atexit.register(shutdown.ended)
os.register_at_fork(after_in_child=shutdown.after_fork_in_child)
