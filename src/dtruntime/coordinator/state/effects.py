"""Where the machine's parts put the effects of the command being applied."""

from __future__ import annotations

from typing import Any

from .journal import Journal
from .records import Delete, DeleteJob, Effect, Emit, Put, Record, Release


class Outbox:
    """Effects of one command, in order."""

    __slots__ = ("_effects", "_journal", "now")

    def __init__(self, journal: Journal) -> None:
        self._effects: list[Effect] = []
        self._journal = journal
        self.now = 0.0

    def put(self, kind: str, job: str, key: str, record: Record) -> None:
        """Store a record."""
        self._effects.append(Put(kind, job, key, record))

    def delete(self, kind: str, job: str, key: str) -> None:
        """Remove a record."""
        self._effects.append(Delete(kind, job, key))

    def delete_job(self, job: str) -> None:
        """Remove all records of a job."""
        self._effects.append(DeleteJob(job))

    def release(self, call: int, reply: Any) -> None:
        """Answer a held call."""
        self._effects.append(Release(call, reply))

    def emit(self, job: str, kind: str, **fields: object) -> None:
        """Append to the journal."""
        texts = {key: str(value) for key, value in fields.items()}
        self._effects.append(Emit(*self._journal.append(self.now, job, kind, texts)))

    def take(self) -> tuple[Effect, ...] | list[Effect]:
        """Hand over what was collected."""
        if not self._effects:
            return ()
        effects, self._effects = self._effects, []
        return effects
