"""What was consumed of each epoch, held against what it has."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...sharding.coverage import SIZE, Digest, compare, whole
from ..state import Job
from . import views

PROVABLE = 1_000_000_000
"""Of a larger dataset only counts are compared: its digest would take longer than ten seconds."""


class Reported(NamedTuple):
    """What is known of an epoch, taken on the event loop."""

    epoch: int
    total: int
    digests: list[bytes]
    """Whose sum is what was consumed."""
    expected: int
    assumed: int
    dropped: int
    workers: int
    complete: bool | None
    """None: that follows from the sum."""
    ended_incomplete: bool = False


def collect(job: Job, dataset_id: str, total: int) -> list[Reported]:
    """What is known of the epochs of a dataset, by epoch."""
    found = []
    for ledger in job.epochs.ledgers.get(dataset_id, {}).values():
        record, readers = ledger.record, ledger.readers.values()
        digests = [record.digest, *(reader.digest for reader in readers)]
        workers = record.gone + len(readers)
        found.append(
            Reported(record.epoch, total, digests, record.samples, 0, 0, workers, record.complete)
        )
    for attempt in job.coverages.attempts.get(dataset_id, {}).values():
        base, shares = attempt.record, attempt.shares.values()
        digests = [base.base, *(share.digest for share in shares)]
        found.append(
            Reported(
                base.epoch,
                total,
                digests,
                base.expected,
                base.assumed,
                base.dropped,
                len(shares),
                None,
                base.lacking > 0,
            )
        )
    return sorted(found, key=lambda reported: reported.epoch)


def judge(reported: Reported) -> tuple[views.Coverage, int]:
    """The verdict on an epoch, and how many samples were consumed; for another thread."""
    total = reported.total
    seen = Digest(total, _sum(reported.digests))
    count = seen.count
    complete = reported.complete
    if complete is None:
        complete = count + reported.assumed + reported.dropped >= reported.expected
    verdict = compare(seen, _expected(total, seen))
    elsewhere = total - reported.expected if reported.expected else 0
    missing = max(0, verdict.missing - reported.assumed - reported.dropped - elsewhere)
    clean = not (missing or verdict.repeated or reported.assumed)
    coverage = views.Coverage(
        epoch=reported.epoch,
        total=total,
        covered=verdict.covered,
        missing=missing,
        repeated=verdict.repeated,
        assumed=reported.assumed,
        dropped=reported.dropped,
        complete=complete,
        exact=complete and clean and total <= PROVABLE,
        workers=reported.workers,
        ended_incomplete=reported.ended_incomplete or (complete and missing > 0),
    )
    return coverage, count


def _sum(digests: list[bytes]) -> bytes:
    """The sum of many digests at once."""
    given = [digest for digest in digests if digest]
    if not given:
        return bytes(SIZE)
    table = np.frombuffer(b"".join(given), "<u8").reshape(len(given), SIZE // 8)
    total: NDArray[np.uint64] = table.sum(axis=0, dtype=np.uint64)
    return total.astype("<u8").tobytes()


def _expected(total: int, seen: Digest) -> Digest:
    if total <= PROVABLE:
        return _whole(total)
    # The sums of what was seen are taken for right, so that counts alone decide.
    starts = np.arange(SIZE // 16, dtype=np.uint64) * np.uint64(seen.width)
    stops = np.minimum(starts + np.uint64(seen.width), np.uint64(total))
    counts = np.where(starts < total, stops - np.minimum(starts, stops), np.uint64(0))
    return Digest(total, counts.astype("<u8").tobytes() + seen.to_bytes()[SIZE // 2 :])


@lru_cache(maxsize=64)
def _whole(total: int) -> Digest:
    return whole(total)
