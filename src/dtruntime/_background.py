"""Background work on threads: single calls, parallel maps, prefetching and queues of items.

Pools of ``concurrent.futures`` refuse work once the main thread has ended, and keep a process whose
storage hangs. A save that is still running then has to be able to end, or to be given up; so most
threads here are plain ones.
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

T = TypeVar("T")
R = TypeVar("R")
_END: Any = object()


def deadline_after(timeout: float | None) -> float | None:
    """When a timeout ends; None for never."""
    return None if timeout is None else time.monotonic() + timeout


def time_left(deadline: float | None) -> float | None:
    """How long it is until a deadline."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def usable_cores() -> int:
    """How many processors this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return os.cpu_count() or 1


def abandonable(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Start blocking work on a thread of its own, for which the interpreter's exit does not wait.

    The future is done when the work is; cancelling it does not stop the thread.
    """
    return _started(work, name, daemon=True)


async def in_thread(work: Callable[[], T], name: str) -> T:
    """Do blocking work on a thread of its own, in the caller's context.

    Unlike the pool of ``asyncio.to_thread`` it serves a loop that outlives the main thread.
    """
    context = contextvars.copy_context()
    return await _started(lambda: context.run(work), name, daemon=None)


def _started(work: Callable[[], T], name: str, daemon: bool | None) -> asyncio.Future[T]:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def finish(set_outcome: Callable[[Any], None], outcome: Any) -> None:
        if not future.done():
            set_outcome(outcome)

    def run() -> None:
        try:
            outcome: tuple[Any, Any] = future.set_result, work()
        except BaseException as exc:
            outcome = future.set_exception, exc
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(finish, *outcome)

    threading.Thread(target=run, name=name, daemon=daemon).start()
    return future


class ThreadPool(ThreadPoolExecutor):
    """A pool for threads that may outlive the main one.

    Once the main thread has ended, the interpreter refuses work for pools. `submit` then does it
    at once, in the caller's thread.
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
    """Calls a function when all holders have let go; its maker is the first holder."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._holders = 1
        self._then = then
        self._lock = threading.Lock()

    def take(self) -> None:
        """Add a holder."""
        with self._lock:
            self._holders += 1

    def drop(self) -> None:
        """Remove a holder."""
        with self._lock:
            self._holders -= 1
            over = self._holders == 0
        if over:
            self._then()


class Ahead(Generic[T]):
    """Items of an iterator, made ahead by a thread; at most ``depth`` of them wait.

    Once the interpreter starts no more threads, they are made on demand.
    """

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
            if item is _END:
                return
            yield item

    def close(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Stop making items, and wait for the thread; the iteration ends.

        ``meanwhile`` is called repeatedly, to give the thread what it may be waiting for.
        """
        self._stopped.set()
        while self._thread is not None and self._thread.is_alive():
            _emptied(self._ready)
            meanwhile()
            self._thread.join(0.01)
        _emptied(self._ready)
        self._ready.put_nowait((_END, None))

    def _run(self) -> None:
        try:
            for item in self._items:
                if not self._put(item, None):
                    return
            self._put(_END, None)
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


class Consumer(Generic[T]):
    """A thread that consumes items while more are put; at most ``depth`` of them wait.

    ``consume`` gets an iterator of the items, and ``drop`` those that are left when it fails.
    ``RuntimeError`` once the interpreter starts no more threads.
    """

    def __init__(
        self,
        consume: Callable[[Iterator[T]], None],
        depth: int,
        name: str,
        drop: Callable[[T], None] = lambda item: None,
    ) -> None:
        self._consume = consume
        self._drop = drop
        self._items: queue.Queue[Any] = queue.Queue(depth)
        self._ended = False
        """Whether the last item was taken."""
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, item: T) -> None:
        """Have an item consumed; raises the error with which consuming has failed."""
        self._items.put(item)
        if self._error is not None:
            raise self._error

    def close(self, error: Exception | None = None) -> None:
        """Wait until all is consumed; raises if that failed.

        With an ``error`` the iterator of ``consume`` raises it, and nothing is raised here.
        """
        self._items.put(_END if error is None else error)
        self._thread.join()
        if self._error is not None and error is None:
            raise self._error

    def _run(self) -> None:
        try:
            self._consume(self._taken())
        except BaseException as exc:
            self._error = exc
        while not self._ended:  # `put` must not wait for ever
            item = self._take()
            if not self._ended:
                self._drop(item)

    def _taken(self) -> Iterator[T]:
        while (item := self._take()) is not _END:
            if self._ended:
                raise item
            yield item
            del item  # the memory of an item must not be kept while this waits for the next

    def _take(self) -> Any:
        item = self._items.get()
        self._ended = item is _END or isinstance(item, Exception)
        return item


def _emptied(items: queue.Queue[Any]) -> None:
    with suppress(queue.Empty):
        while True:
            items.get_nowait()


def side_by_side(items: Iterable[T], work: Callable[[T], R], lanes: int) -> list[R]:
    """Call ``work`` on every item, on this thread and ``lanes - 1`` others; return the results.

    When a call fails no further items are taken, and the error is raised once all have ended.
    """
    numbered = enumerate(items)
    lock = threading.Lock()
    results: dict[int, R] = {}
    errors: list[BaseException] = []

    def run() -> None:
        try:
            while not errors:
                with lock:
                    number, item = next(numbered, (-1, _END))
                if item is _END:
                    return
                results[number] = work(item)
        except BaseException as exc:
            errors.append(exc)

    others: list[threading.Thread] = []
    # Python 3.12 starts no thread once the main thread has ended: this one does the work then.
    with suppress(RuntimeError):
        for _ in range(lanes - 1):
            thread = threading.Thread(target=run, name="strata-lane")
            thread.start()
            others.append(thread)
    run()
    for _ in range(2):  # all threads have ended when an interrupt gets through
        try:
            for thread in others:
                thread.join()
        except BaseException as exc:
            errors.append(exc)
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(results))]
