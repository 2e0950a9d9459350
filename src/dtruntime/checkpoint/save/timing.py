"""When to save."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ...types import check_seconds, check_whole


class SavePolicy:
    """Every so many steps, or every so many seconds, whichever comes first."""

    def __init__(
        self,
        interval_steps: int | None,
        interval_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``None``: not by this measure; not by any means never."""
        if interval_steps is not None:
            interval_steps = check_whole("interval_steps", interval_steps, 1)
        if interval_seconds is not None:
            interval_seconds = check_seconds("interval_seconds", interval_seconds)
        self._steps = interval_steps
        self._seconds = interval_seconds
        self._clock = clock
        self._last_time = clock()
        self._last_step = 0

    def should_save(self, step: int) -> bool:
        """Whether a checkpoint is due after this step."""
        if step == self._last_step:
            return False
        if self._steps is not None and step // self._steps > self._last_step // self._steps:
            return True
        return self._seconds is not None and self._clock() - self._last_time >= self._seconds

    def saved(self, step: int) -> None:
        """Note that there is a checkpoint of a step, taken or loaded just now."""
        self._last_step = step
        self._last_time = self._clock()


NEWEST = 0.4
"""How much the newest save counts; those before it share the rest in the same way."""


@dataclass(frozen=True, slots=True)
class SaveCost:
    """What saves of one kind took, on average."""

    size: float
    written: float
    seconds: float

    def after(self, other: SaveCost) -> SaveCost:
        """The average with one more save."""
        return SaveCost(
            self.size + NEWEST * (other.size - self.size),
            self.written + NEWEST * (other.written - self.written),
            self.seconds + NEWEST * (other.seconds - self.seconds),
        )


class SaveEstimates:
    """How long the next save will take, by what the last ones took.

    Saves that stored everything and saves that stored what had changed are told apart.
    """

    def __init__(self) -> None:
        self._full: SaveCost | None = None
        self._partial: SaveCost | None = None
        self._size = 0
        self._lock = threading.Lock()

    def add(self, size: int, written: int, seconds: float, *, is_full: bool) -> None:
        """Take note of a save of a state of ``size`` bytes, of which some had to be written."""
        pace = SaveCost(size, written, seconds)
        with self._lock:
            self._size = size
            if is_full:
                self._full = self._full.after(pace) if self._full else pace
            else:
                self._partial = self._partial.after(pace) if self._partial else pace

    def seconds(self, *, is_full: bool) -> float | None:
        """How long a save of the last state takes; None when nothing tells."""
        with self._lock:
            if not is_full and self._partial is not None:
                return _scaled(self._partial, self._size, self._partial.size)
            if self._full is not None:
                return _scaled(self._full, self._size, self._full.size)
            if self._partial is not None and self._partial.written:
                # Rather too long: in that time the rest was compared, too.
                return _scaled(self._partial, self._size, self._partial.written)
            return None


def _scaled(pace: SaveCost, size: int, measured: float) -> float:
    return pace.seconds * size / measured if measured else pace.seconds
