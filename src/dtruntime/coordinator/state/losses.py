"""The newest losses of a job's members, for those who have not been told of them."""

from __future__ import annotations

import math
from collections import deque

from .commands import Lost

LOSSES_KEPT = 256
TIMES_KEPT = 64


class Losses:
    """Losses in order; of those that are forgotten, or were before a restart, only how recent."""

    def __init__(self, newest_generation: int, heard: int, lost_at: tuple[float, ...] = ()) -> None:
        self.newest_generation = newest_generation
        """The generation that the newest loss began."""
        self._kept: deque[Lost] = deque()
        self._forgotten_generation = newest_generation
        self._forgotten_heard: float = heard
        self._forgotten_why = "not known any more"
        self.times: deque[float] = deque(lost_at, maxlen=TIMES_KEPT)
        """When members were lost that did not leave by themselves, nor with their whole world."""

    def add(self, loss: Lost) -> None:
        """A member was lost."""
        self.newest_generation = loss.generation
        self._kept.append(loss)
        if len(self._kept) > LOSSES_KEPT:
            forgotten = self._kept.popleft()
            self._forgotten_generation = forgotten.generation
            self._forgotten_heard = max(self._forgotten_heard, forgotten.last_heard)

    def forget_state(self, generation: int) -> None:
        """A state was lost in which ``generation`` was known: whoever was a member then has lost
        all others.
        """
        if generation < self._forgotten_generation:
            return
        self.newest_generation = max(self.newest_generation, generation)
        self._forgotten_generation = generation
        self._forgotten_heard = math.inf
        self._forgotten_why = "the coordinator has lost its state"

    def since(self, generation: int, incarnation: int, until: int | None = None) -> list[Lost]:
        """Losses after ``generation`` and not after ``until`` of members that one knew.

        A member that was last heard before ``incarnation`` registered was never its companion.
        What is forgotten counts as known to all who could have known it.
        """
        if generation >= self.newest_generation:
            return []
        last = self.newest_generation if until is None else until
        found = [
            loss
            for loss in self._kept
            if generation < loss.generation <= last and loss.last_heard > incarnation
        ]
        forgotten = min(self._forgotten_generation, last)
        if generation < forgotten and incarnation < self._forgotten_heard:
            found.insert(0, Lost(forgotten, "", 0, self._forgotten_why))
        return found
