"""From a state in memory to groups of chunks, copied into memory that is reused and bounded."""

from __future__ import annotations

import array
import bisect
import mmap
import queue
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..._background import Hold, usable_cores
from ..._buffers import new_pages
from ..._shutdown import shutdown
from ...errors import StorageError
from ...telemetry import EventLog
from ..file_format.chunks import CHUNK, GROUP, StreamLayout, grouped, packed
from ..file_format.manifest import Extent, digest_of
from ..state_dict import Buffer, flatten

log = EventLog("checkpoint")

SLAB = GROUP
"""The size of a slab, which holds what is digested and stored together."""


class Slab:
    """A piece of page-aligned memory."""

    __slots__ = ("_map", "number", "pinned", "unpin", "view")

    def __init__(self, number: int) -> None:
        self.number = number
        """How many were allocated before it."""
        self._map = new_pages(SLAB)
        self.view = memoryview(self._map)
        self.pinned = False
        self.unpin: Callable[[], None] | None = None
        """Unregisters the memory from a device, before its address is reused."""

    def __del__(self) -> None:
        unpin = getattr(self, "unpin", None)
        if unpin is not None:
            unpin()


class StagingTurn:
    """The place of a save among those that wait for memory, until all of it is copied."""

    def __init__(self, give_up: Callable[[StagingTurn], None]) -> None:
        self._give_up = give_up

    def give_up(self) -> None:
        """Let the next save be the earliest; again does nothing."""
        self._give_up(self)

    def __enter__(self) -> StagingTurn:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_up()


class StagingPool:
    """Slabs that add up to at most ``budget`` bytes.

    When all are in use a save waits for one, and so slows training down instead of filling the
    machine's memory. Saves are written in the order of their turns, and a later one returns nothing
    before an earlier one is complete. So the last slab is for the earliest save.
    """

    def __init__(self, budget: int) -> None:
        if budget < SLAB:
            raise ValueError(
                f"the memory budget must be at least {SLAB} bytes (one slab), not {budget}"
            )
        self._most = budget // SLAB
        self._made = 0
        self._free: list[Slab] = []
        """In the order of their allocation."""
        self._turns: list[StagingTurn] = []
        self._changed = threading.Condition()
        self.pin: Callable[[memoryview], Callable[[], None] | None] | None = None
        """Registers memory with a device that copies into it; returns what undoes that."""

    @property
    def budget(self) -> int:
        """How many bytes may be lent at a time."""
        return self._most * SLAB

    @property
    def allocated(self) -> int:
        """How many bytes have been allocated."""
        return self._made * SLAB

    def turn(self) -> StagingTurn:
        """The next turn, for a save that is written after all that have one."""
        turn = StagingTurn(self._give_up)
        with self._changed:
            self._turns.append(turn)
        return turn

    def borrow(self, turn: StagingTurn, before_waiting: Callable[[], None] = lambda: None) -> Slab:
        """Wait for a slab for this save."""
        with self._changed:
            while not self._is_free_for(turn):
                before_waiting()
                self._changed.wait()
            if self._free:
                # The oldest: touching memory for the first time takes many times as long as
                # copying into it, so what no save has needed yet stays untouched.
                return self._pinned(self._free.pop(0))
            number = self._made
            self._made += 1
        try:
            return self._pinned(Slab(number))
        except BaseException:
            with self._changed:
                self._made -= 1
                self._changed.notify_all()
            raise

    def give_back(self, slab: Slab) -> None:
        """Return a slab."""
        with self._changed:
            bisect.insort(self._free, slab, key=lambda free: free.number)
            self._changed.notify_all()

    def _is_free_for(self, turn: StagingTurn) -> bool:
        left = len(self._free) + self._most - self._made
        return left > 1 or (left == 1 and turn is self._turns[0])

    def _give_up(self, turn: StagingTurn) -> None:
        with self._changed:
            if turn in self._turns:
                self._turns.remove(turn)
            self._changed.notify_all()

    def _pinned(self, slab: Slab) -> Slab:
        if self.pin is not None and not slab.pinned:
            slab.unpin = self.pin(slab.view)
            slab.pinned = True
        return slab


