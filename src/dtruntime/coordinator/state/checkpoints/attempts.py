"""Attempts at saving a step together: the id that all ranks agree on, and the parts they send."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

import msgspec

from ..commands import Aborted, BeginCheckpoint, Begun, Lost, Pending, Refused, Reply
from ..effects import Outbox
from ..records import AskRecord, AttemptRecord, PartRecord, PendingRecord
from ..roster import Roster

ATTEMPTS_KEPT = 256
RANKS_KEPT = 262_144
"""Total ranks of the kept attempts; the newest attempt is always kept."""

_ID = re.compile(r"step-(\d+)-(\d+)")


def attempt_id(step: int, number: int) -> str:
    """The id of an attempt."""
    return f"step-{step:012d}-{number:06d}"


class Attempt:
    """A save of one step by all members that were live when the first of them began it."""

    __slots__ = ("record", "tickets")

    def __init__(self, record: AttemptRecord) -> None:
        self.record = record
        self.tickets: dict[int, int] = {}
        """Incarnation to the ticket of its request."""

    @property
    def begun(self) -> Begun:
        """The reply to every member that takes part."""
        return Begun(self.record.checkpoint_id, self.record.generation, self.record.ranks)


class Attempts:
    """The newest attempts of one job, open or over, in the order in which they were begun."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._kept: OrderedDict[str, Attempt] = OrderedDict()
        self._ranks = 0

    def __iter__(self) -> Iterator[Attempt]:
        return iter(self._kept.values())

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, checkpoint_id: str) -> Attempt | None:
        """An attempt that is kept."""
        return self._kept.get(checkpoint_id)

    def was_begun(self, checkpoint_id: str) -> bool:
        """Whether an attempt ever had this id, even a forgotten one."""
        match = _ID.fullmatch(checkpoint_id)
        if match is None:
            return False
        step, number = int(match[1]), int(match[2])
        given = 0 < number <= self._roster.attempts_begun
        return given and attempt_id(step, number) == checkpoint_id

    def newest(self, step: int) -> Attempt | None:
        """The newest attempt at a step."""
        return next((a for a in reversed(self._kept.values()) if a.record.step == step), None)

    def asked(self, c: BeginCheckpoint) -> Attempt | None:
        """The attempt that this call already got; refuses a call that a newer one overtook."""
        for attempt in reversed(self._kept.values()):
            ticket = attempt.tickets.get(c.incarnation, 0)
            if attempt.record.step != c.step or ticket < c.ticket:
                continue
            if ticket == c.ticket:
                return attempt
            raise Refused(
                "checkpoint_conflict",
                f"{c.worker_id} has begun step {c.step} again since, with ticket {ticket} after "
                f"{c.ticket}: use the id that the newer call returned",
            )
        return None

    def went_past(self, attempt: Attempt, c: BeginCheckpoint) -> bool:
        """Whether the caller joined a newer attempt before it made this call.

        Attempts that it was late for do not count: it is catching up with the others.
        """
        number = attempt.record.number
        return any(
            other.record.number > number
            and not other.record.is_late
            and other.tickets.get(c.incarnation, c.ticket) < c.ticket
            for other in self._kept.values()
        )

    def goes_forward(self, c: BeginCheckpoint) -> bool:
        """Whether the caller's last save was of a lower step, or this is its first."""
        asked = [
            a for a in self._kept.values() if a.tickets.get(c.incarnation, c.ticket) < c.ticket
        ]
        last = max(asked, key=lambda a: a.tickets[c.incarnation], default=None)
        return last is None or last.record.step < c.step

    def was_left_out(self, attempt: Attempt, by: Attempt, incarnation: int) -> bool:
        """Whether a member that joined ``by`` can no longer join an older attempt.

        A call that it made before may still be in flight, unless that has arrived too.
        """
        if incarnation in attempt.tickets or attempt.record.number > by.record.number:
            return False
        before = by.tickets[incarnation] - 1
        return not before or any(a.tickets.get(incarnation) == before for a in self._kept.values())

    def begun_before(self, attempt: Attempt, other: Attempt, incarnation: int) -> bool:
        """Whether a member joined one attempt before another."""
        mine, theirs = attempt.tickets.get(incarnation), other.tickets.get(incarnation)
        if mine is None or theirs is None:
            return attempt.record.number < other.record.number
        return mine < theirs

    def begin(
        self, step: int, ranks: tuple[int, ...], taken: Callable[[str], bool], out: Outbox
    ) -> Attempt:
        """Begin an attempt under an id that was never used and is not ``taken``."""
        roster = self._roster
        number = roster.attempts_begun + 1
        while taken(attempt_id(step, number)):
            number += 1
        roster.attempts_begun = number
        record = AttemptRecord(
            checkpoint_id=attempt_id(step, number),
            step=step,
            number=number,
            generation=roster.generation,
            ranks=ranks,
        )
        out.put(roster.job, roster.record())
        out.put(roster.job, record)
        return self._keep(record)

    def add(self, attempt: Attempt, c: BeginCheckpoint, out: Outbox) -> None:
        """A member joins an attempt."""
        attempt.tickets[c.incarnation] = c.ticket
        ask = AskRecord(attempt.record.checkpoint_id, c.incarnation, c.ticket)
        out.put(self._roster.job, ask)

    def end(self, checkpoint_id: str, why: str, out: Outbox, *, is_late: bool = False) -> None:
        """End an attempt: it will never be committed. Other ids are ignored."""
        attempt = self._kept.get(checkpoint_id)
        if attempt is not None:
            attempt.record = msgspec.structs.replace(attempt.record, ended=why, is_late=is_late)
            out.put(self._roster.job, attempt.record)

    def forget_oldest(self, out: Outbox) -> None:
        """Drop the oldest attempt."""
        checkpoint_id, attempt = self._kept.popitem(last=False)
        self._ranks -= len(attempt.record.ranks)
        out.delete(self._roster.job, attempt.record)
        for asked in attempt.tickets.items():
            out.delete(self._roster.job, AskRecord(checkpoint_id, *asked))

    @property
    def oldest_over_bounds(self) -> Attempt | None:
        """The attempt to forget next, if there are too many."""
        within = len(self._kept) <= ATTEMPTS_KEPT and self._ranks <= RANKS_KEPT
        return None if within or len(self._kept) < 2 else next(iter(self._kept.values()))

    def restore(self, attempts: list[AttemptRecord], asks: list[AskRecord]) -> None:
        """Restore what was stored."""
        for record in sorted(attempts, key=lambda r: r.number):
            self._keep(record)
        for ask in asks:
            if ask.checkpoint_id in self._kept:
                self._kept[ask.checkpoint_id].tickets[ask.incarnation] = ask.ticket

    def _keep(self, record: AttemptRecord) -> Attempt:
        attempt = self._kept[record.checkpoint_id] = Attempt(record)
        self._ranks += len(record.ranks)
        return attempt


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
        """The calls that wait for the commit, with the incarnation of the caller."""

    @property
    def given_up(self) -> bool:
        """Whether a member that sent its part may have gone on without waiting for the commit.

        Not one that lost its connection and sends its part again to keep waiting.
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
        """The generation in which each checkpoint was last aborted."""

    @property
    def held_calls(self) -> set[int]:
        """Calls that wait for an answer."""
        return set(self._calls)

    def get(self, checkpoint_id: str) -> PendingCheckpoint | None:
        """One that is pending."""
        return self.by_id.get(checkpoint_id)

    def was_aborted_since(self, checkpoint_id: str, generation: int) -> bool:
        """Whether a checkpoint was aborted after ``generation`` began."""
        return generation < self._aborted_in.get(checkpoint_id, 0)

    def live_members(self, ranks: tuple[int, ...] = ()) -> dict[int, int]:
        """The members that have to send a part, incarnation to rank, by rank."""
        expected: dict[int, int] = {}
        chosen = set(ranks)
        for rank in self._roster.present_ranks():
            if chosen and rank not in chosen:
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
        """Start to wait for the parts of a checkpoint; ``expected`` is incarnation to rank."""
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
        out.put(self._roster.job, record)
        return pending

    def hold(self, pending: PendingCheckpoint, call: int, incarnation: int) -> None:
        """Hold a member's call until the last part arrives."""
        pending.calls[call] = incarnation
        self._calls[call] = pending

    def awaiting(self, incarnation: int) -> list[tuple[Attempt, PendingCheckpoint]]:
        """The open attempts that wait for a member's part."""
        open_attempts = []
        for key, pending in self.by_id.items():
            attempt = self._attempts.get(key)
            awaited = incarnation in pending.record.expected and incarnation not in pending.parts
            if attempt is not None and awaited:
                open_attempts.append((attempt, pending))
        return open_attempts

    def abort(
        self, pending: PendingCheckpoint, detail: str, out: Outbox, *, is_late: bool = False
    ) -> None:
        """Abort a checkpoint: it will never be committed."""
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
        """Stop waiting for parts; held calls get the reply."""
        job = self._roster.job
        del self.by_id[pending.record.checkpoint_id]
        out.delete(job, pending.record)
        for part in pending.parts.values():
            out.delete(job, part)
        for call in pending.calls:
            del self._calls[call]
            out.release(call, reply)

    def time_out(self, calls: Iterable[int], out: Outbox) -> None:
        """Time out those of the calls that wait here; their parts stay."""
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
        """Abort the checkpoints that lack a part of a lost member."""
        gone = {loss.incarnation: loss.worker_id for loss in losses}
        for pending in list(self.by_id.values()):
            lacking = gone.keys() & (pending.record.expected.keys() - pending.parts.keys())
            if lacking:
                names = sorted(gone[incarnation] for incarnation in lacking)
                self.abort(pending, f"{', '.join(names[:8])} was lost before sending its part", out)

    def aborted(self, checkpoint_id: str, detail: str) -> Aborted:
        """The reply about an aborted checkpoint."""
        return Aborted(checkpoint_id, self._roster.generation, detail)

    def still_pending(self, pending: PendingCheckpoint) -> Pending:
        """The reply to a caller that does not wait any longer."""
        missing = tuple(pending.missing_ranks()[:RANKS_CUT])
        return Pending(pending.record.checkpoint_id, self._roster.generation, missing)

    def restore(self, pending: Iterable[PendingRecord], parts: Iterable[PartRecord]) -> None:
        """Restore what was stored."""
        for open_ in pending:
            self.by_id[open_.checkpoint_id] = PendingCheckpoint(open_)
        for part in parts:
            if part.checkpoint_id in self.by_id:
                self.by_id[part.checkpoint_id].parts[part.incarnation] = part
