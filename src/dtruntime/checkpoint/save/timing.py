"""When to save."""

from __future__ import annotations

import time
from collections.abc import Callable

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
