"""Barriers: rounds, timeouts, and what the loss of a member does to them."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice

from ...telemetry import Histogram
from .commands import (
    HELD,
    Arrive,
    Lost,
    MembershipChanged,
    Missing,
    Passed,
    Refused,
    Reply,
    TimedOut,
)
from .effects import Outbox
from .members import Member, RankSet
from .records import RoundRecord, copied
from .roster import Roster

NAMES_CUT = 256
"""How many workers a reply names."""
ROUNDS_KEPT = 64
VALUES_KEPT = 16 * 1024 * 1024
"""Total size of the values of the kept rounds; those of the newest round are always kept."""
TIMEOUTS_KEPT = 4096
OPEN_LIMIT = 1024


class BarrierArrival:
    """A rank that waits in a round, with its calls."""

    __slots__ = ("calls", "member")

    def __init__(self, member: Member) -> None:
        self.member = member
        self.calls: dict[int, int] = {}
        """Call to ticket."""


class Round:
    """A round that is open."""

    __slots__ = (
        "arrived",
        "barrier_id",
        "expected",
        "gave_up",
        "number",
        "opened_at",
        "payloads",
        "ranks",
    )

    def __init__(
        self, barrier_id: str, number: int, ranks: tuple[int, ...], expected: RankSet, now: float
    ) -> None:
        self.barrier_id = barrier_id
        self.number = number
        self.ranks = ranks
        """Who takes part; empty: all present ranks."""
        self.expected = expected
        """Ranks; fixed when the round opens, so that a newcomer does not hold up the others."""
        self.arrived: dict[int, BarrierArrival] = {}
        self.gave_up: set[int] = set()
        """Ranks whose wait has timed out."""
        self.opened_at = now
        self.payloads: dict[int, bytes] = {}
        """The values that calls share, by call."""

    def values(self) -> dict[int, bytes] | None:
        """The value of each rank's newest call; None if nobody shares any."""
        if not self.payloads:
            return None
        newest = {
            rank: max(arrival.calls.items(), key=lambda call: (call[1], call[0]))[0]
            for rank, arrival in sorted(self.arrived.items())
        }
        return {rank: self.payloads.get(call, b"") for rank, call in newest.items()}

    def missing_ranks(self) -> RankSet:
        """Ranks that have not arrived; those that timed out only if nobody else is missing."""
        absent = self.expected.difference(self.arrived)
        return absent.difference(self.gave_up) or absent