@dataclass(frozen=True, slots=True)
class Group:
    """Whole chunks of a stream that are adjacent in memory."""

    start: int
    """The offset of the first in the stream."""
    bounds: tuple[int, ...]
    """The offset of each in the stream, and the end of the last."""
    view: memoryview
    done: Callable[[], None] = lambda: None
    """Called when the memory is not needed any more."""
    steady: bool = False
    """The memory cannot change until then."""


@dataclass(frozen=True, slots=True)
class Content:
    """The stream of a part that is being saved, and its description."""

    kind: str
    groups: Iterator[Group]
    extents: tuple[Extent, ...] = ()
    skeleton: Any = None
    turn: StagingTurn | None = None
    """The turn of groups that are staged as they are iterated, rather than by the caller."""

    def release_rest(self) -> None:
        """Return the memory of all groups that are still to come."""
        if self.turn is not None and isinstance(self.groups, Generator):
            with self.turn:
                self.groups.close()
            return
        try:
            for group in self.groups:
                group.done()
        except BaseException as exc:
            log.debug("checkpoint.abandoned", reason=str(exc))

    def width_at(self, offset: int) -> int:
        """The size of an element at an offset of the stream."""
        number = bisect.bisect_right(self.extents, offset, key=lambda extent: extent.offset) - 1
        return _itemsize(self.extents[number].dtype) if number >= 0 else 1


def _itemsize(dtype: str) -> int:
    bits = "".join(c for c in dtype.partition("_")[0] if c.isdigit())
    return max(1, int(bits) // 8) if bits else 1


class LentGroups:
    """Groups whose memory is in use, and has to be returned whatever happens."""

    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}
        self._lock = threading.Lock()

    def track(self, groups: Iterable[Group]) -> Iterator[Group]:
        """Yield the same groups, and remember them."""
        for group in groups:
            with self._lock:
                self._groups[group.start] = group
            yield group

    def done(self, group: Group) -> None:
        """Return a group's memory, once."""
        with self._lock:
            lent = self._groups.pop(group.start, None)
        if lent is not None:
            lent.done()
            shutdown.moved()

    def done_with_all(self) -> None:
        """Return the memory of all groups."""
        with self._lock:
            groups = list(self._groups.values())
        for group in groups:
            self.done(group)


class GroupQueue:
    """Groups of chunks on their way from the caller to the writer; it is iterated once.

    They are held back until all are copied, or until their memory is needed: digesting and writing
    them meanwhile takes memory bandwidth from the caller, who waits.
    """

    def __init__(self) -> None:
        self._groups: queue.SimpleQueue[Group | BaseException | None] = queue.SimpleQueue()
        self._held: list[Group] | None = []

    def put(self, group: Group) -> None:
        """Hand over a group."""
        if self._held is None:
            self._groups.put(group)
        else:
            self._held.append(group)

    def let_go(self) -> None:
        """Hold nothing back any more."""
        held, self._held = self._held or [], None
        for group in held:
            self._groups.put(group)

    def end(self, error: BaseException | None = None) -> None:
        """There are no more groups, or there cannot be because of an error."""
        self.let_go()
        self._groups.put(error)

    def __iter__(self) -> Iterator[Group]:
        while isinstance(item := self._groups.get(), Group):
            yield item
        if item is not None:
            raise item


def groups_of(view: memoryview, *, steady: bool = False) -> Iterator[Group]:
    """Groups of memory that is saved in place; ``steady`` says that it cannot change."""
    bounds = (*range(0, view.nbytes, CHUNK), view.nbytes)
    for group in grouped(bounds):
        yield Group(group[0], group, view[group[0] : group[-1]], steady=steady)


def watched(view: memoryview, groups: Iterator[Group], name: str) -> Iterator[Group]:
    """Groups of memory that its owner could change; raises at the end if it was changed."""
    before = []
    for group in groups:
        before.append(digest_of(group.view))
        yield group
    for digest, group in zip(before, groups_of(view), strict=True):
        if digest_of(group.view) != digest:
            raise StorageError(
                f"{name} was changed while it was being saved, and is not committed: do not write "
                "to a buffer before the save's handle is done, or pass bytes"
            )


THREADS = 8
"""The most threads that copy: a few use all the memory bandwidth."""
PIECE = 4 * 2**20
"""How much a thread copies at a time."""
SMALL = 16 * 2**10
"""Up to this size the caller copies at once: handing it to a thread takes longer."""


