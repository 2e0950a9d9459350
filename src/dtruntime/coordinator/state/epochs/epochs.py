"""The ledgers of a job: claims, commits, and reassignment when the membership changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from msgspec.structs import replace

from ..commands import (
    HELD,
    Claim,
    Commit,
    Complete,
    Consumed,
    Granted,
    Moved,
    Rebalance,
    Rebalanced,
    Refused,
    Reply,
    Waiting,
)
from ..datasets import Datasets
from ..effects import Outbox
from ..members import Member
from ..records import EpochRecord, ReaderRecord, SegmentRecord, copied, place_of
from ..roster import Roster
from .ledger import Ledger, Offer, View, Wait

EPOCHS_KEPT = 64
"""For each dataset."""
SLOTS_CUT = 256


class Epochs:
    """The ledgers of one job."""

    def __init__(self, roster: Roster, datasets: Datasets) -> None:
        self._roster = roster
        self._datasets = datasets
        self.ledgers: dict[str, dict[int, Ledger]] = {}
        """By dataset and epoch, in the order in which they were begun."""
        self._calls: dict[int, Ledger] = {}
        self._sequence = 0

    def __iter__(self) -> Iterator[Ledger]:
        return (ledger for of_one in self.ledgers.values() for ledger in of_one.values())

    @property
    def held_calls(self) -> set[int]:
        """Calls that wait for an answer."""
        return set(self._calls)

    # Commands

    def claim(self, c: Claim, member: Member, out: Outbox) -> Reply:
        """Claim samples of a lane, or learn of a newer segment."""
        ledger = self.ledgers.get(c.dataset_id, {}).get(c.epoch)
        if ledger is None and not c.segment:
            return self._moved(self._open(c, out), Wait(member, 0))
        ledger = ledger or self._known(c.dataset_id, c.epoch)
        ledger.check_place(c)
        if ledger.record.complete:
            return Complete(self._roster.generation, member.rank)
        if is_stale(ledger, self._roster):
            self._cut(ledger, (), out)
        if c.segment != ledger.current:
            return self._moved(ledger, Wait(member, c.known))
        reader = ledger.with_claim(c, member, out.now)
        if reader is not ledger.readers.get(reader.incarnation):
            ledger.keep(reader)
            out.put(self._roster.job, reader)
        return self._after_claim(ledger, reader, c, member, out)

    def commit(self, c: Commit, member: Member, out: Outbox) -> Consumed:
        """Commit what a member took up to a position."""
        ledger = self._known(c.dataset_id, c.epoch)
        reader = ledger.readers.get(member.incarnation)
        if ledger.record.complete:
            return Consumed(self._roster.generation, ledger.current)
        if reader is None:
            ledger.check_taken(None, c)
            return Consumed(self._roster.generation, ledger.current)
        updated = ledger.with_commit(reader, c, out.now)
        if updated is not reader:
            ledger.keep(updated)
            out.put(self._roster.job, updated)
            self._complete_if_finished(ledger, out)
        return Consumed(self._roster.generation, ledger.current)

    def rebalance(self, c: Rebalance, out: Outbox) -> Rebalanced:
        """Reassign what nobody has started."""
        ledger = self._known(c.dataset_id, c.epoch)
        if ledger.record.complete:
            raise Refused(
                "epoch_complete", f"{ledger.name} is complete: nothing is left to reassign"
            )
        if not self._roster.live_count:
            raise Refused(
                "not_ready", f"job {self._roster.job!r} has no live workers to read {ledger.name}"
            )
        if c.weights:
            weights = given_weights(c.weights, self._roster)
        else:
            weights = measured_weights(ledger, self._roster, out.now)
        if not self._is_assigned_by(ledger, weights):
            check_room(ledger, self._roster, WISHED_SHARE)
            self._cut(ledger, weights, out)
        return Rebalanced(ledger.current, weights)

    def time_out(self, calls: Iterable[int], out: Outbox) -> None:
        """Time out those of the calls that wait here."""
        for call in calls:
            ledger = self._calls.get(call)
            if ledger is not None:
                member = ledger.calls[call].member
                self.hang_up(call)
                out.release(call, self._waiting(ledger, member))

    def hang_up(self, call: int) -> None:
        """The caller is gone: its claims stay, its offer is withdrawn."""
        ledger = self._calls.pop(call, None)
        if ledger is None:
            return
        incarnation = ledger.calls.pop(call).member.incarnation
        offer = ledger.offers.get(incarnation)
        if offer is not None and offer.call == call:
            del ledger.offers[incarnation]

    def membership_changed(self, out: Outbox) -> None:
        """Move waiting readers to a new segment, and refuse those that were lost.

        Ledgers without waiting readers are updated at the next claim; nothing happens in them
        before.
        """
        for ledger in list({id(ledger): ledger for ledger in self._calls.values()}.values()):
            for call, (member, _) in list(ledger.calls.items()):
                if not member.live:
                    self.hang_up(call)
                    out.release(call, self._roster.refusal(member))
            if ledger.calls and is_stale(ledger, self._roster):
                try:
                    self._cut(ledger, (), out)
                except Refused as refusal:
                    self._refuse_all(ledger, refusal, out)

    def restore(
        self,
        epochs: list[EpochRecord],
        segments: list[SegmentRecord],
        readers: list[ReaderRecord],
    ) -> list[str]:
        """Restore what was stored; returns what had to be left out."""
        by_ledger: dict[int, list[SegmentRecord]] = {}
        for segment in segments:
            by_ledger.setdefault(segment.ledger, []).append(segment)
        ledgers: dict[int, Ledger] = {}
        left_out: list[str] = []
        for record in sorted(epochs, key=lambda r: r.sequence):
            self._sequence = max(self._sequence, record.sequence)
            own = sorted(by_ledger.pop(record.sequence, []), key=lambda s: s.number)
            if len(own) != (0 if record.complete else record.segment_count):
                left_out.append(f"{' '.join(place_of(record))} with {len(own)} segments")
                continue
            ledgers[record.sequence] = self._keep(Ledger(record, own))
        left_out += [" ".join(place_of(s)) for rest in by_ledger.values() for s in rest]
        for reader in readers:
            if reader.ledger in ledgers:
                ledgers[reader.ledger].keep(reader)
            else:
                left_out.append(" ".join(place_of(reader)))
        return left_out

    def _after_claim(
        self, ledger: Ledger, reader: ReaderRecord, c: Claim, member: Member, out: Outbox
    ) -> Reply:
        offer = ledger.with_offer(reader, c, out.now)
        before = ledger.offers.get(reader.incarnation)
        if before is not None:
            # A newer call of the same reader withdraws its earlier offer.
            self.time_out([before.call], out)
        if offer is not None:
            ledger.offers[reader.incarnation] = Offer(c.call, offer)
        if self._complete_if_finished(ledger, out):
            return Complete(self._roster.generation, member.rank)
        if ledger.idle and self._rebalance_for_idle(ledger, out):
            return self._moved(ledger, Wait(member, c.known))
        if c.upto < c.length or not (offer or member.rank in ledger.finished):
            return Granted(self._roster.generation, member.rank)
        if c.timeout <= 0 or not c.call:
            ledger.offers.pop(reader.incarnation, None)
            return self._waiting(ledger, member)
        ledger.calls[c.call] = Wait(member, c.known)
        self._calls[c.call] = ledger
        return HELD

    # Segments

    def _open(self, c: Claim, out: Outbox) -> Ledger:
        dataset = self._datasets.get(c.dataset_id)
        self._forget_oldest(c.dataset_id, out)
        self._sequence += 1
        count, dead = self._roster.view()
        samples = dataset.record.total_samples
        record = copied(c, EpochRecord, samples=samples, sequence=self._sequence)
        segment = copied(
            record,
            SegmentRecord,
            ledger=self._sequence,
            number=1,
            slot_count=count,
            dead=tuple(sorted(dead)),
        )
        job = self._roster.job
        out.put(job, record)
        out.put(job, segment)
        out.emit(job, "epoch.began", dataset=c.dataset_id, epoch=c.epoch, samples=record.samples)
        return self._keep(Ledger(record, [segment]))

    def _keep(self, ledger: Ledger) -> Ledger:
        record = ledger.record
        self.ledgers.setdefault(record.dataset_id, {})[record.epoch] = ledger
        return ledger

    def _is_assigned_by(self, ledger: Ledger, weights: tuple[int, ...]) -> bool:
        """Whether the current segment has these weights and nobody has started to read it."""
        untouched = all(r.segment < ledger.current for r in ledger.readers.values())
        same = ledger.segments[-1].weights == weights
        return untouched and same and not is_stale(ledger, self._roster)

    def _rebalance_for_idle(self, ledger: Ledger, out: Outbox) -> bool:
        """Reassign what slow readers have left, if that pays; returns whether it did."""
        room = has_room(ledger, self._roster, WISHED_SHARE)
        if not (is_worth_it(ledger) and room):
            return False
        weights = measured_weights(ledger, self._roster, out.now)
        self._cut(ledger, weights, out, ledger.unclaimed)
        return True

    def _cut(
        self, ledger: Ledger, weights: tuple[int, ...], out: Outbox, rebalanced_at: int = 0
    ) -> None:
        """End the current segment, and begin one for the present members."""
        check_room(ledger, self._roster)
        job, before, view = self._roster.job, ledger.view, self._roster.view()
        lost = lost_readers(ledger, self._roster)
        returned = ledger.cut(view, weights, lost)
        ledger.record = replace(ledger.record, rebalanced_at=rebalanced_at)
        ledger.generation = self._roster.generation
        for reader in lost:
            out.delete(job, reader)
        for segment in ledger.segments[-2:]:
            out.put(job, segment)
        out.put(job, ledger.record)
        out.emit(
            job,
            "epoch.segment",
            dataset=ledger.record.dataset_id,
            epoch=ledger.record.epoch,
            segment=ledger.current,
            why=why(before, view, lost) or "rebalanced",
            taken_back=returned,
        )
        self._release_all(ledger, lambda wait: self._moved(ledger, wait), out)

    def _complete_if_finished(self, ledger: Ledger, out: Outbox) -> bool:
        """Close the ledger if every slot has finished or offers to; returns whether it did."""
        count, dead = ledger.view
        if ledger.idle < count - len(dead):
            return False
        job, generation = self._roster.job, self._roster.generation
        self._delete_parts(ledger, out)
        ledger.close()
        record = ledger.record
        out.put(job, record)
        out.emit(
            job,
            "epoch.completed",
            dataset=record.dataset_id,
            epoch=record.epoch,
            samples=record.count,
            missing=record.samples - record.count,
            segments=record.segment_count,
        )
        self._release_all(ledger, lambda wait: Complete(generation, wait.member.rank), out)
        return True

    def _delete_parts(self, ledger: Ledger, out: Outbox) -> None:
        for segment in ledger.segments:
            out.delete(self._roster.job, segment)
        for reader in ledger.readers.values():
            out.delete(self._roster.job, reader)

    def _forget_oldest(self, dataset_id: str, out: Outbox) -> None:
        """Make room for another epoch; complete ones go first."""
        kept = self.ledgers.get(dataset_id, {})
        while len(kept) >= EPOCHS_KEPT:
            oldest = next((x for x in kept.values() if x.record.complete), None)
            oldest = oldest or next(iter(kept.values()))
            refusal = unknown(oldest.record.dataset_id, oldest.record.epoch, self._roster.job)
            self._drop(oldest, refusal, out)
            del kept[oldest.record.epoch]

    def forget(self, dataset_id: str, out: Outbox) -> int:
        """Forget the ledgers of a dataset; returns how many there were."""
        ledgers = self.ledgers.pop(dataset_id, {})
        for ledger in ledgers.values():
            refusal = unknown(dataset_id, ledger.record.epoch, self._roster.job)
            self._drop(ledger, refusal, out)
        return len(ledgers)

    def _drop(self, ledger: Ledger, refusal: Refused, out: Outbox) -> None:
        self._refuse_all(ledger, refusal, out)
        self._delete_parts(ledger, out)
        out.delete(self._roster.job, ledger.record)

    # Answers

    def _known(self, dataset_id: str, epoch: int) -> Ledger:
        self._datasets.get(dataset_id)
        ledger = self.ledgers.get(dataset_id, {}).get(epoch)
        if ledger is None:
            raise unknown(dataset_id, epoch, self._roster.job)
        return ledger

    def _moved(self, ledger: Ledger, wait: Wait) -> Moved:
        reader = ledger.readers.get(wait.member.incarnation)
        unknown = tuple(ledger.segments[wait.known :])
        return Moved(self._roster.generation, wait.member.rank, unknown, reader)

    def _waiting(self, ledger: Ledger, member: Member) -> Waiting:
        unfinished = tuple(ledger.unfinished()[:SLOTS_CUT])
        return Waiting(self._roster.generation, member.rank, unfinished)

    def _release_all(self, ledger: Ledger, answer: Callable[[Wait], object], out: Outbox) -> None:
        for call, wait in list(ledger.calls.items()):
            self.hang_up(call)
            out.release(call, answer(wait))

    def _refuse_all(self, ledger: Ledger, refusal: Refused, out: Outbox) -> None:
        self._release_all(ledger, lambda _: refusal, out)


def unknown(dataset_id: str, epoch: int, job: str) -> Refused:
    """The refusal for an epoch that has no ledger."""
    return Refused(
        "unknown_epoch",
        f"epoch {epoch} of dataset {dataset_id!r} in job {job!r} was not begun, or is forgotten "
        f"because {EPOCHS_KEPT} others were begun since",
    )


FULL_WEIGHT = 100
SEGMENTS_LIMIT = 10_000
SEGMENT_SLOTS_LIMIT = 2_000_000
"""Total slots of all segments of an epoch: workers are sent all of them."""
WISHED_SHARE = 0.75
"""The share of these limits for optional rebalancing; the rest is for losses."""
WORTH = 2
"""Rebalancing pays if one reader has more left than this many of the largest claims."""


def lost_readers(ledger: Ledger, roster: Roster) -> list[ReaderRecord]:
    """The readers that are no longer members."""
    live = {m.incarnation for m in roster.slots.held() if m.live}
    return [r for r in ledger.readers.values() if r.incarnation not in live]


def is_stale(ledger: Ledger, roster: Roster) -> bool:
    """Whether the membership has changed since the current segment was assigned.

    Not while nobody is live: there is nobody to assign samples to.
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
    """Refuse another segment if there are too many."""
    if not has_room(ledger, roster, share):
        raise Refused(
            "too_many_segments",
            f"{ledger.name} cannot be reassigned after {ledger.current} segments: begin the next "
            "epoch, and find out why workers come and go so often",
        )


