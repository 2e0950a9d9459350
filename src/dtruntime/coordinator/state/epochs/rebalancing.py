"""When what is left of an epoch is dealt anew, and in which shares."""

from __future__ import annotations

from collections.abc import Mapping

from ..commands import Refused
from ..members import Member
from ..records import ReaderRecord
from ..roster import Roster
from .ledger import Ledger, View

FULL_WEIGHT = 100
SEGMENTS_LIMIT = 10_000
SEGMENT_SLOTS_LIMIT = 2_000_000
"""Slots of all segments of an epoch together: workers are sent all of them."""
WISHED_SHARE = 0.75
"""How much of these limits is for dealing that could be left undone; the rest is for losses."""
WORTH = 2
"""What is left to one reader is dealt anew if it is more than this many of the largest claims."""


def lost_readers(ledger: Ledger, roster: Roster) -> list[ReaderRecord]:
    """The readers that are not members any more."""
    live = {m.incarnation for m in roster.slots.held() if m.live}
    return [r for r in ledger.readers.values() if r.incarnation not in live]


def is_stale(ledger: Ledger, roster: Roster) -> bool:
    """Whether the members are others than those that the current segment was dealt to.

    While nobody is live, there is nobody to deal to.
    """
    if ledger.generation == roster.generation or not roster.live_count:
        return False
    if ledger.view != roster.view() or lost_readers(ledger, roster):
        return True
    ledger.generation = roster.generation
    return False


def has_room(ledger: Ledger, roster: Roster, share: float = 1.0) -> bool:
    """Whether another segment stays within this share of the limits."""
    slots = roster.view()[0] + sum(segment.slot_count for segment in ledger.segments)
    return ledger.current < SEGMENTS_LIMIT * share and slots <= SEGMENT_SLOTS_LIMIT * share


def check_room(ledger: Ledger, roster: Roster, share: float = 1.0) -> None:
    """Refuse another segment where there are too many."""
    if not has_room(ledger, roster, share):
        raise Refused(
            "too_many_segments",
            f"{ledger.name} cannot be dealt anew after {ledger.current} segments: begin the next "
            "epoch, and find out why workers come and go so often",
        )


def is_worth_it(ledger: Ledger) -> bool:
    """Whether a reader has so much left that the idle should get of it.

    Not more often than each time that half of what was unclaimed has been claimed.
    """
    left, before = ledger.unclaimed, ledger.record.rebalanced_at
    worth = WORTH * ledger.step
    if left <= worth or (before and 2 * left > before):
        return False
    return ledger.largest_rest() > worth


def measured_weights(ledger: Ledger, roster: Roster, now: float) -> tuple[int, ...]:
    """Weights of all slots by how fast their holders have been; the fastest has 100.

    A member that has not shown how fast it is has 100 too, a slot that nobody holds 1.
    """
    rates: dict[int, float] = {}
    for reader in ledger.readers.values():
        known = _rate(ledger, reader, now)
        if known is not None:
            rates[reader.incarnation] = known
    fastest = max(rates.values(), default=1.0)
    holders = (roster.slots[rank] for rank in range(roster.view()[0]))
    return tuple(_weight(holder, rates, fastest) for holder in holders)


def _weight(member: Member | None, rates: Mapping[int, float], fastest: float) -> int:
    if member is None or not member.live:
        return 1
    rate = rates.get(member.incarnation, fastest)
    return max(1, min(FULL_WEIGHT, round(FULL_WEIGHT * rate / fastest)))


def _rate(ledger: Ledger, reader: ReaderRecord, now: float) -> float | None:
    """Samples a second; for one that has committed nothing, the most it can be."""
    if reader.count:
        return reader.count / max(reader.busy, 1e-3)
    pending = sum(part.stop - part.start for part in ledger.uncommitted(reader))
    return pending / max(now - reader.active_at, 1e-3) if pending else None


def given_weights(percentages: Mapping[int, int], roster: Roster) -> tuple[int, ...]:
    """Weights of all slots as somebody wants them; 0 counts as 1."""
    count, dead = roster.view()
    absent = sorted(rank for rank in percentages if rank >= count or rank in dead)
    if absent:
        raise Refused(
            "unknown_rank",
            f"rank {absent[0]} of job {roster.job!r} is not present: {count - len(dead)} of "
            f"{count} ranks are",
        )
    return tuple(max(1, percentages.get(rank, FULL_WEIGHT)) for rank in range(count))


def why(before: View, after: View, lost: list[ReaderRecord]) -> str:
    """Who came and who went between two segments, for people; empty if nobody did."""
    was, now = (set(range(count)) - dead for count, dead in (before, after))
    changes = {
        "lost": sorted((was - now) | {reader.slot for reader in lost}),
        "joined": sorted(now - was),
    }
    return ", ".join(f"{word} {_ranks(ranks)}" for word, ranks in changes.items() if ranks)


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
