"""Waiting for a condition, instead of sleeping and hoping."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

POLL_SECONDS = 0.02


class _Attempts(Generic[T]):
    """Repeated looks at a condition, until it holds or the time is up."""

    def __init__(self, condition: Callable[[], T], within: float, what: str) -> None:
        self._condition = condition
        self._within = within
        self._what = what or getattr(condition, "__name__", "the condition")
        self._deadline = time.monotonic() + within
        self._failed: AssertionError | None = None
        self._seen: T | None = None

    def look(self) -> bool:
        """Whether it holds; raises when the time is up."""
        late = time.monotonic() > self._deadline
        try:
            self._seen, self._failed = self._condition(), None
        except AssertionError as exc:
            self._failed = exc
        if self._failed is None and self._seen:
            return True
        if late:
            raise AssertionError(
                f"{self._what} did not hold within {self._within:g} s; last seen: "
                f"{self._failed or repr(self._seen)}"
            ) from self._failed
        return False

    @property
    def seen(self) -> T:
        """What the condition returned when it held."""
        assert self._seen is not None
        return self._seen


def eventually(condition: Callable[[], T], *, within: float = 30.0, what: str = "") -> T:
    """Wait until ``condition()`` returns something true, and return that.

    An `AssertionError` from it counts as "not yet"; any other exception ends the wait.
    Raises `AssertionError` with what was seen last when ``within`` seconds have passed.
    """
    attempts = _Attempts(condition, within, what)
    while not attempts.look():
        time.sleep(POLL_SECONDS)
    return attempts.seen


async def eventually_async(
    condition: Callable[[], T], *, within: float = 30.0, what: str = ""
) -> T:
    """As `eventually`, while the event loop goes on."""
    attempts = _Attempts(condition, within, what)
    while not attempts.look():  # noqa: ASYNC110 - there is no event to wait for
        await asyncio.sleep(POLL_SECONDS)
    return attempts.seen
