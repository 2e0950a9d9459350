"""Coverage of epochs: what was consumed, by the ledger or as workers report it.

An epoch whose position is kept in checkpoints has no ledger. Its workers report sums: what the
state that they resumed from had seen (the same on all of them), and what each consumed since.
Reports that name another state, or another number of workers, belong to another attempt at the
epoch. Of two attempts the newer one counts: the one whose workers had been told of a higher
generation when they loaded the state, or that had loaded more states in that generation. So the
last reports of a worker that has not loaded the newer state yet change nothing, and a job that
goes back to an older checkpoint is followed there.
"""

from __future__ import annotations

import msgspec

from ....sharding.coverage_digest import Digest, count_of, sum_of
from ....types import Membership
from ..commands import DONE, Done, Refused, ReportCoverage
from ..datasets import GLOBAL, Datasets
from ..effects import Outbox
from ..members import Member
from ..records import CoverageRecord, ShareRecord, copied, place_of
from ..roster import Roster
from .epochs import EPOCHS_KEPT
from .ledger import Ledger


class Covered(msgspec.Struct, frozen=True):
    """What was consumed of an epoch, as far as it is known."""

    epoch: int
    digests: list[bytes]
    """Their sum is what was consumed; with many workers it takes a while."""
    expected: int
    workers: int
    closed: bool | None = None
    """Whether the ledger is closed; None: there is no ledger."""
    segments: int = 0
    assumed: int = 0
    dropped: int = 0
    ended_incomplete: bool = False
    """Whether everybody has moved on and samples are missing."""

    @property
    def digest(self) -> bytes:
        """Of everything that was consumed."""
        return sum_of(self.digests)

    @property
    def complete(self) -> bool:
        """Whether every sample is accounted for."""
        if self.closed is not None:
            return self.closed
        return count_of(self.digests) + self.assumed + self.dropped >= self.expected


class CoverageAttempt:
    """One run through an epoch from one loaded state, as its workers report it."""

    __slots__ = ("_count", "newest_incarnation", "record", "shares")

    def __init__(self, record: CoverageRecord) -> None:
        self.record = record
        self.shares: dict[int, ShareRecord] = {}
        """By slot; changed by `keep` alone."""
        self.newest_incarnation = 0
        """Of those who reported."""
        self._count: int | None = None

    def keep(self, share: ShareRecord) -> None:
        """Replace what a slot reported before."""
        self.shares[share.slot] = share
        self.newest_incarnation = max(self.newest_incarnation, share.incarnation)
        self._count = None

    @property
    def count(self) -> int:
        """How many samples were consumed, repeated ones as often as they were."""
        if self._count is None:
            self._count = count_of(self._digests())
        return self._count

    @property
    def is_complete(self) -> bool:
        """Whether every sample of the epoch is accounted for."""
        return self.record.expected > 0 and not self.missing

    @property
    def age(self) -> tuple[int, int]:
        """Of two attempts the one with the higher pair is the newer."""
        return self.record.generation, self.record.loads

    @property
    def is_open(self) -> bool:
        """Whether some slot has not finished and the epoch was not reported as incomplete."""
        finished = sum(share.ended for share in self.shares.values())
        return finished < self.record.world_size and not self.record.lacking

    def is_of(self, c: ReportCoverage) -> bool:
        """Whether a report is of this attempt."""
        return (self.record.base, self.record.world_size) == (c.base, c.world_size)

    def covered(self) -> Covered:
        """What the base and all shares have together."""
        return copied(
            self.record,
            Covered,
            digests=self._digests(),
            workers=len(self.shares),
            ended_incomplete=self.record.lacking > 0,
        )

    def _digests(self) -> list[bytes]:
        return [self.record.base, *(share.digest for share in self.shares.values())]

    @property
    def missing(self) -> int:
        """How many samples are not accounted for."""
        accounted = self.count + self.record.assumed + self.record.dropped
        return max(0, self.record.expected - accounted)


