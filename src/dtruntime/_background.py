"""Work that other threads do: ahead, aside, or with something that is given back at the end.

Work side by side on plain threads.

Pools of ``concurrent.futures`` refuse work once the main thread has ended; a save that is still
running then has to be able to end.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Generic, TypeVar


def deadline_after(timeout: float | None) -> float | None:
    """When a timeout is over; ``None`` for never."""
    return None if timeout is None else time.monotonic() + timeout


def time_left(deadline: float | None) -> float | None:
    """How long it is until then."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())


T = TypeVar("T")


def usable_cores() -> int:
    """How many processors this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return os.cpu_count() or 1


def abandonable(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Begin blocking work on a thread of its own, which the interpreter's exit does not wait for.

    The future is done when the thread has ended its work; cancelling it does not stop the thread.
    """
    return _begun(work, name, daemon=True)


async def in_thread(work: Callable[[], T], name: str) -> T:
    """Do blocking work on a thread of its own, in the caller's context.

    Unlike the pool of ``asyncio.to_thread`` it is there for a loop that outlives the main thread.
    """
    context = contextvars.copy_context()
    return await _begun(lambda: context.run(work), name, daemon=None)


def _begun(work: Callable[[], T], name: str, daemon: bool | None) -> asyncio.Future[T]:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def finish(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            outcome: tuple[T | None, BaseException | None] = work(), None
        except BaseException as exc:
            outcome = None, exc
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(finish, *outcome)

    threading.Thread(target=run, name=name, daemon=daemon).start()
    return future


class ThreadPool(ThreadPoolExecutor):
    """A pool for threads that may outlive the main one.

    When the main thread has ended, the interpreter gives pools no more work. Whoever submits some
    then does it at once, in its own thread.
    """

    def submit(self, work: Callable[..., T], /, *args: Any, **options: Any) -> Future[T]:
        """Let a thread do the work."""
        try:
            return super().submit(work, *args, **options)
        except RuntimeError as exc:
            if "interpreter shutdown" not in str(exc):
                raise
        done: Future[T] = Future()
        try:
            done.set_result(work(*args, **options))
        except BaseException as exc:
            done.set_exception(exc)
        return done


class Hold:
    """Calls something when everybody has let go; whoever makes it holds it first."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._holders = 1
        self._then = then
        self._lock = threading.Lock()

    def take(self) -> None:
        """One more holds it."""
        with self._lock:
            self._holders += 1

    def drop(self) -> None:
        """One lets go."""
        with self._lock:
            self._holders -= 1
            over = self._holders == 0
        if over:
            self._then()


class Ahead(Generic[T]):
    """Items of an iterator that a thread makes ahead, at most ``depth`` of them.

    Where the interpreter has ended so far that it starts no threads, they are made when they are
    asked for.
    """

    _END = object()

    def __init__(self, items: Iterator[T], depth: int, name: str) -> None:
        self._items = items
        self._ready: queue.Queue[Any] = queue.Queue(depth)
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        with suppress(RuntimeError):
            thread.start()
            self._thread = thread

    def __iter__(self) -> Iterator[T]:
        if self._thread is None:
            yield from self._items
            return
        while True:
            item, error = self._ready.get()
            if error is not None:
                raise error
            if item is self._END:
                return
            yield item

    def close(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Stop making items, and wait for the thread; whoever asks for more is at the end.

        ``meanwhile`` is called again and again, to give the thread what it may be waiting for.
        """
        self._stopped.set()
        while self._thread is not None and self._thread.is_alive():
            self._drop()
            meanwhile()
            self._thread.join(0.01)
        self._drop()
        self._ready.put_nowait((self._END, None))

    def _drop(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._ready.get_nowait()

    def _run(self) -> None:
        try:
            for item in self._items:
                if not self._put(item, None):
                    return
            self._put(self._END, None)
        except BaseException as exc:
            self._put(None, exc)

    def _put(self, item: Any, error: BaseException | None) -> bool:
        while not self._stopped.is_set():
            try:
                self._ready.put((item, error), timeout=0.1)
            except queue.Full:
                continue
            return True
        return False


class _Lanes(Generic[T]):
    def __init__(self, items: Iterator[T], work: Callable[[T], None]) -> None:
        self._items = items
        self._work = work
        self._lock = threading.Lock()
        self.error: BaseException | None = None

    def run(self) -> None:
        """Take items until there are none, or until any lane has failed."""
        try:
            for item in self._taken():
                self._work(item)
        except BaseException as exc:
            self.error = self.error or exc

    def _taken(self) -> Iterator[T]:
        while self.error is None:
            with self._lock:
                try:
                    item = next(self._items)
                except StopIteration:
                    return
            yield item


def _join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join()


def side_by_side(items: Iterable[T], work: Callable[[T], None], lanes: int) -> None:
    """Call ``work`` on every item, on this thread and ``lanes - 1`` others.

    When a call fails no further items are taken, and the error is raised once all have ended.
    """
    shared = _Lanes(iter(items), work)
    others = [threading.Thread(target=shared.run, name="strata-lane") for _ in range(lanes - 1)]
    for thread in others:
        thread.start()
    shared.run()
    try:
        _join(others)
    except BaseException as exc:  # nobody is at work any more when an interrupt gets through
        shared.error = shared.error or exc
        _join(others)
    if shared.error is not None:
        raise shared.error
