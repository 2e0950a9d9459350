"""Datasets as they are shown: who reads how much, what moved last, what was consumed.

Long arrays are computed by another thread, so that nothing on the event loop waits for them.
"""

from __future__ import annotations

import asyncio
import time
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....sharding.coverage_digest import SIZE, Digest, compare, whole
from ...state import Job
from ...state.datasets import GLOBAL, Dataset, View
from .. import views

RANKS_SHOWN = 1024
DATASETS_SHOWN = 256
SHARDS_DEALT = 4_000_000
"""Who reads what is found out for as many shards of a job, its first datasets first."""
SETTLED_SECONDS = 30.0
"""All epochs of a dataset but the newest two are judged anew only so often."""
EASE = 20.0
"""After a refresh, so many times what it took passes before the next."""


class Board:
    """One dataset of a job."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self.shares: list[views.RankShare] = []
        self.last_change: views.Reassignment | None = None
        self._view: View | None = None
        self._owners: NDArray[np.int32] | None = None
        self._judged: dict[int, tuple[float, views.Coverage, int]] = {}

    def share_batches(self) -> None:
        """The ranks share the batches: no rank has shards of its own, and none can move."""
        self.shares, self.last_change = [], None
        self._view = self._owners = None

    def deal(self, view: View, now: float, reason: str) -> None:
        """Find out who reads what, and what moved; for another thread."""
        if view == self._view:
            return
        before, self._view = self._owners, view
        if not view[0]:
            self.shares = []
            return
        owners, samples = self.dataset.owners(view), self.dataset.shard_samples()
        shards = np.bincount(owners, minlength=view[0]).tolist()
        # Samples are counted in floating point, which is exact up to 2**53.
        read = np.bincount(owners, samples, minlength=view[0]).astype(np.int64).tolist()
        self.shares = [
            views.RankShare(rank, shards[rank], read[rank])
            for rank in range(view[0])
            if rank not in view[1]
        ][:RANKS_SHOWN]
        self._owners = owners
        if before is not None:
            moved = before != owners
            count = int(moved.sum())
            if count:
                samples_moved = int(samples[moved].sum())
                self.last_change = views.Reassignment(now, count, samples_moved, reason)

    def judge(self, reported: list[Reported], now: float) -> None:
        """Judge the epochs; for another thread."""
        newest = len(reported) - 2
        judged = {}
        for number, one in enumerate(reported):
            known = self._judged.get(one.epoch)
            if known is None or number >= newest or now - known[0] > SETTLED_SECONDS:
                known = now, *judge(one)
            judged[one.epoch] = known
        self._judged = judged

    @property
    def consumed(self) -> int | None:
        """How many samples of all epochs were consumed; none: nobody reports that."""
        return sum(count for _, _, count in self._judged.values()) if self._judged else None

    def show(self) -> views.Dataset:
        """All of it."""
        record = self.dataset.record
        return views.Dataset(
            dataset_id=record.dataset_id,
            path=record.path,
            format=record.format,
            total_samples=record.total_samples,
            shard_size=record.shard_size,
            shard_count=record.shard_count,
            total_bytes=record.layout.total_bytes if record.layout else None,
            shuffle=record.shuffle,
            seed=record.seed,
            registered_at=record.registered_at,
            shards_per_rank=self.shares,
            last_change=self.last_change,
            coverage=[judged for _, judged, _ in self._judged.values()],
        )


class DatasetBoard:
    """The datasets of one job, refreshed at most once a second."""

    def __init__(self) -> None:
        self.rows: list[views.Dataset] = []
        self.consumed: int | None = None
        self.refreshed_at = 0.0
        self.assignment_seconds: float | None = None
        self._boards: dict[str, Board] = {}
        self._next_at = 0.0
        self._busy = asyncio.Lock()

    async def refresh(self, job: Job, now: float, reason: str = "") -> None:
        """Bring it up to date, unless that was done just now."""
        if now < self._next_at and len(self._boards) == min(len(job.datasets), DATASETS_SHOWN):
            return
        async with self._busy:
            view = job.roster.view()
            work: list[_Work] = []
            for record in job.datasets.records()[:DATASETS_SHOWN]:
                board = self._boards.get(record.dataset_id)
                if board is None:
                    board = Board(job.datasets.get(record.dataset_id))
                    self._boards[record.dataset_id] = board
                reported = collect(job, record.dataset_id, record.total_samples)
                if job.coverages.order(record.dataset_id) == GLOBAL:
                    board.share_batches()
                    work.append(_Work(board, reported, None))
                else:
                    work.append(_Work(board, reported, view))
            started = time.monotonic()
            if work:
                await asyncio.to_thread(_work, work, now, reason)
            self._next_at = now + max(0.9, EASE * (time.monotonic() - started))
            self._publish([one.board for one in work], now)

    def _publish(self, boards: list[Board], now: float) -> None:
        self.rows = [board.show() for board in boards]
        counts = [count for board in boards if (count := board.consumed) is not None]
        self.consumed = sum(counts) if counts else None
        self.refreshed_at = now
        times = [
            seconds for board in boards if (seconds := board.dataset.assignment_seconds) is not None
        ]
        self.assignment_seconds = max(times, default=None)


class _Work(NamedTuple):
    """What there is to find out of one dataset."""

    board: Board
    reported: list[Reported]
    view: View | None
    """Who shares the shards; none: nobody does."""


def _work(work: list[_Work], now: float, reason: str) -> None:
    left = SHARDS_DEALT
    for board, reported, view in work:
        if view is not None:
            left -= board.dataset.record.shard_count
            if left >= 0:
                board.deal(view, now, reason)
        board.judge(reported, now)


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
