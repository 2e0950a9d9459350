"""What a run does when workers are lost: how long it waits, and when it gives up."""

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
"""A coordinator may be away, and come back, before it can tell."""
DETECT_TIMEOUTS = 1.5
AGES_SHARED = 64
"""So many failures are handed round at a roll call."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """How a run deals with lost workers."""

    wait_seconds: float = 60.0
    """How long the others wait for a replacement before they go on without one."""
    min_workers: int = 1
    """With fewer workers the run waits, however long it takes."""
    max_failures: int = 20
    """When more workers than this were lost within ``window_seconds``, the run gives up."""
    window_seconds: float = 600.0
    detect_seconds: float | None = None
    """After an error in a step, how long to wait for word that a worker was lost; ``None``: longer
    than the coordinator's heartbeat timeout, 45 s at the least."""
    assemble_seconds: float = 1800.0
    """How long a run waits for its workers to come together, at the start or again."""

    def __post_init__(self) -> None:
        check_whole("min_workers", self.min_workers, 1)
        check_whole("max_failures", self.max_failures)
        for name in ("wait_seconds", "window_seconds", "detect_seconds", "assemble_seconds"):
            if getattr(self, name) is not None or name != "detect_seconds":
                check_seconds(name, getattr(self, name), may_be_zero=True)

    def detects_within(self, heartbeat_timeout_seconds: float) -> float:
        """How long to wait for word of a loss, of a coordinator with this heartbeat timeout."""
        if self.detect_seconds is not None:
            return self.detect_seconds
        return max(DETECT_LEAST, DETECT_TIMEOUTS * heartbeat_timeout_seconds)


class Failures:
    """Counts recoveries, so that a run that fails over and over ends instead of spinning."""

    def __init__(self, recovery: Recovery, clock: Callable[[], float] = time.monotonic) -> None:
        self._recovery = recovery
        self._clock = clock
        self._times: deque[float] = deque()

    def ages(self) -> list[int]:
        """How many seconds ago the last ones were, the newest last."""
        now = self._clock()
        return [round(now - time) for time in self._times][-AGES_SHARED:]

    def adopt(self, ages: Sequence[int]) -> None:
        """Count what others of the crew have seen, if it is more: this worker may be new."""
        if len(ages) > len(self._times):
            now = self._clock()
            self._times = deque(now - age for age in ages)

    def count(self, reason: str) -> float:
        """Note a recovery; returns how long to wait before it, in seconds.

        Raises ``StrataError`` when there were too many within the window.
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
                "checkpoints are kept; when the cause is mended, start it again and it resumes"
            )
        # The first ones are not held up: a machine that is gone is no reason to wait.
        beyond = failures - max(2, self._recovery.max_failures // 4)
        return 0.0 if beyond < 0 else min(BACKOFF_MOST, BACKOFF_SECONDS * 2**beyond)