def is_worth_it(ledger: Ledger) -> bool:
    """Whether some reader has so much left that idle ones should share it.

    At most each time that half of what was unclaimed has been claimed.
    """
    left, before = ledger.unclaimed, ledger.record.rebalanced_at
    worth = WORTH * ledger.step
    if left <= worth or (before and 2 * left > before):
        return False
    return ledger.largest_rest() > worth


def measured_weights(ledger: Ledger, roster: Roster, now: float) -> tuple[int, ...]:
    """Weights of all slots by the measured speed of their holders; the fastest has 100.

    A member whose speed is unknown has 100 too, a slot that nobody holds 1.
    """
    rates: dict[int, float] = {}
    for reader in ledger.readers.values():
        rate = _rate(ledger, reader, now)
        if rate is not None:
            rates[reader.incarnation] = rate
    fastest = max(rates.values(), default=1.0)
    holders = (roster.slots[rank] for rank in range(roster.view()[0]))
    return tuple(_weight(holder, rates, fastest) for holder in holders)


def _weight(member: Member | None, rates: Mapping[int, float], fastest: float) -> int:
    if member is None or not member.live:
        return 1
    rate = rates.get(member.incarnation, fastest)
    return max(1, min(FULL_WEIGHT, round(FULL_WEIGHT * rate / fastest)))


def _rate(ledger: Ledger, reader: ReaderRecord, now: float) -> float | None:
    """Samples per second; for a reader without commits, an upper bound."""
    if reader.count:
        return reader.count / max(reader.busy, 1e-3)
    pending = sum(part.stop - part.start for part in ledger.uncommitted(reader))
    return pending / max(now - reader.active_at, 1e-3) if pending else None


def given_weights(percentages: Mapping[int, int], roster: Roster) -> tuple[int, ...]:
    """Weights of all slots from given percentages; 0 counts as 1."""
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
    """Which ranks joined and left between two segments, in words; empty if none did."""
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
