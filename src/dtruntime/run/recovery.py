"""Recovery from lost workers: how long a run waits, and when it gives up."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import StrataError
from ..types import check_seconds, check_whole

BACKOFF_SECONDS = 1.0
BACKOFF_MOST = 60.0
DETECT_LEAST = 45.0
"""A coordinator may be away for a while before it reports a loss."""
DETECT_TIMEOUTS = 1.5
AGES_SHARED = 64
"""How many failures are handed round at a roll call."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """What a run does when workers are lost."""

    wait_seconds: float = 60.0
    """How long the others wait for a replacement before they go on without one."""
    min_workers: int = 1
    """With fewer workers the run waits, without a limit."""
    max_failures: int = 20
    """After more failures than this within ``window_seconds`` the run gives up."""
    window_seconds: float = 600.0
    detect_seconds: float | None = None
    """After an error in a step, how long to wait for word that a worker was lost; None: longer
    than the coordinator's heartbeat timeout, and at least 45 s."""
    assemble_seconds: float = 1800.0
    """How long a run waits for its workers to come together, at the start or later."""

    def __post_init__(self) -> None:
        check_whole("min_workers", self.min_workers, 1)
        check_whole("max_failures", self.max_failures)
        for name in ("wait_seconds", "window_seconds", "detect_seconds", "assemble_seconds"):
            if getattr(self, name) is not None or name != "detect_seconds":
                check_seconds(name, getattr(self, name), may_be_zero=True)

    def detects_within(self, heartbeat_timeout_seconds: float) -> float:
        """How long to wait for word of a loss, given the coordinator's heartbeat timeout."""
        if self.detect_seconds is not None:
            return self.detect_seconds
        return max(DETECT_LEAST, DETECT_TIMEOUTS * heartbeat_timeout_seconds)


class Failures:
    """Counts failures, so that a run that fails over and over ends."""

    def __init__(self, recovery: Recovery, clock: Callable[[], float] = time.monotonic) -> None:
        self._recovery = recovery
        self._clock = clock
        self._times: deque[float] = deque()

    def ages(self) -> list[int]:
        """How many seconds ago the last failures were, the newest last."""
        now = self._clock()
        return [round(now - time) for time in self._times][-AGES_SHARED:]

    def adopt(self, ages: Sequence[int]) -> None:
        """Take over the failures that others of the crew know of, if they know of more."""
        if len(ages) > len(self._times):
            now = self._clock()
            self._times = deque(now - age for age in ages)

    def count(self, reason: str) -> float:
        """Note a failure; returns how many seconds to wait before recovering.

        Raises ``StrataError`` after too many within the window.
        """
        now, window = self._clock(), self._recovery.window_seconds
        while self._times and self._times[0] < now - window:
            self._times.popleft()
        self._times.append(now)
        failures = len(self._times)
        if failures > self._recovery.max_failures:
            raise StrataError(
                f"{failures} failures within {window:g} s, more than max_failures="
                f"{self._recovery.max_failures}: the run gives up; the last was: {reason}. Its "
                "checkpoints are kept; when the cause is fixed, start it again and it resumes"
            )
        # No wait after the first ones: a machine that is gone is no reason for one.
        beyond = failures - max(2, self._recovery.max_failures // 4)
        return 0.0 if beyond < 0 else min(BACKOFF_MOST, BACKOFF_SECONDS * 2**beyond)
