"""Copies what a state consists of into slabs: the part of a save that keeps the caller."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from .._background import Hold, usable_cores
from .file_format.chunking import Layout, grouped, packed
from .save.pack_writer import Group
from .save.staging import SLAB, StagingPool, Turn

THREADS = 8
"""So many threads copy at most: a few use all the bandwidth that memory has."""
PIECE = 4 * 2**20
"""So much is copied by a thread before it takes the next piece."""
SMALL = 16 * 2**10
"""What is not larger is copied at once: to hand it to a thread takes longer."""


def staged(
    layout: Layout,
    sources: Sequence[Any],
    pool: StagingPool,
    turn: Turn,
    before_waiting: Callable[[], None] = lambda: None,
) -> Generator[Group, None, None]:
    """Copy buffers into slabs, one slab after the other, and give up the turn.

    Slabs come back when their groups are written: ``before_waiting`` for one has to see to that.
    """
    with turn, CopyThreads() as threads:
        filler = _Filler(layout, sources, threads)
        for bounds in packed(layout.bounds, SLAB):
            slab = pool.borrow(turn, before_waiting)
            size = bounds[-1] - bounds[0]
            try:
                filler.fill(slab.view[:size], bounds[0])
            except BaseException:
                pool.give_back(slab)
                raise
            yield from _groups(bounds, slab.view, partial(pool.give_back, slab))


def _groups(
    bounds: Sequence[int], view: memoryview, give_back: Callable[[], None]
) -> Iterator[Group]:
    """The groups of a slab, which is given back when all that were taken are done."""
    hold = Hold(give_back)
    try:
        for group in grouped(bounds):
            piece = view[group[0] - bounds[0] : group[-1] - bounds[0]]
            hold.take()
            yield Group(group[0], group, piece, hold.drop, steady=True)
    finally:
        hold.drop()


class DeviceSource(ABC):
    """Memory of a device, which is copied in the background of the device."""

    nbytes: int

    @abstractmethod
    def copy_part(self, first: int, target: memoryview) -> None:
        """Begin to copy the bytes from ``first`` on."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until what was begun is there."""


class CopyThreads:
    """Copies memory with as many threads as pay; the caller's is one of them."""

    def __init__(self) -> None:
        self._others = min(THREADS, usable_cores()) - 1
        self._threads: ThreadPoolExecutor | None = None

    def __enter__(self) -> CopyThreads:
        return self

    def __exit__(self, *_: object) -> None:
        if self._threads is not None:
            self._threads.shutdown()

    def copy(self, copies: Sequence[tuple[memoryview, memoryview]]) -> None:
        """Copy from the second to the first memory of each pair, all of equal lengths."""
        pieces = deque(_pieces(copies))
        helpers = min(self._others, len(pieces) - 1)
        if helpers <= 0:
            _copy_all(pieces)
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._others, thread_name_prefix="strata-copy")
        jobs = self._helpers(pieces, helpers)
        try:
            _copy_all(pieces)
        finally:
            # Nobody copies any more when this returns, also when it was interrupted.
            pieces.clear()
            for job in jobs:
                # One that has not begun yet has nothing left to do.
                if not job.cancel():
                    job.result()

    def _helpers(self, pieces: deque[Any], count: int) -> list[Future[None]]:
        assert self._threads is not None
        try:
            return [self._threads.submit(_copy_all, pieces) for _ in range(count)]
        except RuntimeError:  # pools take nothing once the main thread has ended
            return []


def _pieces(
    copies: Sequence[tuple[memoryview, memoryview]],
) -> Iterator[list[tuple[memoryview, memoryview]]]:
    """The same copies: large ones cut up, small ones put together."""
    together: list[tuple[memoryview, memoryview]] = []
    size = 0
    for target, source in copies:
        for start in range(0, target.nbytes, PIECE):
            stop = min(start + PIECE, target.nbytes)
            together.append((target[start:stop], source[start:stop]))
            size += stop - start
            if size >= PIECE:
                yield together
                together, size = [], 0
    if together:
        yield together


def _copy_all(pieces: deque[list[tuple[memoryview, memoryview]]]) -> None:
    """Copy pieces until none is left; several threads may do so."""
    with suppress(IndexError):
        while True:
            for target, source in pieces.popleft():
                np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


class _Filler:
    """Fills memory with a stretch of the stream at a time, front to back."""

    def __init__(self, layout: Layout, sources: Sequence[Any], threads: CopyThreads) -> None:
        self._offsets = layout.offsets
        self._sources = sources
        self._threads = threads
        self._next = 0
        self._view: memoryview | None = None
        self._copies: list[tuple[memoryview, memoryview]] = []
        self._devices: set[DeviceSource] = set()

    def fill(self, target: memoryview, start: int) -> None:
        """Copy what lies from ``start`` on; gaps become zeros."""
        try:
            self._fill(target, start)
        finally:
            for device in self._devices:
                device.wait()
            self._devices.clear()

    def _fill(self, target: memoryview, start: int) -> None:
        stop = start + target.nbytes
        at = start
        while self._next < len(self._sources):
            source, offset = self._sources[self._next], self._offsets[self._next]
            end = offset + source.nbytes
            if offset >= stop:
                break
            first, last = max(offset, start), min(end, stop)
            if at < first:
                target[at - start : first - start] = bytes(first - at)
            self._copy(source, first - offset, target[first - start : last - start])
            at = max(at, last)
            if end > stop:
                break
            self._next, self._view = self._next + 1, None
        if at < stop:
            target[at - start :] = bytes(stop - at)
        copies, self._copies = self._copies, []
        self._threads.copy(copies)

    def _copy(self, source: Any, first: int, target: memoryview) -> None:
        """Copy now, or note what is to be copied by all threads."""
        if not target.nbytes:
            return
        if isinstance(source, DeviceSource):
            source.copy_part(first, target)
            self._devices.add(source)
            return
        view = self._view
        if view is None:
            view = source.memory()
            if view is None and target.nbytes == source.nbytes:
                source.copy_into(target)
                return
            if view is None:
                view = memoryview(bytearray(source.nbytes))
                source.copy_into(view)
            self._view = view
        if source.nbytes <= SMALL:
            target[:] = view[first : first + target.nbytes]
        else:
            self._copies.append((target, view[first : first + target.nbytes]))
