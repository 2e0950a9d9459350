"""Actions that operators or members request of a running job."""

from __future__ import annotations

from collections.abc import Callable

from ...types import ACTION_KINDS
from .commands import DONE, CompleteAction, Done, Lost, Refused, RequestAction, Requested
from .effects import Outbox
from .records import ActionRecord, copied
from .roster import Roster

ACTIONS_LIMIT = 16


def action_id(number: int) -> str:
    """The id of an action."""
    return f"action-{number:06d}"


class Actions:
    """The pending actions of one job, in the order in which they were requested."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self.pending: dict[str, ActionRecord] = {}

    def request(self, c: RequestAction, out: Outbox) -> Requested:
        """Request an action; if the same one is pending, that is returned."""
        incarnation = self._check(c)
        for action in self.pending.values():
            if (action.kind, action.worker_id, action.incarnation) == (
                c.kind,
                c.worker_id,
                incarnation,
            ):
                return Requested(action)
        if len(self.pending) >= ACTIONS_LIMIT:
            raise Refused(
                "too_many_actions",
                f"job {c.job!r} has {ACTIONS_LIMIT} actions pending, the oldest is "
                f"{next(iter(self.pending))!r}: wait until one is done, or cancel one "
                "('strata actions ls')",
            )
        return Requested(self._add(c, incarnation, out))

    def complete(self, c: CompleteAction, out: Outbox) -> Done:
        """Complete an action; completing it twice is a no-op."""
        if c.action_id in self.pending:
            self._end(c.action_id, c.completed_by, c.outcome, out)
        elif not self._was_requested(c.action_id):
            raise Refused(
                "unknown_action",
                f"job {c.job!r} has no action {c.action_id!r}: give the id that requesting it "
                "returned ('strata actions ls')",
            )
        return DONE

    def lose(self, losses: list[Lost], out: Outbox) -> None:
        """End the actions that are for lost members."""
        gone = {loss.incarnation: loss.reason for loss in losses}
        self._end_where(
            lambda action: action.incarnation in gone,
            lambda action: f"the worker is gone: {gone[action.incarnation]}",
            out,
        )

    def job_ended(self, out: Outbox) -> None:
        """End all actions: every member has left."""
        self._end_where(lambda _: True, lambda _: "every worker has left the job", out)

    def restore(self, records: list[ActionRecord]) -> None:
        """Restore stored actions."""
        for record in sorted(records, key=lambda r: r.number):
            self.pending[record.action_id] = record
        self._roster.show_actions(tuple(self.pending.values()))

    def _check(self, c: RequestAction) -> int:
        """The incarnation of the worker that a drain is for; 0 for other actions."""
        if c.kind not in ACTION_KINDS:
            raise Refused(
                "invalid", f"action {c.kind[:40]!r} is unknown: use {', '.join(ACTION_KINDS)}"
            )
        if c.kind != "drain":
            if c.worker_id:
                raise Refused(
                    "invalid",
                    f"{c.kind!r} is for the whole job, not for {c.worker_id!r} alone: leave the "
                    "worker out",
                )
            return 0
        member = self._roster.by_id.get(c.worker_id)
        if member is None or not member.live:
            what = f"{c.worker_id!r} is not a live worker" if c.worker_id else "no worker is named"
            raise Refused(
                "no_such_worker",
                f"cannot drain a worker of job {c.job!r}: {what}; 'strata status --job {c.job}' "
                "lists them",
            )
        return member.incarnation

    def _add(self, c: RequestAction, incarnation: int, out: Outbox) -> ActionRecord:
        roster = self._roster
        roster.actions_requested += 1
        record = copied(
            c,
            ActionRecord,
            action_id=action_id(roster.actions_requested),
            number=roster.actions_requested,
            requested_at=out.now,
            incarnation=incarnation,
        )
        self.pending[record.action_id] = record
        roster.show_actions(tuple(self.pending.values()))
        out.put(roster.job, roster.record())
        out.put(roster.job, record)
        out.emit(
            roster.job,
            "action.requested",
            action=record.action_id,
            what=record.kind,
            worker=record.worker_id,
            reason=record.reason,
            by=record.requested_by,
        )
        return record

    def _end_where(
        self,
        concerned: Callable[[ActionRecord], bool],
        outcome: Callable[[ActionRecord], str],
        out: Outbox,
    ) -> None:
        for action in [a for a in self.pending.values() if concerned(a)]:
            self._end(action.action_id, "", outcome(action), out)

    def _end(self, key: str, by: str, outcome: str, out: Outbox) -> None:
        record = self.pending.pop(key)
        self._roster.show_actions(tuple(self.pending.values()))
        out.delete(self._roster.job, record)
        out.emit(
            self._roster.job,
            "action.completed",
            action=key,
            what=record.kind,
            worker=record.worker_id,
            outcome=outcome,
            by=by,
        )

    def _was_requested(self, key: str) -> bool:
        number = key.removeprefix("action-")
        if not number.isdecimal() or not 0 < int(number) <= self._roster.actions_requested:
            return False
        return action_id(int(number)) == key
