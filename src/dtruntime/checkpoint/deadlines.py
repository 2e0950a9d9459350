"""One timeout for several waits, one after the other."""

from __future__ import annotations

import time


def deadline_after(timeout: float | None) -> float | None:
    """When a timeout is over; ``None`` for never."""
    return None if timeout is None else time.monotonic() + timeout


def time_left(deadline: float | None) -> float | None:
    """How long it is until then."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())
