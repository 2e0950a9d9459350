"""The bounded journal of what happened."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Literal

from .records import Event

JOURNAL_LENGTH = 10_000
ALARMS: Mapping[str, Literal["warning", "error"]] = {
    "worker.dead": "error",
    "worker.slow": "warning",
    "barrier.timed_out": "warning",
    "checkpoint.aborted": "warning",
    "checkpoint.damaged": "error",
    "epoch.incomplete": "error",
    "coordinator.stalled": "warning",
    "coordinator.state_lost": "error",
    "journal.entry_damaged": "error",
}
"""How grave each kind of event is that somebody should look at; the others are news."""


class Journal:
    """The newest events, numbered without gaps from the first one kept."""

    def __init__(self, events: Iterable[Event] = (), length: int = JOURNAL_LENGTH) -> None:
        self._events: deque[Event] = deque(events, maxlen=length)
        self._next_id = self._events[-1].id + 1 if self._events else 1

    def append(self, at: float, job: str, kind: str, fields: dict[str, str]) -> Event:
        """Number and keep an event."""
        event = Event(id=self._next_id, at=at, job=job, kind=kind, fields=fields)
        self._next_id += 1
        self._events.append(event)
        return event

    def after(self, event_id: int, job: str = "") -> list[Event]:
        """Events newer than ``event_id``, of one job when given."""
        if not self._events:
            return []
        skip = max(0, event_id + 1 - self._events[0].id)
        kept = [self._events[i] for i in range(skip, len(self._events))]
        return [event for event in kept if not job or event.job == job]

    @property
    def last_id(self) -> int:
        """The number of the newest event, 0 when there is none."""
        return self._next_id - 1
