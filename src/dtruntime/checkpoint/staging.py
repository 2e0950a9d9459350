"""Memory that checkpoints are copied into: allocated once, reused, and never more than allowed."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from .._memory import new_pages
from .layout import GROUP

SLAB = GROUP
"""Memory is lent in pieces of this size: what is digested and stored together lies together."""


class Slab:
    """A piece of page-aligned memory."""

    __slots__ = ("_map", "pinned", "unpin", "view")

    def __init__(self, size: int = SLAB) -> None:
        self._map = new_pages(size)
        self.view = memoryview(self._map)
        self.pinned = False
        self.unpin: Callable[[], None] | None = None
        """Makes a device forget the memory, before somebody else gets its address."""

    def __del__(self) -> None:
        unpin = getattr(self, "unpin", None)
        if unpin is not None:
            unpin()


class StagingPool:
    """Slabs that add up to at most ``budget`` bytes.

    Whoever asks for one while all are lent waits until one comes back: that is how a save slows
    training down instead of filling the machine's memory.
    """

    def __init__(self, budget: int) -> None:
        if budget < SLAB:
            raise ValueError(
                f"the memory budget must be at least {SLAB} bytes (one slab), not {budget}"
            )
        self._most = budget // SLAB
        self._made = 0
        self._free: deque[Slab] = deque()
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

    def borrow(self, before_waiting: Callable[[], None] = lambda: None) -> Slab:
        """Take a slab, once there is one."""
        with self._changed:
            while not self._free and self._made >= self._most:
                before_waiting()
                self._changed.wait()
            if self._free:
                # The one that came back last is likeliest to be in the processor's cache.
                return self._pinned(self._free.pop())
            self._made += 1
        try:
            return self._pinned(Slab())
        except BaseException:
            with self._changed:
                self._made -= 1
                self._changed.notify()
            raise

    def _pinned(self, slab: Slab) -> Slab:
        if self.pin is not None and not slab.pinned:
            slab.unpin = self.pin(slab.view)
            slab.pinned = True
        return slab

    def give_back(self, slab: Slab) -> None:
        """Return a slab."""
        with self._changed:
            self._free.append(slab)
            self._changed.notify()
