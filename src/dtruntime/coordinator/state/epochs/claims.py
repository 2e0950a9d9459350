"""What a claim or a commit makes of what is known of a reader, or why it is refused."""

from __future__ import annotations

from msgspec.structs import replace

from ....sharding.coverage_digest import Digest
from ..commands import Claim, Commit, Refused
from ..members import Member
from ..records import ReaderRecord
from .ledger import Ledger


def check_place(ledger: Ledger, c: Claim) -> None:
    """Refuse a claim by another plan, or in a segment that there is not."""
    if c.plan != ledger.record.plan:
        raise Refused(
            "plan_conflict",
            f"{ledger.name} is read by the plan {ledger.record.plan!r}, but {c.worker_id!r} has "
            f"{c.plan!r}: give all workers the same settings, or use another dataset id",
        )
    if c.segment > ledger.current:
        raise Refused(
            "invalid",
            f"{ledger.name} has {ledger.current} segments; {c.worker_id!r} cannot claim in segment "
            f"{c.segment}: ask with segment 0 for those that there are",
        )
    if c.known > max(0, c.segment - 1):
        raise Refused(
            "invalid",
            f"{c.worker_id!r} claims in segment {c.segment} of {ledger.name} and cannot know that "
            f"{c.known} segments have ended",
        )


def claimed(ledger: Ledger, c: Claim, member: Member, now: float) -> ReaderRecord:
    """The reader with its claim in the current segment; a lower one than before changes nothing."""
    known = ledger.readers.get(member.incarnation) or _newcomer(ledger, c, member)
    here = member.incarnation in ledger.readers and known.segment == ledger.current
    before = known.claim if here else 0
    _check_lane(ledger, c, known.length if here else c.length, before)
    if here and c.upto <= before:
        return known
    idle = next(ledger.uncommitted(known), None) is None
    return replace(
        known,
        segment=ledger.current,
        claim=c.upto,
        length=c.length,
        step=max(known.step, c.upto - before),
        active_at=now if idle else known.active_at,
    )


def committed(ledger: Ledger, reader: ReaderRecord, c: Commit, now: float) -> ReaderRecord:
    """The reader with its commit; an earlier place than before changes nothing."""
    place = c.segment, c.position
    last = reader.committed_segment, reader.committed_position
    if place < last:
        return reader
    check_taken(ledger, reader, c)
    count = reader.count + c.position - reader.committed_position
    for number in range(reader.committed_segment, c.segment):
        count += ledger.taken(reader, number)
    _check_digest(ledger, reader, c, count)
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


def offered(ledger: Ledger, reader: ReaderRecord, c: Claim, now: float) -> ReaderRecord | None:
    """The reader with everything committed that it took, if that is what a claim offers."""
    if not c.commit_digest or c.upto < c.length:
        return None
    commit = Commit(
        job=c.job,
        worker_id=c.worker_id,
        incarnation=c.incarnation,
        dataset_id=c.dataset_id,
        epoch=c.epoch,
        segment=c.commit_segment,
        position=c.commit_position,
        digest=c.commit_digest,
    )
    after = committed(ledger, reader, commit, now)
    return after if after is not reader and ledger.has_finished(after) else None


def check_taken(ledger: Ledger, reader: ReaderRecord | None, c: Commit) -> None:
    """Refuse a commit of more than was claimed; one that never claimed can commit nothing."""
    exists = 0 < c.segment <= ledger.current
    taken = ledger.taken(reader, c.segment) if reader and exists else 0
    if not exists or c.position > taken:
        raise Refused(
            "lane_conflict",
            f"{c.worker_id!r} commits up to place {c.position} of segment {c.segment} of "
            f"{ledger.name}, where it has claimed {taken} samples: claim before you commit",
        )


def _newcomer(ledger: Ledger, c: Claim, member: Member) -> ReaderRecord:
    return ReaderRecord(
        dataset_id=c.dataset_id,
        epoch=c.epoch,
        ledger=ledger.record.sequence,
        incarnation=member.incarnation,
        slot=member.rank,
        segment=ledger.current,
        claim=0,
        length=c.length,
        committed_segment=ledger.current,
    )


def _check_lane(ledger: Ledger, c: Claim, length: int, before: int) -> None:
    if c.upto > c.length:
        raise Refused(
            "invalid", f"{c.worker_id!r} claims {c.upto} samples of a lane that has {c.length}"
        )
    if c.length != length or c.length - before > ledger.unclaimed:
        raise Refused(
            "lane_conflict",
            f"{c.worker_id!r} claims {c.upto} of {c.length} samples in segment {c.segment} of "
            f"{ledger.name}, where its lane has {length} and {ledger.unclaimed} samples are "
            "unclaimed in all: lanes must be computed alike; run the same version everywhere",
        )


def _check_digest(ledger: Ledger, reader: ReaderRecord, c: Commit, count: int) -> None:
    samples = ledger.record.samples
    try:
        digest = Digest(samples, c.digest)
    except ValueError as exc:
        raise Refused("invalid", f"{c.worker_id!r} sent no digest: {exc}") from None
    same = count != reader.count or digest == Digest(samples, reader.digest)
    if digest.count != count or not same:
        raise Refused(
            "digest_conflict",
            f"{c.worker_id!r} commits {count} samples of {ledger.name} up to place {c.position} of "
            f"segment {c.segment}, but its digest is of {digest.count} samples"
            + ("" if same else ", others than those that it has committed"),
        )
