"""Commits of checkpoints: by a single writer, or by all ranks together."""

from __future__ import annotations

from ..commands import (
    HELD,
    AbandonCheckpoints,
    Abandoned,
    BeginCheckpoint,
    Begun,
    Committed,
    NotifyCheckpoint,
    Refused,
    Reply,
)
from ..effects import Outbox
from ..members import Member
from ..records import CheckpointRecord, PartRecord, PendingRecord, copied
from ..roster import Roster
from .attempts import Attempt, Attempts, PendingCheckpoint, PendingCheckpoints
from .history import CommittedCheckpoints


class Checkpoints:
    """The committed and pending checkpoints of one job."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self.history = CommittedCheckpoints(roster.job)
        self.attempts = Attempts(roster)
        self.waiting = PendingCheckpoints(roster, self.attempts)
        self.committed = self.history.records
        """In the order of commits, including checkpoints that were deleted since."""
        self.pending = self.waiting.by_id
        """Those that lack parts, by their id."""

    @property
    def latest(self) -> CheckpointRecord | None:
        """The last committed checkpoint that still exists, whatever its step."""
        return self.history.latest

    def notify(self, c: NotifyCheckpoint, member: Member, out: Outbox) -> Reply:
        """A member has written a checkpoint, or its part of one."""
        record = self.committed.get(c.checkpoint_id)
        if record is not None:
            self._check_same(record, c, member)
            return Committed(c.checkpoint_id, self._roster.generation)
        pending = self.waiting.get(c.checkpoint_id)
        if not c.partial:
            self._check_one_writer(pending, c)
            return self._commit([copied(c, PartRecord, rank=member.rank)], c.worker_id, out)
        if not c.generation:
            raise Refused("invalid", "a partial checkpoint needs the generation it was made in")
        if stale := self._why_stale(pending, c, member):
            return self.waiting.aborted(c.checkpoint_id, stale)
        if pending is None:
            pending = self.waiting.open(c.checkpoint_id, c.step, self.waiting.live_members(), out)
        return self._add_part(pending, c, member, out)

    def restore(
        self,
        committed: list[CheckpointRecord],
        pending: list[PendingRecord],
        parts: list[PartRecord],
    ) -> None:
        """Restore what was stored."""
        self.history.restore(committed)
        self.waiting.restore((p for p in pending if p.checkpoint_id not in self.committed), parts)

    def _why_stale(
        self, pending: PendingCheckpoint | None, c: NotifyCheckpoint, member: Member
    ) -> str:
        """Why a part is of an attempt that is over; empty if it is not.

        Its attempt has ended, or it was written before its writer learned of a loss, after which
        the others have started over.
        """
        if pending is None and self.attempts.was_begun(c.checkpoint_id):
            attempt = self.attempts.get(c.checkpoint_id)
            return (attempt and attempt.record.ended) or "this attempt was over long ago"
        if self.waiting.was_aborted_since(c.checkpoint_id, c.generation):
            return "it was aborted while this part was being saved"
        if pending and member.incarnation in pending.parts:
            return ""
        begun = pending.record.generation if pending else None
        lost = self._roster.losses_since(member, c.generation, begun)
        if not lost:
            return ""
        names = ", ".join(loss.worker_id or "a member" for loss in lost[:8])
        return f"{names} was lost while it was being saved"

    def _add_part(
        self, pending: PendingCheckpoint, c: NotifyCheckpoint, member: Member, out: Outbox
    ) -> Reply:
        if pending.record.step != c.step:
            raise Refused(
                "checkpoint_conflict",
                f"checkpoint {c.checkpoint_id!r} is being saved for step {pending.record.step}, "
                f"but {member.worker_id} sent a part for step {c.step}",
            )
        if member.incarnation not in pending.record.expected:
            raise Refused(
                "checkpoint_conflict",
                f"checkpoint {c.checkpoint_id!r} was begun before {member.worker_id} joined: "
                "save under another id",
            )
        self._end_passed(c, out)
        part = pending.parts[member.incarnation] = copied(c, PartRecord, rank=member.rank)
        if len(pending.parts) == len(pending.record.expected):
            return self._finish(pending, c.worker_id, out)
        out.put(self._roster.job, part)
        if c.timeout <= 0 or not c.call:
            return self.waiting.still_pending(pending)
        self.waiting.hold(pending, c.call, member.incarnation)
        return HELD

    def _finish(self, pending: PendingCheckpoint, worker_id: str, out: Outbox) -> Committed:
        parts = sorted(pending.parts.values(), key=lambda p: p.rank)
        committed = self._commit(parts, worker_id, out, max(pending.record.expected))
        self.waiting.close(pending, committed, out)
        return committed

    def _commit(
        self, parts: list[PartRecord], worker_id: str, out: Outbox, newest_part: int = 0
    ) -> Committed:
        first = parts[0]
        record = copied(
            first,
            CheckpointRecord,
            size_bytes=sum(part.size_bytes for part in parts),
            is_full=all(part.is_full for part in parts),
            worker_id=worker_id,
            committed_at=out.now,
            parts=len(parts),
            sequence=self.history.sequence + 1,
            newest_part=newest_part,
        )
        self.history.add(record, out)
        out.emit(
            self._roster.job,
            "checkpoint.committed",
            checkpoint=record.checkpoint_id,
            step=record.step,
            bytes=record.size_bytes,
            parts=record.parts,
        )
        return Committed(record.checkpoint_id, self._roster.generation)

    def _check_same(self, record: CheckpointRecord, c: NotifyCheckpoint, member: Member) -> None:
        if c.partial:
            same = record.step == c.step and member.incarnation <= record.newest_part
        else:
            same = record.step == c.step and record.path == c.path and not record.newest_part
        if same:
            return
        raise Refused(
            "checkpoint_conflict",
            f"checkpoint {c.checkpoint_id!r} is committed for step {record.step} at "
            f"{record.path!r}, in {record.parts} parts; it cannot be committed again for step "
            f"{c.step} at {c.path!r}: use another id",
        )

    def _check_one_writer(self, pending: PendingCheckpoint | None, c: NotifyCheckpoint) -> None:
        if pending is not None or self.attempts.was_begun(c.checkpoint_id):
            raise Refused(
                "checkpoint_conflict",
                f"checkpoint {c.checkpoint_id!r} was begun by all ranks, in parts; it cannot be "
                "committed by one of them: send a part, or use another id",
            )

    # Attempts that members agree on

    def begin(self, c: BeginCheckpoint, out: Outbox) -> Begun:
        """The id under which a member saves a step together with the others."""
        attempt = self.attempts.asked(c)
        if attempt is not None:
            return attempt.begun
        attempt = self.attempts.newest(c.step)
        if attempt is not None and self._may_join(attempt, c):
            self.attempts.add(attempt, c, out)
            self._end_left_out(attempt, c, out)
            return attempt.begun
        ahead = self._ahead_of(c)
        attempt = self._begin_attempt(attempt, c, out)
        self.attempts.add(attempt, c, out)
        if ahead is None:
            self._end_left_out(attempt, c, out)
        elif late := self.waiting.get(attempt.record.checkpoint_id):
            detail = f"the others save step {ahead.record.step} already, with {c.worker_id}"
            self.waiting.abort(late, detail, out, is_late=True)
        return attempt.begun

    def abandon(self, c: AbandonCheckpoints, out: Outbox) -> Abandoned:
        """End the attempts of a member that goes back to an earlier state."""
        given_up = [p for p in self.pending.values() if c.incarnation in p.record.expected]
        for pending in given_up:
            self.waiting.abort(pending, f"{c.worker_id} has given up saving it", out)
        return Abandoned(len(given_up))

    def _end_passed(self, c: NotifyCheckpoint, out: Outbox) -> None:
        """End the attempts that a member joined before the one it now sends its part of.

        Members send their parts in the order in which they joined, so none of these will come.
        """
        stored = self.attempts.get(c.checkpoint_id)
        if stored is None:
            return
        for attempt, pending in self.waiting.awaiting(c.incarnation):
            if self.attempts.begun_before(attempt, stored, c.incarnation):
                detail = f"{c.worker_id} has stored its part of step {c.step} and none of this one"
                self.waiting.abort(pending, detail, out)

    def _end_left_out(self, begun: Attempt, c: BeginCheckpoint, out: Outbox) -> None:
        """End the attempts that a member can no longer join, since it joined a newer one."""
        for attempt, pending in self.waiting.awaiting(c.incarnation):
            if self.attempts.was_left_out(attempt, begun, c.incarnation):
                detail = f"{c.worker_id} has begun to save step {c.step} without asking for it"
                self.waiting.abort(pending, detail, out)

    def _may_join(self, attempt: Attempt, c: BeginCheckpoint) -> bool:
        """Whether a member that has not joined an attempt yet may do so.

        Not if an asker was lost, or one that sent its part no longer waits: they and the caller
        may be back at the step, with another state. Nor if the caller joined the job later, or
        has begun something else after this attempt.
        """
        pending = self.waiting.get(attempt.record.checkpoint_id)
        if pending is None or pending.given_up:
            return False
        if c.incarnation in attempt.tickets or c.incarnation in pending.parts:
            return False
        if c.incarnation not in pending.record.expected or self.attempts.went_past(attempt, c):
            return False
        if c.ranks and c.ranks != tuple(sorted(pending.record.expected.values())):
            return False
        if self._roster.losses.newest_generation <= attempt.record.generation:
            return True
        live = {m.incarnation for m in self._roster.slots.held() if m.live}
        return attempt.tickets.keys() <= live

    def _ahead_of(self, c: BeginCheckpoint) -> Attempt | None:
        """An open attempt at a higher step, which the caller can join when it comes to it.

        Its own saves are behind the others', because one of theirs has failed: should it end theirs
        to begin one that they will not come to, they would overtake each other for ever.
        """
        if not self.attempts.goes_forward(c):
            return None
        for attempt in self.attempts:
            if attempt.record.step > c.step and self._may_join(attempt, c):
                return attempt
        return None

    def _begin_attempt(self, before: Attempt | None, c: BeginCheckpoint, out: Outbox) -> Attempt:
        """Begin an attempt at a step; the one before it ends."""
        expected = self.waiting.live_members(c.ranks)
        unfinished = self.waiting.get(before.record.checkpoint_id) if before else None
        if unfinished is not None:
            self.waiting.abort(
                unfinished, f"{c.worker_id} has begun to save step {c.step} again", out
            )
        ranks = tuple(expected.values())
        attempt = self.attempts.begin(c.step, ranks, self._is_taken, out)
        pending = self.waiting.open(attempt.record.checkpoint_id, c.step, expected, out)
        while oldest := self.attempts.oldest_over_bounds:
            forgotten = self.waiting.get(oldest.record.checkpoint_id)
            if forgotten is not None:
                self.waiting.abort(forgotten, "too many newer ones were begun", out)
            self.attempts.forget_oldest(out)
        out.emit(
            self._roster.job,
            "checkpoint.begun",
            checkpoint=attempt.record.checkpoint_id,
            step=c.step,
            ranks=len(ranks),
        )
        if missing := set(c.ranks).difference(ranks):
            names = ", ".join(map(str, sorted(missing)[:8]))
            self.waiting.abort(pending, f"rank {names} is not a member any more", out)
        return attempt

    def _is_taken(self, checkpoint_id: str) -> bool:
        return checkpoint_id in self.committed or checkpoint_id in self.pending