class Coverages:
    """The reports of one job."""

    def __init__(self, roster: Roster, datasets: Datasets) -> None:
        self._roster = roster
        self._datasets = datasets
        self.attempts: dict[str, dict[int, CoverageAttempt]] = {}
        """By dataset and epoch, in the order in which the epochs were first reported."""
        self._sequence = 0

    def report(self, c: ReportCoverage, member: Member, out: Outbox) -> Done:
        """Record what a member consumed, if it is of the newest attempt."""
        self._check(c)
        attempt = self.attempts.get(c.dataset_id, {}).get(c.epoch)
        if attempt is None:
            self._forget_oldest(c.dataset_id, out)
            self._sequence += 1
            attempt = self._begin(c, self._sequence, out)
        elif not attempt.is_of(c):
            if (c.generation, c.loads) <= attempt.age:
                return DONE
            self._delete_shares(attempt, out)
            attempt = self._begin(c, attempt.record.sequence, out)
        else:
            self._renew(attempt, c, out)
        self._take(attempt, c, member, out)
        if attempt.record.lacking:
            self._mark(attempt, attempt.missing, out)
        if c.ended:
            self._close_passed(c.dataset_id, c.epoch, out)
        return DONE

    def membership_changed(self, out: Outbox) -> None:
        """When no member is left, report the epochs that ended incomplete."""
        if self._roster.live_count:
            return
        for attempts in self.attempts.values():
            for attempt in attempts.values():
                if any(self._is_of_one_that_left(share) for share in attempt.shares.values()):
                    self._close(attempt, out)

    def incomplete(self) -> list[CoverageAttempt]:
        """Epochs that ended with missing samples, the newest first."""
        attempts = [a for kept in self.attempts.values() for a in kept.values()]
        ended = [attempt for attempt in attempts if attempt.record.lacking]
        return sorted(ended, key=lambda attempt: -attempt.record.sequence)

    def of(self, dataset_id: str, ledgers: dict[int, Ledger]) -> list[Covered]:
        """What is consumed of each epoch of a dataset, by epoch."""
        self._datasets.get(dataset_id)
        epochs = [_of_ledger(ledger) for ledger in ledgers.values()]
        epochs += [attempt.covered() for attempt in self.attempts.get(dataset_id, {}).values()]
        return sorted(epochs, key=lambda covered: covered.epoch)

    def order(self, dataset_id: str) -> str:
        """The order in which a dataset is read; empty: unknown.

        A report without an order means global order, the loaders' default.
        """
        order = self._datasets.get(dataset_id).read_order
        attempts = self.attempts.get(dataset_id, {}).values()
        if order or not attempts:
            return order
        newest = max(attempts, key=lambda attempt: attempt.age)
        return newest.record.order or GLOBAL

    def completed_epochs(self, ledgers: dict[str, dict[int, Ledger]]) -> int:
        """How many epochs are complete in every dataset that is read.

        A restarted job reads its epochs again, so reports from before the oldest present member
        do not count.
        """
        since = min((member.incarnation for member in self._roster.slots.held()), default=0)
        counts = [
            _completed(self.attempts.get(name, {}), ledgers.get(name, {}), since)
            for name in {*self.attempts, *ledgers}
        ]
        return min(counts, default=0)

    def restore(self, records: list[CoverageRecord], shares: list[ShareRecord]) -> list[str]:
        """Restore what was stored; returns what had to be left out."""
        for record in sorted(records, key=lambda r: r.sequence):
            self._sequence = max(self._sequence, record.sequence)
            self.attempts.setdefault(record.dataset_id, {})[record.epoch] = CoverageAttempt(record)
        left_out: list[str] = []
        for share in shares:
            attempt = self.attempts.get(share.dataset_id, {}).get(share.epoch)
            if attempt is None:
                left_out.append(" ".join(place_of(share)))
            else:
                attempt.keep(share)
        return left_out

    def _check(self, c: ReportCoverage) -> None:
        samples = self._datasets.get(c.dataset_id).record.total_samples
        try:
            for data in (c.base, c.digest):
                Digest(samples, data)
        except ValueError as exc:
            raise Refused("invalid", f"{c.worker_id!r} sent an invalid digest: {exc}") from None
        if max(c.expected, c.assumed, c.dropped) > samples:
            raise Refused(
                "invalid",
                f"dataset {c.dataset_id!r} has {samples} samples; an epoch of it cannot expect "
                f"{c.expected}, assume {c.assumed} or drop {c.dropped}",
            )

    def _begin(self, c: ReportCoverage, sequence: int, out: Outbox) -> CoverageAttempt:
        record = copied(c, CoverageRecord, sequence=sequence)
        attempt = self.attempts.setdefault(c.dataset_id, {})[c.epoch] = CoverageAttempt(record)
        out.put(self._roster.job, record)
        return attempt

    def _renew(self, attempt: CoverageAttempt, c: ReportCoverage, out: Outbox) -> None:
        """Update what a report says about the attempt as a whole."""
        record = attempt.record
        generation, loads = max((record.generation, record.loads), (c.generation, c.loads))
        updated = msgspec.structs.replace(
            record,
            assumed=c.assumed,
            dropped=c.dropped,
            expected=c.expected,
            generation=generation,
            loads=loads,
            order=c.order or record.order,
        )
        if updated != record:
            attempt.record = updated
            out.put(self._roster.job, updated)

    def _take(
        self, attempt: CoverageAttempt, c: ReportCoverage, member: Member, out: Outbox
    ) -> None:
        previous = attempt.shares.get(member.rank)
        share = copied(c, ShareRecord, slot=member.rank)
        samples = self._datasets.get(c.dataset_id).record.total_samples
        if previous is None or _age(previous, samples) < _age(share, samples):
            attempt.keep(share)
            out.put(self._roster.job, share)

    def _close_passed(self, dataset_id: str, epoch: int, out: Outbox) -> None:
        """Close the epochs before one that a worker has finished, if all others passed them too.

        After another whole epoch nobody will go back for the samples of a lost worker.
        """
        attempts = self.attempts[dataset_id]
        before = [number for number in attempts if number < epoch and attempts[number].is_open]
        if not before:
            return
        present = set(self._roster.present_ranks())
        passed: set[int] = set()
        ended = []
        for number in sorted(attempts, reverse=True):
            if number in before and present <= passed:
                ended.append(attempts[number])
            shares = attempts[number].shares.values()
            passed |= {share.slot for share in shares if share.ended and self._holder(share)}
        for attempt in reversed(ended):
            self._close(attempt, out)

    def _holder(self, share: ShareRecord) -> Member | None:
        """The member that sent a share, if it is its slot's current or last holder."""
        holder = self._roster.slots[share.slot] if share.slot < len(self._roster.slots) else None
        same = holder is not None and holder.incarnation == share.incarnation
        return holder if same else None

    def _is_of_one_that_left(self, share: ShareRecord) -> bool:
        """Whether a finished share is of a worker that left without a failure."""
        holder = self._holder(share)
        if not share.ended or holder is None:
            return False
        record = holder.record
        return record.membership == Membership.LEFT and not record.detail.startswith("failed")

    def _mark(self, attempt: CoverageAttempt, lacking: int, out: Outbox) -> None:
        if lacking != attempt.record.lacking:
            attempt.record = msgspec.structs.replace(attempt.record, lacking=lacking)
            out.put(self._roster.job, attempt.record)

    def _close(self, attempt: CoverageAttempt, out: Outbox) -> None:
        """Report once that an epoch has ended with missing samples, if it has."""
        missing = attempt.missing if attempt.is_open else 0
        if not missing:
            return
        self._mark(attempt, missing, out)
        out.emit(
            self._roster.job,
            "epoch.incomplete",
            dataset=attempt.record.dataset_id,
            epoch=attempt.record.epoch,
            missing=missing,
            expected=attempt.record.expected,
            workers=f"{len(attempt.shares)} of {attempt.record.world_size}",
        )

    def _delete_shares(self, attempt: CoverageAttempt, out: Outbox) -> None:
        for share in attempt.shares.values():
            out.delete(self._roster.job, share)

    def forget(self, dataset_id: str, out: Outbox) -> int:
        """Forget the reports on a dataset; returns the number of epochs."""
        attempts = self.attempts.pop(dataset_id, {})
        for attempt in attempts.values():
            self._drop(attempt, out)
        return len(attempts)

    def _drop(self, attempt: CoverageAttempt, out: Outbox) -> None:
        self._delete_shares(attempt, out)
        out.delete(self._roster.job, attempt.record)

    def _forget_oldest(self, dataset_id: str, out: Outbox) -> None:
        kept = self.attempts.get(dataset_id, {})
        while len(kept) >= EPOCHS_KEPT:
            oldest = next(iter(kept.values()))
            self._drop(oldest, out)
            del kept[oldest.record.epoch]


def _completed(attempts: dict[int, CoverageAttempt], ledgers: dict[int, Ledger], since: int) -> int:
    """How many epochs of a dataset its readers have finished, the last of them complete."""
    completed = 0
    for epoch in sorted({*attempts, *ledgers}):
        attempt, ledger = attempts.get(epoch), ledgers.get(epoch)
        if ledger is not None and ledger.is_complete:
            completed = epoch + 1
        elif attempt is not None and attempt.is_complete:
            completed = epoch + 1 if attempt.newest_incarnation >= since else completed
        elif attempt is None or not attempt.record.lacking:
            break
    return completed


def _age(share: ShareRecord, samples: int) -> tuple[int, int, int, int, bool]:
    """Orders what one slot reports: sums only grow within one attempt of one incarnation."""
    count = Digest(samples, share.digest).count
    return share.incarnation, share.generation, share.loads, count, share.ended


def _of_ledger(ledger: Ledger) -> Covered:
    record = ledger.record
    return Covered(
        epoch=record.epoch,
        digests=[record.digest, *(reader.digest for reader in ledger.readers.values())],
        expected=record.samples,
        workers=record.gone + len(ledger.readers),
        closed=record.complete,
        segments=record.segment_count,
    )
