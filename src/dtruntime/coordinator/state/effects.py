"""Effects of a command: records to store, answers to held calls, and entries of the journal."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import takewhile
from typing import Any

import msgspec

from .records import Event, Record, place_of


class Effect(msgspec.Struct, frozen=True):
    """Something that the caller of the machine has to carry out."""


class Put(Effect, frozen=True):
    """Store a record before any reply leaves."""

    kind: str
    job: str
    key: str
    record: Record


class Delete(Effect, frozen=True):
    """Remove a record before any reply leaves."""

    kind: str
    job: str
    key: str


class DeleteJob(Effect, frozen=True):
    """Remove all records of a job before any reply leaves."""

    job: str


class Emit(Effect, frozen=True):
    """Append an event to the journal."""

    event: Event
    forgotten: tuple[int, ...] = ()
    """The numbers of events that were evicted for it."""


class Release(Effect, frozen=True):
    """Answer a held call."""

    call: int
    reply: Any


class Outbox:
    """Effects of one command, in order."""

    __slots__ = ("_journal", "effects", "now")

    def __init__(self, journal: Journal) -> None:
        self.effects: list[Effect] = []
        self._journal = journal
        self.now = 0.0

    def put(self, job: str, record: Record, key: str = "") -> None:
        """Store a record of a job, under its own key where none is given."""
        kind, own = place_of(record)
        self.effects.append(Put(kind, job, key or own, record))

    def delete(self, job: str, record: Record, key: str = "") -> None:
        """Remove a record of a job."""
        kind, own = place_of(record)
        self.effects.append(Delete(kind, job, key or own))

    def delete_job(self, job: str) -> None:
        """Remove all records of a job."""
        self.effects.append(DeleteJob(job))

    def release(self, call: int, reply: Any) -> None:
        """Answer a held call."""
        self.effects.append(Release(call, reply))

    def emit(self, job: str, kind: str, **fields: object) -> None:
        """Append to the journal."""
        texts = {key: str(value) for key, value in fields.items()}
        self.effects.append(Emit(*self._journal.append(self.now, job, kind, texts)))


JOURNAL_LENGTH = 20_000
"""How many events are kept in total,"""
JOB_EVENTS_KEPT = 10_000
"""and of any one job."""
RANKS_SLACK = 1024
"""How many outdated entries the heap may have before it is rebuilt."""


class _Entries:
    """The numbers of one job's events, by kind."""

    __slots__ = ("count", "kinds", "oldest")

    def __init__(self) -> None:
        self.count = 0
        self.oldest = 0
        self.kinds: dict[str, deque[int]] = {}

    @property
    def rank(self) -> tuple[int, int]:
        """The lowest is evicted from first: the most events, then the oldest."""
        return -self.count, self.oldest

    def add(self, event: Event) -> None:
        self.kinds.setdefault(event.kind, deque()).append(event.id)
        self.oldest = self.oldest if self.count else event.id
        self.count += 1

    def take_oldest(self) -> int:
        """Remove and return the oldest event of the most frequent kind."""
        kind = max(self.kinds, key=lambda kind: (len(self.kinds[kind]), -self.kinds[kind][0]))
        oldest = self.kinds[kind].popleft()
        if not self.kinds[kind]:
            del self.kinds[kind]
        self.count -= 1
        self.oldest = min((numbers[0] for numbers in self.kinds.values()), default=0)
        return oldest


class Journal:
    """The newest events of each job, numbered in the order in which they happened.

    When the journal is full, the job with the most events loses the oldest event of its most
    frequent kind. So a job that floods the journal only loses its own events, and a quiet one keeps
    its history. Events that concern no job count as one job's.
    """

    def __init__(
        self,
        events: Iterable[Event] = (),
        length: int = JOURNAL_LENGTH,
        per_job: int = JOB_EVENTS_KEPT,
    ) -> None:
        self._length = length
        self._per_job = per_job
        self._events: dict[int, Event] = {}
        """By number, ascending."""
        self._jobs: dict[str, _Entries] = {}
        self._ranks: list[tuple[tuple[int, int], str]] = []
        """A heap of the jobs by rank, with outdated entries."""
        self._next_id = 1
        self._forgotten: list[int] = []
        """Numbers of evicted events that were not yet returned to anybody."""
        for event in events:
            self._keep(event)

    def append(
        self, at: float, job: str, kind: str, fields: dict[str, str]
    ) -> tuple[Event, tuple[int, ...]]:
        """Number and keep an event; also returns the numbers of those evicted for it."""
        event = Event(id=self._next_id, at=at, job=job, kind=kind, fields=fields)
        self._keep(event)
        forgotten, self._forgotten = tuple(self._forgotten), []
        return event, forgotten

    def after(self, event_id: int, job: str = "") -> list[Event]:
        """Events newer than ``event_id``, of one job when given."""
        newer: Iterator[Event] = takewhile(
            lambda event: event.id > event_id, reversed(self._events.values())
        )
        return [event for event in newer if not job or event.job == job][::-1]

    @property
    def last_id(self) -> int:
        """The number of the newest event, 0 when there is none."""
        return self._next_id - 1

    def _keep(self, event: Event) -> None:
        self._next_id = event.id + 1
        self._events[event.id] = event
        entries = self._jobs.setdefault(event.job, _Entries())
        entries.add(event)
        self._rank(event.job, entries)
        if entries.count > self._per_job:
            self._forget(event.job)
        elif len(self._events) > self._length:
            self._forget(self._longest())

    def _rank(self, job: str, entries: _Entries) -> None:
        """Push a job's rank; rebuild the heap when too many entries are outdated."""
        heapq.heappush(self._ranks, (entries.rank, job))
        if len(self._ranks) > 2 * len(self._jobs) + RANKS_SLACK:
            self._ranks = [(entries.rank, job) for job, entries in self._jobs.items()]
            heapq.heapify(self._ranks)

    def _longest(self) -> str:
        """The job to evict an event of."""
        while True:
            rank, job = self._ranks[0]
            entries = self._jobs.get(job)
            if entries is not None and entries.rank == rank:
                return job
            heapq.heappop(self._ranks)

    def _forget(self, job: str) -> None:
        entries = self._jobs[job]
        oldest = entries.take_oldest()
        del self._events[oldest]
        self._forgotten.append(oldest)
        if entries.count:
            self._rank(job, entries)
        else:
            del self._jobs[job]
