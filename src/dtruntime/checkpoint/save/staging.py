"""Memory that checkpoints are copied into: allocated once, reused, and never more than allowed."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable

from ..._buffers import new_pages
from ..file_format.chunking import GROUP

SLAB = GROUP
"""Memory is lent in pieces of this size: what is digested and stored together lies together."""


class Slab:
    """A piece of page-aligned memory."""

    __slots__ = ("_map", "number", "pinned", "unpin", "view")

    def __init__(self, number: int) -> None:
        self.number = number
        """How many were made before it."""
        self._map = new_pages(SLAB)
        self.view = memoryview(self._map)
        self.pinned = False
        self.unpin: Callable[[], None] | None = None
        """Makes a device forget the memory, before somebody else gets its address."""

    def __del__(self) -> None:
        unpin = getattr(self, "unpin", None)
        if unpin is not None:
            unpin()


class Turn:
    """The place of a save among those that need memory; it is given up when all is copied."""

    def __init__(self, give_up: Callable[[Turn], None]) -> None:
        self._give_up = give_up

    def give_up(self) -> None:
        """Let the next one be the earliest; again does nothing."""
        self._give_up(self)

    def __enter__(self) -> Turn:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_up()


class StagingPool:
    """Slabs that add up to at most ``budget`` bytes.

    Whoever asks for one while all are lent waits until one comes back: that is how a save slows
    training down instead of filling the machine's memory. Saves are written in the order of their
    turns, and a later one gives nothing back before an earlier one is complete. So the last slab is
    for the earliest of those that are being copied.
    """

    def __init__(self, budget: int) -> None:
        if budget < SLAB:
            raise ValueError(
                f"the memory budget must be at least {SLAB} bytes (one slab), not {budget}"
            )
        self._most = budget // SLAB
        self._made = 0
        self._free: list[Slab] = []
        """In the order in which they were made."""
        self._turns: list[Turn] = []
        self._changed = threading.Condition()
        self.pin: Callable[[memoryview], Callable[[], None] | None] | None = None
        """Makes memory known to a device that copies into it, and says how to undo that."""

    @property
    def budget(self) -> int:
        """How many bytes may be lent at a time."""
        return self._most * SLAB

    @property
    def allocated(self) -> int:
        """How many bytes have been allocated."""
        return self._made * SLAB

    def turn(self) -> Turn:
        """The next turn, of a save that is written behind all that have one."""
        turn = Turn(self._give_up)
        with self._changed:
            self._turns.append(turn)
        return turn

    def borrow(self, turn: Turn, before_waiting: Callable[[], None] = lambda: None) -> Slab:
        """Take a slab, once there is one for this save."""
        with self._changed:
            while not self._is_free_for(turn):
                before_waiting()
                self._changed.wait()
            if self._free:
                # The first that was made: memory that no save has needed yet stays untouched, and
                # to touch it for the first time takes many times as long as to copy into it.
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

    def _is_free_for(self, turn: Turn) -> bool:
        left = len(self._free) + self._most - self._made
        return left > 1 or (left == 1 and turn is self._turns[0])

    def _give_up(self, turn: Turn) -> None:
        with self._changed:
            if turn in self._turns:
                self._turns.remove(turn)
            self._changed.notify_all()

    def _pinned(self, slab: Slab) -> Slab:
        if self.pin is not None and not slab.pinned:
            slab.unpin = self.pin(slab.view)
            slab.pinned = True
        return slab
