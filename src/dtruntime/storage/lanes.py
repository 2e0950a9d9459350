"""Work side by side on plain threads.

Pools of ``concurrent.futures`` refuse work once the main thread has ended; a save that is still
running then has to be able to end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


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
