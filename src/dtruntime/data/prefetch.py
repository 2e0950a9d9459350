"""Prefetching: shards are read in background threads, ahead of the batch being made."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, wait

import pyarrow as pa

from .._background import ThreadPool, usable_cores
from .columns import Assemble, Block
from .order import Lane, Window
from .source import Source

MAX_THREADS = 8
READ_BYTES = 8 * 2**20
"""Small consecutive shards are read together, up to this many bytes of files."""


class ShardFetcher:
    """Reads shards of a source in threads, which start with the first shard (after a fork)."""

    def __init__(self, source: Source, assemble: Assemble, prefetch_shards: int) -> None:
        self.source = source
        self._assemble = assemble
        # Decoding keeps processors busy; waiting for an object store does not.
        most = MAX_THREADS if source.is_remote else min(MAX_THREADS, usable_cores())
        threads = max(2, min(most, prefetch_shards))
        self._threads = ThreadPool(threads, thread_name_prefix="strata-shards")
        together = READ_BYTES // max(1, source.mean_shard_bytes)
        self.together = max(1, min(together, prefetch_shards // threads))
        """How many consecutive shards are read at once."""

    def read(self, pending: _PendingWindow, shard: int, count: int) -> None:
        """Begin to read ``count`` shards of a window, in the window's order."""
        place = pending.add(count)
        self._threads.submit(self._read, pending, place, shard, count)

    def close(self) -> None:
        """Cancel what has not begun, and wait for the rest."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _read(self, pending: _PendingWindow, place: int, shard: int, count: int) -> None:
        try:
            table = self.source.read(shard, count)
            # Whoever reads the last shards assembles the block: no thread waits for another.
            if pending.arrived(place, table, count):
                pending.block.set_result(self._assembled(pending))
        except BaseException as exc:
            pending.fail(exc)

    def _assembled(self, pending: _PendingWindow) -> Block:
        tables, pending.tables = pending.tables, []
        window = pending.window
        numbers = self.source.kept.numbers(window.numbers())
        return self._assemble(tables, window.places(), numbers)


class _PendingWindow:
    """A window whose shards are being fetched."""

    def __init__(self, first: int, window: Window) -> None:
        self.first = first
        self.stop = first + len(window)
        self.window = window
        self.tables: list[pa.Table] = []
        self.begun = 0
        """How many of the shards are being read or have been."""
        self.block: Future[Block] = Future()
        self._unread = len(window.shards)
        self._lock = threading.Lock()

    @property
    def missing(self) -> int:
        return len(self.window.shards) - self.begun

    def add(self, count: int) -> int:
        """The place for the table of the next ``count`` shards."""
        self.tables.append(None)
        self.begun += count
        return len(self.tables) - 1

    def arrived(self, place: int, table: pa.Table, count: int) -> bool:
        """Keep a table; whether it was the last one missing."""
        with self._lock:
            self.tables[place] = table
            self._unread -= count
            return not self._unread

    def fail(self, error: BaseException) -> None:
        """Fail the block, unless it has failed before."""
        with self._lock:
            if not self.block.done():
                self.block.set_exception(error)


class LaneReader:
    """Reads a lane, or its part from ``begin`` to ``end``, forward only.

    In memory are the current window and at most ``prefetch_shards`` shards of the following ones.
    """

    def __init__(
        self,
        lane: Lane,
        fetcher: ShardFetcher,
        begin: int = 0,
        end: int | None = None,
        prefetch_shards: int = 0,
    ) -> None:
        self._lane = lane
        self._fetcher = fetcher
        self._begin = begin
        self._end = end
        self._prefetch_shards = prefetch_shards
        self._windows: Iterator[tuple[int, Window]] = iter(())
        self._is_open = False
        self._ahead: deque[_PendingWindow] = deque()
        self._first = 0
        self._block: Block | None = None

    def read(self, start: int, stop: int) -> Block:
        """Samples ``start`` to ``stop``, at least one, counted from ``begin``."""
        at, end = self._begin + start, self._begin + stop
        if not self._is_open:
            self._windows = _joined(self._lane.windows(at, self._end), self._fetcher.together)
            self._is_open = True
        parts = []
        while at < end:
            block = self._holding(at)
            first, last = at - self._first, min(len(block), end - self._first)
            parts.append(block.slice(first, last))
            at += last - first
        return Block.concat(parts)

    def _holding(self, position: int) -> Block:
        """The block of the window that contains a position."""
        while self._block is None or position >= self._first + len(self._block):
            self._block = None
            self._next(position)
        return self._block

    def _next(self, position: int) -> None:
        window = self._take()
        while window.stop <= position:
            window = self._take()
        if not window.begun:
            # The first batch must not compete with prefetching for the ones after it.
            self._fetch(window, window.missing)
            wait((window.block,))
        self._fetch(window, window.missing)
        self._prefetch()
        self._first = window.first
        self._block = window.block.result()

    def _take(self) -> _PendingWindow:
        return self._ahead.popleft() if self._ahead else _PendingWindow(*next(self._windows))

    def _prefetch(self) -> None:
        room = self._prefetch_shards - sum(window.begun for window in self._ahead)
        for window in self._ahead:
            room -= self._fetch(window, min(room, window.missing))
        while room > 0:
            following = next(self._windows, None)
            if following is None:
                return
            self._ahead.append(_PendingWindow(*following))
            room -= self._fetch(self._ahead[-1], min(room, self._ahead[-1].missing))

    def _fetch(self, pending: _PendingWindow, count: int) -> int:
        """Begin to read ``count`` more shards of a window; returns ``count``."""
        for first, length in self._runs(pending.window.shards[pending.begun :][:count].tolist()):
            self._fetcher.read(pending, first, length)
        return count

    def _runs(self, shards: list[int]) -> Iterator[tuple[int, int]]:
        """Runs of consecutive shards: the first and how many."""
        begin = 0
        for place in range(1, len(shards) + 1):
            consecutive = place < len(shards) and shards[place] == shards[place - 1] + 1
            if not consecutive or place - begin >= self._fetcher.together:
                yield shards[begin], place - begin
                begin = place


def _joined(windows: Iterator[tuple[int, Window]], most: int) -> Iterator[tuple[int, Window]]:
    """Join windows that can be read together, up to ``most`` shards."""
    current = next(windows, None)
    while current is not None:
        first, window = current
        current = None
        for following in windows:
            both = window.joined(following[1]) if len(window.shards) < most else None
            if both is None:
                current = following
                break
            window = both
        yield first, window