class Barriers:
    """The barriers of one job."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self.open: dict[str, Round] = {}
        self.completed: OrderedDict[str, RoundRecord] = OrderedDict()
        self._timed_out: OrderedDict[tuple[int, int], TimedOut] = OrderedDict()
        """By incarnation and ticket."""
        self._calls: dict[int, tuple[Round, BarrierArrival]] = {}
        self._sequence = 0
        self._values_kept = 0
        self.latency = Histogram()
        """From the opening of a round to its completion, in seconds, since the start."""

    @property
    def completed_total(self) -> int:
        """How many rounds have been completed, over all restarts."""
        return self._sequence

    @property
    def held_calls(self) -> set[int]:
        """Calls that wait for an answer."""
        return set(self._calls)

    def arrive(self, c: Arrive, member: Member, out: Outbox) -> Reply:
        """Count an arrival; completes the round when it is the last."""
        done = self.completed.get(c.barrier_id)
        if done and 0 < c.ticket <= done.tickets.get(member.incarnation, 0):
            return copied(done, Passed)
        timed_out = self._timed_out.get((member.incarnation, c.ticket))
        if timed_out is not None:
            return timed_out
        lost = self._roster.losses_since(member, c.generation)
        if lost:
            return self._changed(lost)
        round_ = self._round(c, member, out.now)
        round_.expected.add(member.rank)
        arrival = round_.arrived.get(member.rank)
        if arrival is None:
            arrival = round_.arrived[member.rank] = BarrierArrival(member)
        arrival.calls[c.call] = c.ticket
        if c.payload is not None:
            round_.payloads[c.call] = c.payload
        self._calls[c.call] = round_, arrival
        if len(round_.arrived) == len(round_.expected):
            return self._complete(round_, out, answered=c.call)
        return HELD

    def time_out(self, calls: Iterable[int], out: Outbox) -> None:
        """Time out those of the calls that wait here."""
        by_round: dict[str, list[int]] = {}
        for call in calls:
            if call in self._calls:
                by_round.setdefault(self._calls[call][0].barrier_id, []).append(call)
        for barrier_id, expired in by_round.items():
            self._time_out_round(self.open[barrier_id], expired, out)

    def _time_out_round(self, round_: Round, expired: list[int], out: Outbox) -> None:
        missing = self.missing(round_)
        missing_count = len(round_.missing_ranks())
        reply = TimedOut(
            round_.number,
            self._roster.generation,
            len(round_.arrived),
            tuple(missing),
            missing_count,
        )
        for call in expired:
            if call in self._calls:
                self._give_up(round_, self._calls[call][1], call, reply, out)
        out.emit(
            self._roster.job,
            "barrier.timed_out",
            barrier=round_.barrier_id,
            round=round_.number,
            missing=", ".join(m.worker_id for m in missing[:8]),
            missing_count=missing_count,
        )

    def _give_up(
        self, round_: Round, arrival: BarrierArrival, call: int, reply: TimedOut, out: Outbox
    ) -> None:
        """End a call and all others with its ticket, for good."""
        ticket = arrival.calls[call]
        ended = [x for x, t in arrival.calls.items() if x == call or (ticket and t == ticket)]
        for one in ended:
            self._withdraw(one)
            out.release(one, reply)
        if not arrival.calls:
            round_.gave_up.add(arrival.member.rank)
        if ticket:
            self._timed_out[arrival.member.incarnation, ticket] = reply
            if len(self._timed_out) > TIMEOUTS_KEPT:
                self._timed_out.popitem(last=False)

    def hang_up(self, call: int) -> None:
        """The caller is gone: withdraw its arrival."""
        if call in self._calls:
            self._withdraw(call)

    def lose(self, losses: list[Lost], out: Outbox) -> None:
        """Fail the waits of members that knew a lost one, and of the lost themselves."""
        if not self.open:
            return
        gone = {loss.rank for loss in losses}
        by_heard = sorted(losses, key=lambda loss: loss.last_heard)
        heard = [loss.last_heard for loss in by_heard]
        replies: dict[int, MembershipChanged] = {}
        for round_ in list(self.open.values()):
            for arrival in list(round_.arrived.values()):
                unknown = bisect_right(heard, arrival.member.incarnation)
                if not arrival.member.live:
                    self._fail(round_, arrival, self._roster.refusal(arrival.member), out)
                elif unknown < len(losses):
                    if unknown not in replies:
                        replies[unknown] = self._changed(by_heard[unknown:])
                    self._fail(round_, arrival, replies[unknown], out)
            self._settle(round_, gone, out)

    def restore(self, records: list[RoundRecord]) -> None:
        """Restore completed rounds."""
        for record in sorted(records, key=lambda r: r.sequence):
            self.completed[record.barrier_id] = record
            self._sequence = max(self._sequence, record.sequence)
            self._values_kept += _size_of_values(record)

    def awaited_vacancies(self, round_: Round) -> RankSet:
        """The expected ranks of a round that nobody holds yet."""
        vacant = self._roster.vacant_ranks()
        return vacant.intersection(round_.ranks) if round_.ranks else vacant

    def missing(self, round_: Round, most: int = NAMES_CUT) -> list[Missing]:
        """The first missing workers, with the last step each reported."""
        return [self._describe(rank) for rank in islice(round_.missing_ranks(), most)]

    def _round(self, c: Arrive, member: Member, now: float) -> Round:
        """The open round of an arrival; the first arrival opens it."""
        if c.ranks and member.rank not in c.ranks:
            raise Refused(
                "invalid",
                f"{c.worker_id!r} of rank {member.rank} cannot enter barrier {c.barrier_id!r}, "
                f"which is for {_named(c.ranks)}",
            )
        round_ = self.open.get(c.barrier_id)
        if round_ is None:
            round_ = self.open[c.barrier_id] = self._opened(c, now)
        elif round_.ranks != c.ranks:
            raise Refused(
                "invalid",
                f"workers disagree about who takes part in barrier {c.barrier_id!r}: "
                f"{_named(round_.ranks)} or {_named(c.ranks)}; give the same ranks everywhere",
            )
        return round_

    def _opened(self, c: Arrive, now: float) -> Round:
        if len(self.open) >= OPEN_LIMIT:
            raise Refused(
                "too_many_barriers",
                f"job {self._roster.job!r} has {OPEN_LIMIT} open barriers: workers disagree "
                f"about barrier names, e.g. {next(iter(self.open))!r} and {c.barrier_id!r}",
            )
        before = self.completed.get(c.barrier_id)
        present = self._roster.present_ranks()
        expected = present.intersection(c.ranks) if c.ranks else present.copy()
        return Round(c.barrier_id, before.round + 1 if before else 1, c.ranks, expected, now)

    def _complete(self, round_: Round, out: Outbox, answered: int = 0) -> Passed:
        tickets: dict[int, int] = {}
        for arrival in round_.arrived.values():
            # Participants know each other, even those whose last call precedes a registration.
            arrival.member.heard = self._roster.next_incarnation
            if ticket := max(arrival.calls.values()):
                tickets[arrival.member.incarnation] = ticket
        participants = len(round_.arrived)
        record = RoundRecord(
            barrier_id=round_.barrier_id,
            round=round_.number,
            generation=self._roster.generation,
            participants=participants,
            tickets=tickets,
            sequence=self._sequence + 1,
            values=round_.values(),
            left_out=self._roster.live_count - participants,
        )
        passed = copied(record, Passed)
        for call in [call for arrival in round_.arrived.values() for call in arrival.calls]:
            del self._calls[call]
            if call != answered:
                out.release(call, passed)
        del self.open[round_.barrier_id]
        self.latency.observe(max(0.0, out.now - round_.opened_at))
        self._remember(record, out)
        return passed

    def _remember(self, record: RoundRecord, out: Outbox) -> None:
        self._sequence = record.sequence
        before = self.completed.pop(record.barrier_id, None)
        self._values_kept += _size_of_values(record) - _size_of_values(before)
        self.completed[record.barrier_id] = record
        out.put(self._roster.job, record)
        while len(self.completed) > ROUNDS_KEPT or (
            self._values_kept > VALUES_KEPT and len(self.completed) > 1
        ):
            _, forgotten = self.completed.popitem(last=False)
            self._values_kept -= _size_of_values(forgotten)
            out.delete(self._roster.job, forgotten)

    def _withdraw(self, call: int) -> None:
        round_, arrival = self._calls.pop(call)
        del arrival.calls[call]
        round_.payloads.pop(call, None)
        if not arrival.calls:
            del round_.arrived[arrival.member.rank]
        if not round_.arrived:
            del self.open[round_.barrier_id]

    def _fail(self, round_: Round, arrival: BarrierArrival, reply: object, out: Outbox) -> None:
        del round_.arrived[arrival.member.rank]
        for call in arrival.calls:
            del self._calls[call]
            round_.payloads.pop(call, None)
            out.release(call, reply)

    def _settle(self, round_: Round, gone: set[int], out: Outbox) -> None:
        """After a loss: drop an empty round, and expect only ranks that can still arrive."""
        if not round_.arrived:
            del self.open[round_.barrier_id]
            return
        absent = (rank for rank in gone if not self._roster.is_present(rank))
        round_.expected = round_.expected.difference(absent).union(self.awaited_vacancies(round_))
        if not round_.expected.difference(round_.arrived):
            self._complete(round_, out)

    def _changed(self, lost: Iterable[Lost]) -> MembershipChanged:
        survivors = tuple(self._roster.present_ranks())
        newest = sorted(lost, key=lambda loss: loss.generation)[-NAMES_CUT:]
        return MembershipChanged(self._roster.generation, tuple(newest), survivors)

    def _describe(self, rank: int) -> Missing:
        member = self._roster.slots[rank] if rank < len(self._roster.slots) else None
        if member is None or not member.live:
            return Missing(f"worker-{rank}", rank, None, registered=False)
        return Missing(member.worker_id, rank, member.last_step, registered=True)


def _size_of_values(record: RoundRecord | None) -> int:
    return sum(map(len, record.values.values())) if record and record.values else 0


def _named(ranks: tuple[int, ...]) -> str:
    if not ranks:
        return "all"
    return f"ranks {', '.join(map(str, ranks[:8]))}{', ...' * (len(ranks) > 8)}"
