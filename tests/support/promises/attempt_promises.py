"""The promises about attempts at saving a step together, followed over time.

An attempt is known here by the moment in which it was begun, not by its id: so an id that is given
twice shows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from dtruntime.coordinator.state import Refused
from dtruntime.coordinator.state import commands as c
from dtruntime.coordinator.state.effects import Delete, Put
from dtruntime.coordinator.state.records import AskRecord, AttemptRecord, CheckpointRecord
from tests.support.machine_invariants import Rows
from tests.support.promises.promise_model import Applied, demand


class JobAttempts:
    """What is known of one job's attempts."""

    def __init__(self) -> None:
        self.begun_at: dict[str, int] = {}
        self.askers: dict[str, dict[int, int]] = defaultdict(dict)
        """Incarnation to ticket, by id."""
        self.ended: set[str] = set()
        self.committed: set[str] = set()
        self.stored_begun_at: dict[str, int] = {}
        self.stored_ended: set[str] = set()
        self.stored_committed: set[str] = set()
        # What has left the coordinator.
        self.left: dict[str, int] = {}
        self.told: dict[tuple[int, int], str] = {}
        """The id by incarnation and ticket."""
        self.ticket_of: dict[tuple[str, int], int] = {}


class AttemptPromises:
    """The checks, for all jobs."""

    def __init__(self) -> None:
        self._jobs: dict[str, JobAttempts] = defaultdict(JobAttempts)
        self._moment = 0

    def was_begun(self, job: str, checkpoint_id: str) -> bool:
        """Whether an id is that of an attempt."""
        return checkpoint_id in self._jobs[job].begun_at

    def restarted(self, rows: Rows) -> None:
        """The coordinator starts again with what is stored."""
        for model in self._jobs.values():
            model.begun_at = dict(model.stored_begun_at)
            model.ended = set(model.stored_ended)
            model.committed = set(model.stored_committed)
            model.askers.clear()
        for (_, job, _), record in rows.items():
            if isinstance(record, AskRecord):
                self._jobs[job].askers[record.checkpoint_id][record.incarnation] = record.ticket

    def lost_power(self, job: str, ask: AskRecord) -> None:
        """That a member was told an id is forgotten."""
        self._jobs[job].told.pop((ask.incarnation, ask.ticket), None)

    def after(self, live: Iterable[int], applied: Applied) -> None:
        """A command was applied."""
        self._moment += 1
        model, command, reply = self._jobs[applied.job], applied.command, applied.reply
        if isinstance(command, c.NotifyCheckpoint) and command.checkpoint_id in model.ended:
            final = isinstance(reply, c.Aborted | Refused)
            demand(final, "an attempt that has ended took a part", command, reply)
        if isinstance(reply, c.Begun):
            askers = dict(model.askers[reply.checkpoint_id])
            self._follow(model, applied)
            self._check_begun(model, askers, set(live), applied)
        else:
            self._follow(model, applied)

    def _follow(self, model: JobAttempts, applied: Applied) -> None:
        for effect in applied.effects:
            record = effect.record if isinstance(effect, Put) else None
            if isinstance(record, AttemptRecord) and record.ended:
                model.ended.add(record.checkpoint_id)
            elif isinstance(record, AttemptRecord):
                known = record.checkpoint_id in model.begun_at
                demand(not known, "an id was given to two attempts", record)
                model.begun_at[record.checkpoint_id] = self._moment
            elif isinstance(record, AskRecord):
                model.askers[record.checkpoint_id][record.incarnation] = record.ticket
            elif isinstance(record, CheckpointRecord):
                ended = record.checkpoint_id in model.ended
                demand(not ended, "an attempt that has ended was committed", record)
                model.committed.add(record.checkpoint_id)
            elif isinstance(effect, Delete) and effect.kind == "ask":
                self._forget(model, effect.key)

    def _forget(self, model: JobAttempts, key: str) -> None:
        checkpoint_id, _, incarnation = key.rpartition("#")
        ticket = model.askers[checkpoint_id].pop(int(incarnation))
        model.told.pop((int(incarnation), ticket), None)

    def _check_begun(
        self, model: JobAttempts, askers: dict[int, int], live: set[int], applied: Applied
    ) -> None:
        command, key = applied.command, applied.reply.checkpoint_id
        if askers.get(command.incarnation) == command.ticket:
            return
        demand(command.incarnation not in askers, "one attempt for two saves", command, askers)
        over = key in model.ended or key in model.committed
        if over and model.begun_at.get(key) == self._moment:
            return  # it ended when it was begun, and everybody is told so
        demand(not over, "joined an attempt that is over", command, applied.reply)
        demand(set(askers) <= live, "joined an attempt of one who is lost", command, askers)

    def stored(self, put: Put) -> None:
        """A record is stored."""
        model, record = self._jobs[put.job], put.record
        if isinstance(record, AttemptRecord):
            begun_at = model.begun_at[record.checkpoint_id]
            model.stored_begun_at[record.checkpoint_id] = begun_at
            if record.ended:
                model.stored_ended.add(record.checkpoint_id)
        elif isinstance(record, CheckpointRecord):
            model.stored_committed.add(record.checkpoint_id)

    def leaves(self, command: c.BeginCheckpoint, reply: Any) -> None:
        """An answer leaves the coordinator."""
        if not isinstance(reply, c.Begun):
            return
        model, key, who = self._jobs[command.job], reply.checkpoint_id, command.incarnation
        begun_at = model.stored_begun_at.get(key)
        demand(begun_at is not None, "an id left that is not stored", reply)
        same = model.left.setdefault(key, begun_at or 0) == begun_at
        demand(same, "an id was given to two attempts", reply)
        told = model.told.setdefault((who, command.ticket), key)
        demand(told == key, "a retry was told another id", command, told, reply)
        ticket = model.ticket_of.setdefault((key, who), command.ticket)
        demand(ticket == command.ticket, "one id for two saves", command, ticket, reply)
