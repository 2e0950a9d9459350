"""Reading lanes from front to back while the next shards are fetched in the background."""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import pyarrow as pa

from ..order import Lane, Window
from .columns import Assemble, Block
from .source import Source

MAX_THREADS = 8


class ShardFetcher:
    """Reads shards of a source in threads.

    The threads start with the first shard, so that it can be made before a process forks.
    """

    def __init__(self, source: Source, assemble: Assemble, prefetch_shards: int) -> None:
        self.source = source
        self._assemble = assemble
        # Decoding keeps processors busy; waiting for a store does not.
        most = MAX_THREADS if source.is_remote else min(MAX_THREADS, os.cpu_count() or 1)
        threads = max(2, min(most, prefetch_shards))
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="strata-shards")

    def read(self, shard: int) -> Future[pa.Table]:
        """Begin to read a shard."""
        return self._threads.submit(self.source.read, shard)

    def assemble(self, window: Window, tables: list[Future[pa.Table]]) -> Future[Block]:
        """Begin to put a window's samples into order, once its shards are there."""
        return self._threads.submit(self._assembled, window, tables)

    def close(self) -> None:
        """Forget what was not begun, and wait for the rest."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _assembled(self, window: Window, tables: list[Future[pa.Table]]) -> Block:
        # Threads take work in order, so that the shards were begun before this was.
        places = window.places()
        numbers = self.source.kept.numbers(window.numbers())
        return self._assemble([table.result() for table in tables], places, numbers)


class _Ahead:
    """A window whose shards are being fetched."""

    __slots__ = ("block", "first", "tables", "window")

    def __init__(self, first: int, window: Window) -> None:
        self.first = first
        self.window = window
        self.tables: list[Future[pa.Table]] = []
        self.block: Future[Block] | None = None

    @property
    def stop(self) -> int:
        return self.first + len(self.window)

    @property
    def missing(self) -> int:
        return len(self.window.shards) - len(self.tables)


class LaneReader:
    """Reads a lane from ``start`` on, forward only, at most to ``stop``.

    In memory are the window that is being read and, of those behind it, at most
    ``prefetch_shards`` shards.
    """

    def __init__(
        self,
        lane: Lane,
        fetcher: ShardFetcher,
        start: int = 0,
        stop: int | None = None,
        prefetch_shards: int = 0,
    ) -> None:
        self._fetcher = fetcher
        self._prefetch_shards = prefetch_shards
        self._windows = lane.windows(start, stop)
        self._ahead: deque[_Ahead] = deque()
        self._first = start
        self._block: Block | None = None

    def read(self, start: int, stop: int) -> Block:
        """The samples at positions ``start`` to ``stop``, at least one."""
        parts = []
        at = start
        while at < stop:
            block = self._holding(at)
            begin = at - self._first
            end = min(len(block), stop - self._first)
            parts.append(block.slice(begin, end))
            at += end - begin
        return Block.concat(parts)

    def _holding(self, position: int) -> Block:
        """The block of the window that holds a position."""
        while self._block is None or position >= self._first + len(self._block):
            self._block = None
            self._next(position)
        return self._block

    def _next(self, position: int) -> None:
        window = self._take()
        while window.stop <= position:
            window = self._take()
        self._fetch(window, window.missing)
        block = window.block
        assert block is not None
        self._prefetch()
        self._first = window.first
        self._block = block.result()

    def _take(self) -> _Ahead:
        return self._ahead.popleft() if self._ahead else _Ahead(*next(self._windows))

    def _prefetch(self) -> None:
        room = self._prefetch_shards - sum(len(w.tables) for w in self._ahead)
        for window in self._ahead:
            room -= self._fetch(window, min(room, window.missing))
        while room > 0:
            following = next(self._windows, None)
            if following is None:
                return
            self._ahead.append(_Ahead(*following))
            room -= self._fetch(self._ahead[-1], min(room, self._ahead[-1].missing))

    def _fetch(self, ahead: _Ahead, count: int) -> int:
        """Begin to read some more shards of a window; returns how many."""
        done = len(ahead.tables)
        for shard in ahead.window.shards[done : done + count]:
            ahead.tables.append(self._fetcher.read(int(shard)))
        if ahead.block is None and not ahead.missing:
            ahead.block = self._fetcher.assemble(ahead.window, ahead.tables)
        return count