def staged(
    layout: StreamLayout,
    sources: Sequence[Any],
    pool: StagingPool,
    turn: StagingTurn,
    before_waiting: Callable[[], None] = lambda: None,
) -> Generator[Group, None, None]:
    """Copy buffers into slabs, one slab after the other, and give up the turn.

    Slabs are returned when their groups are written; ``before_waiting`` has to start that.
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
    """The groups of a slab, which is returned when all that were taken are done."""
    hold = Hold(give_back)
    try:
        for group in grouped(bounds):
            piece = view[group[0] - bounds[0] : group[-1] - bounds[0]]
            hold.take()
            yield Group(group[0], group, piece, hold.drop, steady=True)
    finally:
        hold.drop()


class DeviceSource(ABC):
    """Memory of a device, which the device copies asynchronously."""

    nbytes: int

    @abstractmethod
    def copy_part(self, first: int, target: memoryview) -> None:
        """Begin to copy the bytes from ``first`` on."""

    @abstractmethod
    def wait(self) -> None:
        """Wait for the copies that were begun."""


class CopyThreads:
    """Copies memory with as many threads as pay, the caller's among them."""

    def __init__(self) -> None:
        self._others = min(THREADS, usable_cores()) - 1
        self._threads: ThreadPoolExecutor | None = None

    def __enter__(self) -> CopyThreads:
        return self

    def __exit__(self, *_: object) -> None:
        if self._threads is not None:
            self._threads.shutdown()

    def copy(self, copies: Sequence[tuple[memoryview, memoryview]]) -> None:
        """Copy from the second to the first memory of each pair, which have equal lengths."""
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
            # No thread copies any more when this returns, even if it was interrupted.
            pieces.clear()
            for job in jobs:
                # A thread that has not begun has nothing left to do.
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
    """The same copies, with large ones split and small ones combined."""
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
    """Copy pieces until none is left; several threads may share them."""
    with suppress(IndexError):
        while True:
            for target, source in pieces.popleft():
                np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


class _Filler:
    """Fills memory with consecutive pieces of the stream."""

    def __init__(self, layout: StreamLayout, sources: Sequence[Any], threads: CopyThreads) -> None:
        self._offsets = layout.offsets
        self._sources = sources
        self._threads = threads
        self._next = 0
        self._view: memoryview | None = None
        self._copies: list[tuple[memoryview, memoryview]] = []
        self._devices: set[DeviceSource] = set()

    def fill(self, target: memoryview, start: int) -> None:
        """Copy the stream from ``start`` on; gaps become zeros."""
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
        """Copy now, or leave it to all threads."""
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


@dataclass(frozen=True, slots=True)
class Memory:
    """What a part is made of: buffers, or bytes that are saved in place."""

    kind: str
    skeleton: Any = None
    buffers: Sequence[Buffer] = ()
    view: memoryview | None = None
    steady: bool = False
    """The bytes cannot change."""


def memory_of(state: Any) -> Memory:
    """The memory of a state dict, or of anything bytes-like; arrays are states."""
    if not isinstance(state, bytes | bytearray | memoryview | mmap.mmap | array.array):
        tree = flatten(state)
        return Memory("state", tree.skeleton, tree.buffers)
    view = memoryview(state)
    if not view.c_contiguous:
        raise ValueError("a memoryview must be contiguous to be saved")
    view = view.cast("B") if view.nbytes else memoryview(b"")
    return Memory("bytes", view=view, steady=isinstance(state, bytes))


def extents_of(sources: Sequence[Any], offsets: Sequence[int]) -> tuple[Extent, ...]:
    """The extents of buffers, or anything with a size, a dtype and a key, in a stream."""
    return tuple(
        Extent(offset, source.nbytes, source.dtype, source.key)
        for offset, source in zip(offsets, sources, strict=True)
    )


def check_versions(buffers: Sequence[Buffer], before: list[object], step: int) -> None:
    """Raise ``StorageError`` when a buffer was changed while it was copied."""
    for buffer, version in zip(buffers, before, strict=True):
        if buffer.version() != version:
            raise StorageError(
                f"{buffer.key} was changed while step {step} was being copied, and the checkpoint "
                "is not committed: do not train while save() runs"
            )
