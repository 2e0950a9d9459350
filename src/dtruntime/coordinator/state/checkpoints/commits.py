"""Commits of checkpoints: by one writer at once, or by all ranks together."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from ..commands import (
    HELD,
    AbandonCheckpoints,
    Abandoned,
    BeginCheckpoint,
    Begun,
    Committed,
    Lost,
    NotifyCheckpoint,
    Refused,
    Reply,
)
from ..effects import Outbox
from ..members import Member
from ..records import CheckpointRecord, PartRecord, PendingRecord
from ..roster import Roster
from .attempts import Attempt, Attempts, PendingCheckpoint, PendingCheckpoints, part_key
from .history import CommittedCheckpoints


class Checkpoints:
    """The committed and pending checkpoints of one job."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self.history = CommittedCheckpoints(roster.job)
        self.attempts = Attempts(roster)
        self._pending = PendingCheckpoints(roster, self.attempts)
        self.agreements = CheckpointAgreements(roster, self.attempts, self._pending, self.history)

    @property
    def committed(self) -> OrderedDict[str, CheckpointRecord]:
        """All that is committed, in that order; also what was deleted since."""
        return self.history.records

    @property
    def latest(self) -> CheckpointRecord | None:
        """The one that was committed last and is still there: maybe one of a lower step."""
        return self.history.latest

    @property
    def pending(self) -> dict[str, PendingCheckpoint]:
        """Those that lack parts, by their id."""
        return self._pending.by_id

    @property
    def held_calls(self) -> set[int]:
        """Calls that wait for an answer."""
        return self._pending.held_calls

    def notify(self, c: NotifyCheckpoint, member: Member, out: Outbox) -> Reply:
        """Take a checkpoint, or one member's part of one."""
        known = self.committed.get(c.checkpoint_id)
        if known is not None:
            self._check_same(known, c, member)
            return Committed(c.checkpoint_id, self._roster.generation)
        pending = self._pending.get(c.checkpoint_id)
        if not c.partial:
            self._check_one_writer(pending, c)
            return self._commit([_part(c, member)], c.worker_id, out)
        if not c.generation:
            raise Refused("invalid", "a partial checkpoint needs the generation it was made in")
        if stale := self._why_stale(pending, c, member):
            return self._pending.aborted(c.checkpoint_id, stale)
        if pending is None:
            pending = self._pending.open(c.checkpoint_id, c.step, self._pending.live_members(), out)
        return self._add_part(pending, c, member, out)

    def time_out(self, calls: Iterable[int], out: Outbox) -> None:
        """The waits of these calls are over, their parts stay."""
        self._pending.time_out(calls, out)

    def hang_up(self, call: int) -> None:
        """The caller is gone; its part stays."""
        self._pending.hang_up(call)

    def lose(self, losses: list[Lost], out: Outbox) -> None:
        """Abort what a lost member was to contribute to."""
        self._pending.lose(losses, out)

    def restore(
        self,
        committed: list[CheckpointRecord],
        pending: list[PendingRecord],
        parts: list[PartRecord],
    ) -> None:
        """Take back what was stored."""
        self.history.restore(committed)
        self._pending.restore((p for p in pending if p.checkpoint_id not in self.committed), parts)

    def _why_stale(
        self, pending: PendingCheckpoint | None, c: NotifyCheckpoint, member: Member
    ) -> str:
        """Why a part belongs to an attempt that is over, if so.

        It was written before its writer learned of a loss, and the others have started over; or
        it is of an attempt that was begun and has ended.
        """
        if pending is None and self.attempts.was_begun(c.checkpoint_id):
            attempt = self.attempts.get(c.checkpoint_id)
            return (attempt and attempt.record.ended) or "this attempt was over long ago"
        if self._pending.was_aborted_since(c.checkpoint_id, c.generation):
            return "it was aborted while this part was being saved"
        if pending and member.incarnation in pending.parts:
            return ""
        begun = pending.record.generation if pending else None
        lost = self._roster.untold(member, c.generation, begun)
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
        self.agreements.end_passed(c, out)
        part = pending.parts[member.incarnation] = _part(c, member)
        if len(pending.parts) == len(pending.record.expected):
            return self._finish(pending, c.worker_id, out)
        out.put("part", self._roster.job, part_key(part), part)
        if c.timeout <= 0 or not c.call:
            return self._pending.still_pending(pending)
        self._pending.hold(pending, c.call, member.incarnation)
        return HELD

    def _finish(self, pending: PendingCheckpoint, worker_id: str, out: Outbox) -> Committed:
        parts = sorted(pending.parts.values(), key=lambda p: p.rank)
        committed = self._commit(parts, worker_id, out, max(pending.record.expected))
        self._pending.close(pending, committed, out)
        return committed

    def _commit(
        self, parts: list[PartRecord], worker_id: str, out: Outbox, newest_part: int = 0
    ) -> Committed:
        first = parts[0]
        record = CheckpointRecord(
            checkpoint_id=first.checkpoint_id,
            step=first.step,
            epoch=first.epoch,
            path=first.path,
            size_bytes=sum(part.size_bytes for part in parts),
            is_full=all(part.is_full for part in parts),
            worker_id=worker_id,
            committed_at=out.now,
            parts=len(parts),
            metadata=first.metadata,
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

    def _check_same(self, known: CheckpointRecord, c: NotifyCheckpoint, member: Member) -> None:
        if c.partial:
            same = known.step == c.step and member.incarnation <= known.newest_part
        else:
            same = known.step == c.step and known.path == c.path and not known.newest_part
        if same:
            return
        raise Refused(
            "checkpoint_conflict",
            f"checkpoint {c.checkpoint_id!r} is committed for step {known.step} at {known.path!r}, "
            f"in {known.parts} parts; it cannot be committed again for step {c.step} at "
            f"{c.path!r}: use another id",
        )

    def _check_one_writer(self, pending: PendingCheckpoint | None, c: NotifyCheckpoint) -> None:
        if pending is not None or self.attempts.was_begun(c.checkpoint_id):
            raise Refused(
                "checkpoint_conflict",
                f"checkpoint {c.checkpoint_id!r} was begun by all ranks, in parts; it cannot be "
                "committed by one of them: send a part, or use another id",
            )


def _part(c: NotifyCheckpoint, member: Member) -> PartRecord:
    return PartRecord(
        checkpoint_id=c.checkpoint_id,
        incarnation=member.incarnation,
        rank=member.rank,
        step=c.step,
        epoch=c.epoch,
        path=c.path,
        size_bytes=c.size_bytes,
        is_full=c.is_full,
        metadata=c.metadata,
    )


class CheckpointAgreements:
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
