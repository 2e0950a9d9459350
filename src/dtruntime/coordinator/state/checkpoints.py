"""Commits of checkpoints: by one writer at once, or by all ranks together."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from .commands import HELD, Aborted, Committed, Lost, NotifyCheckpoint, Pending, Refused, Reply
from .outbox import Outbox
from .records import CheckpointRecord, PartRecord, PendingRecord
from .roster import Member, Roster

CHECKPOINTS_KEPT = 10_000
PENDING_LIMIT = 64
ABORTS_KEPT = 256
RANKS_CUT = 256


class PendingCheckpoint:
    """A checkpoint that lacks parts."""

    __slots__ = ("calls", "parts", "record")

    def __init__(self, record: PendingRecord) -> None:
        self.record = record
        self.parts: dict[int, PartRecord] = {}
        self.calls: set[int] = set()

    def missing_ranks(self) -> list[int]:
        """Ranks that have not sent their part."""
        expected = self.record.expected
        return sorted(rank for who, rank in expected.items() if who not in self.parts)


class Checkpoints:
    """The committed and pending checkpoints of one job."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self.committed: OrderedDict[str, CheckpointRecord] = OrderedDict()
        self.latest: CheckpointRecord | None = None
        """The committed checkpoint of the highest step; of equal steps the newest."""
        self.pending: dict[str, PendingCheckpoint] = {}
        self._calls: dict[int, PendingCheckpoint] = {}
        self._aborted_in: OrderedDict[str, int] = OrderedDict()
        """The generation in which a checkpoint was last aborted."""
        self._sequence = 0

    @property
    def held_calls(self) -> set[int]:
        """Calls that wait for an answer."""
        return set(self._calls)

    def notify(self, c: NotifyCheckpoint, member: Member, out: Outbox) -> Reply:
        """Take a checkpoint, or one member's part of one."""
        known = self.committed.get(c.checkpoint_id)
        if known is not None:
            self._check_same(known, c, member)
            return Committed(c.checkpoint_id, self._roster.generation)
        pending = self.pending.get(c.checkpoint_id)
        if not c.partial:
            self._check_not_pending(pending, c)
            return self._commit([_part(c, member)], c.worker_id, out)
        if not c.generation:
            raise Refused("invalid", "a partial checkpoint needs the generation it was made in")
        if stale := self._why_stale(pending, c, member):
            return self._aborted(c.checkpoint_id, stale)
        return self._add_part(pending or self._open(c, out), c, member, out)

    def time_out(self, calls: Iterable[int], out: Outbox) -> None:
        """The waits of these calls are over, their parts stay."""
        for call in calls:
            pending = self._calls.get(call)
            if pending is not None:
                self.hang_up(call)
                out.release(call, self._still_pending(pending))

    def hang_up(self, call: int) -> None:
        """The caller is gone; its part stays."""
        pending = self._calls.pop(call, None)
        if pending is not None:
            pending.calls.discard(call)

    def lose(self, losses: list[Lost], out: Outbox) -> None:
        """Abort what a lost member was to contribute to."""
        gone = {loss.incarnation: loss.worker_id for loss in losses}
        for pending in list(self.pending.values()):
            lacking = gone.keys() & (pending.record.expected.keys() - pending.parts.keys())
            if lacking:
                names = sorted(gone[incarnation] for incarnation in lacking)
                self._abort(
                    pending, f"{', '.join(names[:8])} was lost before sending its part", out
                )

    def restore(
        self,
        committed: list[CheckpointRecord],
        pending: list[PendingRecord],
        parts: list[PartRecord],
    ) -> None:
        """Take back what was stored."""
        for record in sorted(committed, key=lambda r: r.sequence):
            self._keep(record)
        for open_ in pending:
            if open_.checkpoint_id not in self.committed:
                self.pending[open_.checkpoint_id] = PendingCheckpoint(open_)
        for part in parts:
            if part.checkpoint_id in self.pending:
                self.pending[part.checkpoint_id].parts[part.incarnation] = part

    def _why_stale(
        self, pending: PendingCheckpoint | None, c: NotifyCheckpoint, member: Member
    ) -> str:
        """Why a part belongs to an attempt that is over, if so.

        It was written before its writer learned of a loss: the others have started over.
        """
        if c.generation < self._aborted_in.get(c.checkpoint_id, 0):
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
        part = pending.parts[member.incarnation] = _part(c, member)
        if len(pending.parts) == len(pending.record.expected):
            return self._finish(pending, c.worker_id, out)
        out.put("part", self._roster.job, part_key(part), part)
        if c.timeout <= 0 or not c.call:
            return self._still_pending(pending)
        pending.calls.add(c.call)
        self._calls[c.call] = pending
        return HELD

    def _open(self, c: NotifyCheckpoint, out: Outbox) -> PendingCheckpoint:
        expected: dict[int, int] = {}
        for rank in self._roster.present_ranks():
            member = self._roster.slots[rank]
            if member is None:
                raise Refused(
                    "not_ready",
                    f"rank {rank} of job {self._roster.job!r} has not registered yet, so a "
                    "checkpoint of all ranks cannot begin",
                    retry_after=0.5,
                )
            expected[member.incarnation] = rank
        if len(self.pending) >= PENDING_LIMIT:
            oldest = next(iter(self.pending.values()))
            self._abort(oldest, f"{PENDING_LIMIT} newer checkpoints were begun", out)
        record = PendingRecord(
            checkpoint_id=c.checkpoint_id,
            step=c.step,
            expected=expected,
            generation=self._roster.generation,
        )
        pending = self.pending[c.checkpoint_id] = PendingCheckpoint(record)
        out.put("pending", self._roster.job, c.checkpoint_id, record)
        return pending

    def _finish(self, pending: PendingCheckpoint, worker_id: str, out: Outbox) -> Committed:
        parts = sorted(pending.parts.values(), key=lambda p: p.rank)
        committed = self._commit(parts, worker_id, out, max(pending.record.expected))
        self._close(pending, committed, out)
        return committed

    def _abort(self, pending: PendingCheckpoint, detail: str, out: Outbox) -> None:
        checkpoint_id = pending.record.checkpoint_id
        self._close(pending, self._aborted(checkpoint_id, detail), out)
        self._aborted_in[checkpoint_id] = self._roster.generation
        self._aborted_in.move_to_end(checkpoint_id)
        if len(self._aborted_in) > ABORTS_KEPT:
            self._aborted_in.popitem(last=False)
        out.emit(
            self._roster.job,
            "checkpoint.aborted",
            checkpoint=checkpoint_id,
            step=pending.record.step,
            reason=detail,
        )

    def _close(self, pending: PendingCheckpoint, reply: Reply, out: Outbox) -> None:
        job = self._roster.job
        del self.pending[pending.record.checkpoint_id]
        out.delete("pending", job, pending.record.checkpoint_id)
        for part in pending.parts.values():
            out.delete("part", job, part_key(part))
        for call in pending.calls:
            del self._calls[call]
            out.release(call, reply)

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
            sequence=self._sequence + 1,
            newest_part=newest_part,
        )
        self._keep(record)
        out.put("checkpoint", self._roster.job, record.checkpoint_id, record)
        out.emit(
            self._roster.job,
            "checkpoint.committed",
            checkpoint=record.checkpoint_id,
            step=record.step,
            bytes=record.size_bytes,
            parts=record.parts,
        )
        self._forget_oldest(out)
        return Committed(record.checkpoint_id, self._roster.generation)

    def _keep(self, record: CheckpointRecord) -> None:
        self.committed[record.checkpoint_id] = record
        self._sequence = record.sequence
        if self.latest is None or record.step >= self.latest.step:
            self.latest = record

    def _forget_oldest(self, out: Outbox) -> None:
        while len(self.committed) > CHECKPOINTS_KEPT:
            oldest = next(r for r in self.committed.values() if r is not self.latest)
            del self.committed[oldest.checkpoint_id]
            out.delete("checkpoint", self._roster.job, oldest.checkpoint_id)

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

    def _check_not_pending(self, pending: PendingCheckpoint | None, c: NotifyCheckpoint) -> None:
        if pending is not None:
            raise Refused(
                "checkpoint_conflict",
                f"checkpoint {c.checkpoint_id!r} is being saved in parts by all ranks; it cannot "
                "be committed by one of them: use another id",
            )

    def _aborted(self, checkpoint_id: str, detail: str) -> Aborted:
        return Aborted(checkpoint_id, self._roster.generation, detail)

    def _still_pending(self, pending: PendingCheckpoint) -> Pending:
        missing = tuple(pending.missing_ranks()[:RANKS_CUT])
        return Pending(pending.record.checkpoint_id, self._roster.generation, missing)


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


def part_key(part: PartRecord) -> str:
    """What a part is stored under."""
    return f"{part.checkpoint_id}#{part.incarnation}"
