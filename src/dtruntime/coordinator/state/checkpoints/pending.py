"""Checkpoints that lack parts, and the calls that wait for them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from ..commands import Aborted, Lost, Pending, Refused, Reply
from ..effects import Outbox
from ..records import PartRecord, PendingRecord
from ..roster import Roster
from .attempts import Attempt, Attempts

PENDING_LIMIT = 64
ABORTS_KEPT = 256
RANKS_CUT = 256


class PendingCheckpoint:
    """A checkpoint that lacks parts."""

    __slots__ = ("calls", "parts", "record")

    def __init__(self, record: PendingRecord) -> None:
        self.record = record
        self.parts: dict[int, PartRecord] = {}
        self.calls: dict[int, int] = {}
        """Those that wait for the commit, with the incarnation of the caller."""

    @property
    def given_up(self) -> bool:
        """Whether somebody who sent its part may have gone on without the commit.

        Not who has lost its connection, or the coordinator, and sends its part again to wait on.
        """
        return not self.parts.keys() <= set(self.calls.values())

    def missing_ranks(self) -> list[int]:
        """Ranks that have not sent their part."""
        expected = self.record.expected
        return sorted(rank for who, rank in expected.items() if who not in self.parts)


class PendingCheckpoints:
    """The pending checkpoints of one job, in the order in which they were begun."""

    def __init__(self, roster: Roster, attempts: Attempts) -> None:
        self._roster = roster
        self._attempts = attempts
        self.by_id: dict[str, PendingCheckpoint] = {}
        self._calls: dict[int, PendingCheckpoint] = {}
        self._aborted_in: OrderedDict[str, int] = OrderedDict()
        """The generation in which a checkpoint was last aborted."""

    @property
    def held_calls(self) -> set[int]:
        """Calls that wait for an answer."""
        return set(self._calls)

    def get(self, checkpoint_id: str) -> PendingCheckpoint | None:
        """One that is pending."""
        return self.by_id.get(checkpoint_id)

    def was_aborted_since(self, checkpoint_id: str, generation: int) -> bool:
        """Whether one was aborted after its writer had learned of a generation."""
        return generation < self._aborted_in.get(checkpoint_id, 0)

    def live_members(self, ranks: tuple[int, ...] = ()) -> dict[int, int]:
        """Incarnation to rank of all who have to send a part, in the order of ranks."""
        expected: dict[int, int] = {}
        wanted = set(ranks)
        for rank in self._roster.present_ranks():
            if wanted and rank not in wanted:
                continue
            member = self._roster.slots[rank]
            if member is None:
                raise Refused(
                    "not_ready",
                    f"rank {rank} of job {self._roster.job!r} has not registered yet, so a "
                    "checkpoint of all ranks cannot begin",
                    retry_after=0.5,
                )
            expected[member.incarnation] = rank
        return expected

    def open(
        self, checkpoint_id: str, step: int, expected: dict[int, int], out: Outbox
    ) -> PendingCheckpoint:
        """Await the parts of a checkpoint from members, given by incarnation and rank."""
        if len(self.by_id) >= PENDING_LIMIT:
            oldest = next(iter(self.by_id.values()))
            self.abort(oldest, f"{PENDING_LIMIT} newer checkpoints were begun", out)
        record = PendingRecord(
            checkpoint_id=checkpoint_id,
            step=step,
            expected=expected,
            generation=self._roster.generation,
        )
        pending = self.by_id[checkpoint_id] = PendingCheckpoint(record)
        out.put("pending", self._roster.job, checkpoint_id, record)
        return pending

    def hold(self, pending: PendingCheckpoint, call: int, incarnation: int) -> None:
        """Answer a member's call when the last part is there."""
        pending.calls[call] = incarnation
        self._calls[call] = pending

    def awaiting(self, incarnation: int) -> list[tuple[Attempt, PendingCheckpoint]]:
        """The open attempts that wait for a member's part."""
        found = []
        for key, pending in self.by_id.items():
            attempt = self._attempts.get(key)
            awaited = incarnation in pending.record.expected and incarnation not in pending.parts
            if attempt is not None and awaited:
                found.append((attempt, pending))
        return found

    def abort(
        self, pending: PendingCheckpoint, detail: str, out: Outbox, *, is_late: bool = False
    ) -> None:
        """End one: it will never be committed."""
        checkpoint_id = pending.record.checkpoint_id
        self.close(pending, self.aborted(checkpoint_id, detail), out)
        self._attempts.end(checkpoint_id, detail, out, is_late=is_late)
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

    def close(self, pending: PendingCheckpoint, reply: Reply, out: Outbox) -> None:
        """It is pending no more; whoever waits gets the reply."""
        job = self._roster.job
        del self.by_id[pending.record.checkpoint_id]
        out.delete("pending", job, pending.record.checkpoint_id)
        for part in pending.parts.values():
            out.delete("part", job, part_key(part))
        for call in pending.calls:
            del self._calls[call]
            out.release(call, reply)

    def time_out(self, calls: Iterable[int], out: Outbox) -> None:
        """The waits of these calls are over, their parts stay."""
        for call in calls:
            pending = self._calls.get(call)
            if pending is not None:
                self.hang_up(call)
                out.release(call, self.still_pending(pending))

    def hang_up(self, call: int) -> None:
        """The caller is gone; its part stays."""
        pending = self._calls.pop(call, None)
        if pending is not None:
            pending.calls.pop(call, None)

    def lose(self, losses: list[Lost], out: Outbox) -> None:
        """Abort what a lost member was to contribute to."""
        gone = {loss.incarnation: loss.worker_id for loss in losses}
        for pending in list(self.by_id.values()):
            lacking = gone.keys() & (pending.record.expected.keys() - pending.parts.keys())
            if lacking:
                names = sorted(gone[incarnation] for incarnation in lacking)
                self.abort(pending, f"{', '.join(names[:8])} was lost before sending its part", out)

    def aborted(self, checkpoint_id: str, detail: str) -> Aborted:
        """The answer about one that has ended."""
        return Aborted(checkpoint_id, self._roster.generation, detail)

    def still_pending(self, pending: PendingCheckpoint) -> Pending:
        """The answer to those who do not wait any longer."""
        missing = tuple(pending.missing_ranks()[:RANKS_CUT])
        return Pending(pending.record.checkpoint_id, self._roster.generation, missing)

    def restore(self, pending: Iterable[PendingRecord], parts: Iterable[PartRecord]) -> None:
        """Take back what was stored."""
        for open_ in pending:
            self.by_id[open_.checkpoint_id] = PendingCheckpoint(open_)
        for part in parts:
            if part.checkpoint_id in self.by_id:
                self.by_id[part.checkpoint_id].parts[part.incarnation] = part


def part_key(part: PartRecord) -> str:
    """What a part is stored under."""
    return f"{part.checkpoint_id}#{part.incarnation}"
