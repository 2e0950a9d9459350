"""Work that other threads do: ahead, or with something that is given back at the end."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


def usable_cores() -> int:
    """How many processors this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return os.cpu_count() or 1


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
    """Items of an iterator that a thread makes ahead, at most ``depth`` of them."""

    _END = object()

    def __init__(self, items: Iterator[T], depth: int, name: str) -> None:
        self._items = items
        self._ready: queue.Queue[Any] = queue.Queue(depth)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        while True:
            item, error = self._ready.get()
            if error is not None:
                raise error
            if item is self._END:
                return
            yield item

    def close(self) -> None:
        """Stop making items, and wait for the thread."""
        self._stopped.set()
        while self._thread.is_alive():
            while not self._ready.empty():
                self._ready.get_nowait()
            self._thread.join(0.01)

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
