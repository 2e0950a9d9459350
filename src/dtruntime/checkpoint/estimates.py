"""How long saves take, measured."""

from __future__ import annotations

import threading
from dataclasses import dataclass

NEWEST = 0.4
"""How much the newest save counts; those before it share the rest in the same way."""


@dataclass(frozen=True, slots=True)
class Pace:
    """What saves of one kind took, on average."""

    size: float
    written: float
    seconds: float

    def after(self, other: Pace) -> Pace:
        """The average with one more save."""
        return Pace(
            self.size + NEWEST * (other.size - self.size),
            self.written + NEWEST * (other.written - self.written),
            self.seconds + NEWEST * (other.seconds - self.seconds),
        )


class Estimates:
    """How long the next save will take, by what the last ones took.

    Saves that stored everything and saves that stored what had changed are told apart.
    """

    def __init__(self) -> None:
        self._full: Pace | None = None
        self._partial: Pace | None = None
        self._size = 0
        self._lock = threading.Lock()

    def add(self, size: int, written: int, seconds: float, *, is_full: bool) -> None:
        """Take note of a save of a state of ``size`` bytes, of which some had to be written."""
        pace = Pace(size, written, seconds)
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


def _scaled(pace: Pace, size: int, measured: float) -> float:
    return pace.seconds * size / measured if measured else pace.seconds
