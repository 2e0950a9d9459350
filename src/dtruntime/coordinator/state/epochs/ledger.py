"""The ledger of an epoch: who reads how much of a dataset, so that every sample is consumed once.

Each slot of a segment reads a lane, a sequence of samples that workers compute from the
segments before. Here lanes are only lengths. A reader first *claims* its lane up to a place and
later *commits* what it has consumed. When a segment ends, live readers keep what they claimed,
lost ones what they committed; the rest is reassigned in the next segment.

A reader that waits at the end of its lane *offers* what it has not committed. Offers become commits
all at once, when with them the epoch is complete; until then they are nothing but claims.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from msgspec.structs import replace

from ....sharding.coverage_digest import Digest
from ..commands import Claim, Commit, Refused
from ..members import Member
from ..records import EpochRecord, ReaderRecord, SegmentRecord, TakenBack, copied

View = tuple[int, frozenset[int]]


class Wait(NamedTuple):
    """A reader that waits at the end of its lane, and how many ended segments it knows."""

    member: Member
    known: int


class Offer(NamedTuple):
    """A reader with everything committed, valid while its call is held."""

    call: int
    reader: ReaderRecord


class Ledger:
    """The segments and readers of one epoch; `Epochs` decides what happens to them."""

    def __init__(self, record: EpochRecord, segments: Iterable[SegmentRecord] = ()) -> None:
        self.record = record
        self.segments: list[SegmentRecord] = list(segments)
        """All of them, the last one current; none when the epoch is complete."""
        self.readers: dict[int, ReaderRecord] = {}
        """By incarnation; lost ones stay until the segment ends."""
        self.claimed = record.count
        """How many samples are committed, or claimed by readers that are not gone."""
        self.step = record.step
        """The largest single claim so far."""
        self.finished: set[int] = set()
        """Slots whose readers have claimed and committed their whole lane."""
        self.offers: dict[int, Offer] = {}
        """By incarnation, of readers that have not finished."""
        self.calls: dict[int, Wait] = {}
        """Held calls, by number."""
        self.generation = -1
        """The generation in which the current segment was last known to match the membership."""

    # Queries

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"epoch {self.record.epoch} of dataset {self.record.dataset_id!r}"

    @property
    def is_complete(self) -> bool:
        """Whether everybody has finished the epoch."""
        return self.record.complete

    @property
    def current(self) -> int:
        """The number of the current segment."""
        return self.record.segment_count

    @property
    def view(self) -> View:
        """The slots of the current segment, and which of them do not read."""
        segment = self.segments[-1]
        return segment.slot_count, frozenset(segment.dead)

    @property
    def unclaimed(self) -> int:
        """How many samples nobody has claimed."""
        return self.record.samples - self.claimed

    def taken(self, reader: ReaderRecord, number: int) -> int:
        """How much a reader has of its lane in one of the segments since it began to read."""
        if number < self.current:
            return self.segments[number - 1].taken[reader.slot]
        return reader.claim if reader.segment == number else 0

    def uncommitted(self, reader: ReaderRecord) -> Iterator[TakenBack]:
        """What a reader has taken and not committed, by segment."""
        start = reader.committed_position
        for number in range(reader.committed_segment, self.current + 1):
            stop = self.taken(reader, number)
            if start < stop:
                yield TakenBack(number, reader.slot, start, stop)
            start = 0

    def has_finished(self, reader: ReaderRecord) -> bool:
        """Whether a reader has claimed all of its lane, and committed all it ever claimed."""
        whole = reader.segment == self.current and reader.claim == reader.length
        return whole and next(self.uncommitted(reader), None) is None

    def unfinished(self) -> list[int]:
        """Slots of the current segment that still read, or have not begun."""
        count, dead = self.view
        idle = self.finished | {offer.reader.slot for offer in self.offers.values()}
        return [s for s in range(count) if s not in dead and s not in idle]

    @property
    def idle(self) -> int:
        """How many slots have finished, or offer to."""
        return len(self.finished) + len(self.offers)

    def largest_rest(self) -> int:
        """The most that one reader has yet to claim."""
        current = (r for r in self.readers.values() if r.segment == self.current)
        return max((r.length - r.claim for r in current), default=0)

    def digest(self) -> Digest:
        """Of everything that is committed."""
        merged = Digest(self.record.samples, self.record.digest)
        for reader in self.readers.values():
            merged.merge(Digest(self.record.samples, reader.digest))
        return merged

    # Changes

    def keep(self, reader: ReaderRecord) -> None:
        """Update a reader."""
        previous = self.readers.get(reader.incarnation)
        self.claimed += self._has(reader) - (self._has(previous) if previous else 0)
        self.readers[reader.incarnation] = reader
        self.step = max(self.step, reader.step)
        if self.has_finished(reader):
            self.finished.add(reader.slot)
            self.offers.pop(reader.incarnation, None)

    def _has(self, reader: ReaderRecord) -> int:
        return reader.count + sum(part.stop - part.start for part in self.uncommitted(reader))

    def cut(self, view: View, weights: tuple[int, ...], lost: list[ReaderRecord]) -> int:
        """End the current segment and begin another, without the ``lost`` readers.

        Returns how many samples were taken from them.
        """
        gone = {reader.incarnation for reader in lost}
        taken = [0] * self.segments[-1].slot_count
        back: list[TakenBack] = []
        for reader in self.readers.values():
            if reader.incarnation not in gone:
                taken[reader.slot] = self.taken(reader, self.current)
                continue
            if reader.committed_segment == self.current:
                taken[reader.slot] = reader.committed_position
            back += self.uncommitted(reader)
        ended = replace(self.segments[-1], taken=tuple(taken))
        begun = copied(
            self.record,
            SegmentRecord,
            ledger=self.record.sequence,
            number=self.current + 1,
            slot_count=view[0],
            dead=tuple(sorted(view[1])),
            weights=weights,
            taken_back=tuple(
                sorted(
                    (part for part in back if part.segment < self.current),
                    key=lambda part: (part.segment, part.slot),
                )
            ),
        )
        self._retire(lost)
        self.segments[-1:] = [ended, begun]
        self.record = replace(self.record, segment_count=begun.number)
        self.finished.clear()
        self.offers.clear()
        return sum(part.stop - part.start for part in back)

    def close(self) -> None:
        """Everything is committed or offered: keep only the sum."""
        for offer in list(self.offers.values()):
            self.keep(offer.reader)
        self._retire(list(self.readers.values()))
        self.record = replace(self.record, complete=True)
        self.segments.clear()
        self.finished.clear()

    def _retire(self, readers: list[ReaderRecord]) -> None:
        record = self.record
        digest = Digest(record.samples, record.digest)
        for reader in readers:
            self.claimed -= self._has(reader) - reader.count
            digest.merge(Digest(record.samples, reader.digest))
        self.record = replace(
            record,
            gone=record.gone + len(readers),
            count=record.count + sum(reader.count for reader in readers),
            digest=digest.to_bytes() if readers else record.digest,
            step=max([record.step, *(reader.step for reader in readers)]),
        )
        for reader in readers:
            del self.readers[reader.incarnation]

    # Claims and commits

    def check_place(self, c: Claim) -> None:
        """Refuse a claim by another plan, or in a segment that does not exist."""
        if c.plan != self.record.plan:
            raise Refused(
                "plan_conflict",
                f"{self.name} is read by the plan {self.record.plan!r}, but {c.worker_id!r} has "
                f"{c.plan!r}: give all workers the same settings, or use another dataset id",
            )
        if c.segment > self.current:
            raise Refused(
                "invalid",
                f"{self.name} has {self.current} segments; {c.worker_id!r} cannot claim in segment "
                f"{c.segment}: claim with segment 0 to learn the current one",
            )
        if c.known > max(0, c.segment - 1):
            raise Refused(
                "invalid",
                f"{c.worker_id!r} claims in segment {c.segment} of {self.name} and cannot know "
                f"that {c.known} segments have ended",
            )

    def with_claim(self, c: Claim, member: Member, now: float) -> ReaderRecord:
        """The reader with its claim in the current segment; a lower claim changes nothing."""
        reader = self.readers.get(member.incarnation) or self._newcomer(c, member)
        here = member.incarnation in self.readers and reader.segment == self.current
        before = reader.claim if here else 0
        self._check_lane(c, reader.length if here else c.length, before)
        if here and c.upto <= before:
            return reader
        idle = next(self.uncommitted(reader), None) is None
        return replace(
            reader,
            segment=self.current,
            claim=c.upto,
            length=c.length,
            step=max(reader.step, c.upto - before),
            active_at=now if idle else reader.active_at,
        )

    def with_commit(self, reader: ReaderRecord, c: Commit, now: float) -> ReaderRecord:
        """The reader with its commit; an earlier place than before changes nothing."""
        place = c.segment, c.position
        last = reader.committed_segment, reader.committed_position
        if place < last:
            return reader
        self.check_taken(reader, c)
        count = reader.count + c.position - reader.committed_position
        for number in range(reader.committed_segment, c.segment):
            count += self.taken(reader, number)
        self._check_digest(reader, c, count)
        if place == last:
            return reader
        return replace(
            reader,
            committed_segment=c.segment,
            committed_position=c.position,
            count=count,
            digest=c.digest,
            busy=reader.busy + max(0.0, now - reader.active_at),
            active_at=now,
        )

    def with_offer(self, reader: ReaderRecord, c: Claim, now: float) -> ReaderRecord | None:
        """The reader with everything committed that it took, if the claim offers that."""
        if not c.commit_digest or c.upto < c.length:
            return None
        commit = copied(
            c,
            Commit,
            segment=c.commit_segment,
            position=c.commit_position,
            digest=c.commit_digest,
        )
        after = self.with_commit(reader, commit, now)
        return after if after is not reader and self.has_finished(after) else None

    def check_taken(self, reader: ReaderRecord | None, c: Commit) -> None:
        """Refuse a commit of more than was claimed; one that never claimed can commit nothing."""
        exists = 0 < c.segment <= self.current
        taken = self.taken(reader, c.segment) if reader and exists else 0
        if not exists or c.position > taken:
            raise Refused(
                "lane_conflict",
                f"{c.worker_id!r} commits up to position {c.position} of segment {c.segment} of "
                f"{self.name}, where it has claimed {taken} samples: claim before you commit",
            )

    def _newcomer(self, c: Claim, member: Member) -> ReaderRecord:
        return copied(
            c,
            ReaderRecord,
            ledger=self.record.sequence,
            slot=member.rank,
            segment=self.current,
            claim=0,
            committed_segment=self.current,
        )

    def _check_lane(self, c: Claim, length: int, before: int) -> None:
        if c.upto > c.length:
            raise Refused(
                "invalid", f"{c.worker_id!r} claims {c.upto} samples of a lane that has {c.length}"
            )
        if c.length != length or c.length - before > self.unclaimed:
            raise Refused(
                "lane_conflict",
                f"{c.worker_id!r} claims {c.upto} of {c.length} samples in segment {c.segment} of "
                f"{self.name}, where its lane has {length} and {self.unclaimed} samples are "
                "unclaimed in total: run the same version of Strata on all workers",
            )

    def _check_digest(self, reader: ReaderRecord, c: Commit, count: int) -> None:
        samples = self.record.samples
        try:
            digest = Digest(samples, c.digest)
        except ValueError as exc:
            raise Refused("invalid", f"{c.worker_id!r} sent an invalid digest: {exc}") from None
        same = count != reader.count or digest == Digest(samples, reader.digest)
        if digest.count != count or not same:
            raise Refused(
                "digest_conflict",
                f"{c.worker_id!r} commits {count} samples of {self.name} up to position "
                f"{c.position} of segment {c.segment}, but its digest is of {digest.count} samples"
                + ("" if same else ", others than those that it has committed"),
            )
