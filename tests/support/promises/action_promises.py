"""The promises about actions, followed over time."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from dtruntime.coordinator.state import Machine
from dtruntime.coordinator.state import commands as c
from dtruntime.coordinator.state.effects import Delete
from dtruntime.coordinator.state.records import ActionRecord
from tests.support.promises.promise_model import Applied, demand


class ActionPromises:
    """The checks, for all jobs."""

    def __init__(self) -> None:
        self._told: dict[str, dict[str, ActionRecord]] = defaultdict(dict)
        """What somebody was told that it was requested, by id."""
        self._over: dict[str, set[str]] = defaultdict(set)
        self._stored_over: dict[str, set[str]] = defaultdict(set)

    def restarted(self, machine: Machine) -> None:
        """The coordinator starts again with what is stored."""
        self._over = defaultdict(set, {job: set(keys) for job, keys in self._stored_over.items()})
        for job in machine.jobs:
            self._check(machine, job)

    def after(self, applied: Applied) -> None:
        """A command was applied."""
        over = self._over[applied.job]
        over.update(e.key for e in applied.effects if isinstance(e, Delete) and e.kind == "action")
        if isinstance(applied.command, c.Heartbeat) and isinstance(applied.reply, c.Pulse):
            told = {action.action_id for action in applied.reply.actions}
            demand(not told & over, "told of an action that is over", told & over)
            missing = self._told[applied.job].keys() - told - over
            demand(not missing, "not told of an action", missing)
        self._check(applied.machine, applied.job)

    def _check(self, machine: Machine, job: str) -> None:
        known = machine.jobs.get(job)
        pending = known.actions.pending if known else {}
        for key, record in self._told[job].items():
            kept = key in self._over[job] or pending.get(key) == record
            demand(kept, "an action was forgotten, or is another one", record)

    def stored(self, deletes: list[Delete]) -> None:
        """Records are gone from the store."""
        for delete in deletes:
            if delete.kind == "action":
                self._stored_over[delete.job].add(delete.key)

    def leaves(self, command: c.RequestAction, reply: Any) -> None:
        """An answer leaves the coordinator."""
        if isinstance(reply, c.Requested):
            record = self._told[command.job].setdefault(reply.action.action_id, reply.action)
            demand(record == reply.action, "one id for two actions", record, reply.action)
