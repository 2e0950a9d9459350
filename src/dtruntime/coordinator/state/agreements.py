"""Which attempt at a checkpoint a member takes part in, and which attempts that ends."""

from __future__ import annotations

from .checkpoints.attempts import Attempt, Attempts
from .checkpoints.history import CommittedCheckpoints
from .checkpoints.pending import PendingCheckpoints
from .commands import AbandonCheckpoints, Abandoned, BeginCheckpoint, Begun, NotifyCheckpoint
from .effects import Outbox
from .roster import Roster


class Agreements:
    """How the members of one job come to save the same step under the same id."""

    def __init__(
        self,
        roster: Roster,
        attempts: Attempts,
        pending: PendingCheckpoints,
        committed: CommittedCheckpoints,
    ) -> None:
        self._roster = roster
        self._attempts = attempts
        self._pending = pending
        self._committed = committed

    def begin(self, c: BeginCheckpoint, out: Outbox) -> Begun:
        """Tell a member under which id it saves a step together with the others."""
        attempt = self._attempts.asked(c)
        if attempt is not None:
            return attempt.begun
        attempt = self._attempts.newest(c.step)
        if attempt is not None and self._may_join(attempt, c):
            self._attempts.add(attempt, c, out)
            self._end_left_out(attempt, c, out)
            return attempt.begun
        ahead = self._ahead_of(c)
        attempt = self._begin_attempt(attempt, c, out)
        self._attempts.add(attempt, c, out)
        if ahead is None:
            self._end_left_out(attempt, c, out)
        elif late := self._pending.get(attempt.record.checkpoint_id):
            detail = f"the others save step {ahead.record.step} already, with {c.worker_id}"
            self._pending.abort(late, detail, out, is_late=True)
        return attempt.begun

    def abandon(self, c: AbandonCheckpoints, out: Outbox) -> Abandoned:
        """End the attempts that a member takes part in: it goes back to an earlier state."""
        given_up = [p for p in self._pending.by_id.values() if c.incarnation in p.record.expected]
        for pending in given_up:
            self._pending.abort(pending, f"{c.worker_id} has given up saving it", out)
        return Abandoned(len(given_up))

    def end_passed(self, c: NotifyCheckpoint, out: Outbox) -> None:
        """End the attempts that a member began earlier than the one it now sends its part of.

        Members send their parts in the order in which they began, so it will send none of these.
        """
        stored = self._attempts.get(c.checkpoint_id)
        if stored is None:
            return
        for attempt, pending in self._pending.awaiting(c.incarnation):
            if self._attempts.begun_before(attempt, stored, c.incarnation):
                detail = f"{c.worker_id} has stored its part of step {c.step} and none of this one"
                self._pending.abort(pending, detail, out)

    def _end_left_out(self, begun: Attempt, c: BeginCheckpoint, out: Outbox) -> None:
        """End the attempts that a member can no longer ask for, since it began a newer one."""
        for attempt, pending in self._pending.awaiting(c.incarnation):
            if self._attempts.was_left_out(attempt, begun, c.incarnation):
                detail = f"{c.worker_id} has begun to save step {c.step} without asking for it"
                self._pending.abort(pending, detail, out)

    def _may_join(self, attempt: Attempt, c: BeginCheckpoint) -> bool:
        """Whether a member that has not asked for an attempt belongs to those who save it.

        Not if an asker was lost, or one that sent its part no longer waits: they and the caller
        may be back at the step, with another state. Nor if the caller joined the job later, or
        has begun something else after this attempt.
        """
        pending = self._pending.get(attempt.record.checkpoint_id)
        if pending is None or pending.given_up:
            return False
        if c.incarnation in attempt.tickets or c.incarnation in pending.parts:
            return False
        if c.incarnation not in pending.record.expected or self._attempts.went_past(attempt, c):
            return False
        if c.ranks and c.ranks != tuple(sorted(pending.record.expected.values())):
            return False
        if self._roster.losses.newest_generation <= attempt.record.generation:
            return True
        return attempt.tickets.keys() <= self._live_incarnations()

    def _ahead_of(self, c: BeginCheckpoint) -> Attempt | None:
        """An open attempt at a higher step, which the caller can join when it comes to it.

        Its own saves are behind the others', because one of theirs has failed: should it end theirs
        to begin one that they will not come to, they would overtake each other for ever.
        """
        if not self._attempts.goes_forward(c):
            return None
        for attempt in self._attempts:
            if attempt.record.step > c.step and self._may_join(attempt, c):
                return attempt
        return None

    def _begin_attempt(self, before: Attempt | None, c: BeginCheckpoint, out: Outbox) -> Attempt:
        """Begin an attempt at a step; what is open of the one before has ended."""
        expected = self._pending.live_members(c.ranks)
        unfinished = self._pending.get(before.record.checkpoint_id) if before else None
        if unfinished is not None:
            self._pending.abort(
                unfinished, f"{c.worker_id} has begun to save step {c.step} again", out
            )
        ranks = tuple(expected.values())
        attempt = self._attempts.begin(c.step, ranks, self._is_taken, out)
        pending = self._pending.open(attempt.record.checkpoint_id, c.step, expected, out)
        while oldest := self._attempts.oldest_over_bounds:
            forgotten = self._pending.get(oldest.record.checkpoint_id)
            if forgotten is not None:
                self._pending.abort(forgotten, "too many newer ones were begun", out)
            self._attempts.forget_oldest(out)
        out.emit(
            self._roster.job,
            "checkpoint.begun",
            checkpoint=attempt.record.checkpoint_id,
            step=c.step,
            ranks=len(ranks),
        )
        if missing := set(c.ranks).difference(ranks):
            names = ", ".join(map(str, sorted(missing)[:8]))
            self._pending.abort(pending, f"rank {names} is not a member any more", out)
        return attempt

    def _live_incarnations(self) -> set[int]:
        return {m.incarnation for m in self._roster.slots.held() if m.live}

    def _is_taken(self, checkpoint_id: str) -> bool:
        return checkpoint_id in self._committed.records or checkpoint_id in self._pending.by_id
