"""Reading lanes from front to back while the next shards are fetched in the background."""

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
"""Small shards that lie one after the other are read together, up to so many bytes of files."""


class ShardFetcher:
    """Reads shards of a source in threads.

    The threads start with the first shard, so that it can be made before a process forks.
    """

    def __init__(self, source: Source, assemble: Assemble, prefetch_shards: int) -> None:
        self.source = source
        self._assemble = assemble
        # Decoding keeps processors busy; waiting for a store does not.
        most = MAX_THREADS if source.is_remote else min(MAX_THREADS, usable_cores())
        threads = max(2, min(most, prefetch_shards))
        self._threads = ThreadPool(threads, thread_name_prefix="strata-shards")
        together = READ_BYTES // max(1, source.mean_shard_bytes)
        self.together = max(1, min(together, prefetch_shards // threads))
        """How many neighbouring shards are read in one go."""

    def read(self, part: _Part) -> None:
        """Begin to read a part of a window."""
        self._threads.submit(self._read, part)

    def close(self) -> None:
        """Forget what was not begun, and wait for the rest."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _read(self, part: _Part) -> None:
        ahead = part.of
        try:
            part.table = self.source.read(part.shard, part.count)
            # Whoever reads the last part puts all of them together: nobody waits for the others.
            if ahead.arrived(part):
                ahead.block.set_result(self._assembled(ahead))
        except BaseException as exc:
            ahead.fail(exc)

    def _assembled(self, ahead: _Ahead) -> Block:
        tables = [part.table for part in ahead.parts]
        ahead.parts.clear()
        places = ahead.window.places()
        numbers = self.source.kept.numbers(ahead.window.numbers())
        return self._assemble(tables, places, numbers)


class _Part:
    """Some neighbouring shards of a window."""

    __slots__ = ("count", "of", "shard", "table")

    def __init__(self, of: _Ahead, shard: int, count: int) -> None:
        self.of = of
        self.shard = shard
        self.count = count
        self.table: pa.Table = None


class _Ahead:
    """A window whose shards are being fetched."""

    __slots__ = ("_lock", "_outstanding", "begun", "block", "first", "parts", "window")

    def __init__(self, first: int, window: Window) -> None:
        self.first = first
        self.window = window
        self.parts: list[_Part] = []
        self.begun = 0
        """How many of the shards are being read or have been."""
        self.block: Future[Block] = Future()
        self._lock = threading.Lock()
        self._outstanding = len(window.shards)
        """How many of the shards have not been read."""

    @property
    def stop(self) -> int:
        return self.first + len(self.window)

    @property
    def missing(self) -> int:
        return len(self.window.shards) - self.begun

    def begin(self, shard: int, count: int) -> _Part:
        """Shards that are now going to be read, in the order of the window."""
        part = _Part(self, shard, count)
        self.parts.append(part)
        self.begun += count
        return part

    def arrived(self, part: _Part) -> bool:
        """Take note that a part was read; says whether it was the last."""
        with self._lock:
            self._outstanding -= part.count
            return not self._outstanding

    def fail(self, error: BaseException) -> None:
        """Whoever waits for the block gets the error; the first one counts."""
        with self._lock:
            if not self.block.done():
                self.block.set_exception(error)


class LaneReader:
    """Reads a lane, or its part from ``begin`` to ``end``, forward only.

    In memory are the window that is being read and, of those behind it, at most
    ``prefetch_shards`` shards.
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
        self._ahead: deque[_Ahead] = deque()
        self._first = 0
        self._block: Block | None = None

    def read(self, start: int, stop: int) -> Block:
        """Samples ``start`` to ``stop``, at least one, counted from where the part begins."""
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
        """The block of the window that holds a position."""
        while self._block is None or position >= self._first + len(self._block):
            self._block = None
            self._next(position)
        return self._block

    def _next(self, position: int) -> None:
        window = self._take()
        while window.stop <= position:
            window = self._take()
        if not window.begun:
            # The first batch is not to compete with what is read ahead for the ones behind it.
            self._fetch(window, window.missing)
            wait((window.block,))
        self._fetch(window, window.missing)
        self._prefetch()
        self._first = window.first
        self._block = window.block.result()

    def _take(self) -> _Ahead:
        return self._ahead.popleft() if self._ahead else _Ahead(*next(self._windows))

    def _prefetch(self) -> None:
        room = self._prefetch_shards - sum(window.begun for window in self._ahead)
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
        for first, length in self._runs(ahead.window.shards[ahead.begun :][:count].tolist()):
            self._fetcher.read(ahead.begin(first, length))
        return count

    def _runs(self, shards: list[int]) -> Iterator[tuple[int, int]]:
        """Neighbouring shards together: the first and how many."""
        begin = 0
        for place in range(1, len(shards) + 1):
            adjoining = place < len(shards) and shards[place] == shards[place - 1] + 1
            if not adjoining or place - begin >= self._fetcher.together:
                yield shards[begin], place - begin
                begin = place


def _joined(windows: Iterator[tuple[int, Window]], most: int) -> Iterator[tuple[int, Window]]:
    """Windows of which up to ``most`` shards can be read together are made one."""
    held = next(windows, None)
    while held is not None:
        first, window = held
        held = None
        for position, following in windows:
            both = window.joined(following) if len(window.shards) < most else None
            if both is None:
                held = position, following
                break
            window = both
        yield first, window
