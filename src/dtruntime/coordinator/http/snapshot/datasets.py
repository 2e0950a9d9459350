"""Datasets in snapshots: shards per rank, the last reassignment, coverage.

Long arrays are computed in another thread, off the event loop.
"""

from __future__ import annotations

import asyncio
import time
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....sharding.coverage_digest import SIZE, Digest, judge, whole
from ...state import Job
from ...state.datasets import GLOBAL, Dataset, View
from ...state.epochs.epoch_coverage import Covered
from ...state.records import copied
from .. import views

RANKS_SHOWN = 1024
DATASETS_SHOWN = 256
SHARDS_ASSIGNED = 4_000_000
"""Assignments are computed for this many shards of a job, its first datasets first."""
SETTLED_SECONDS = 30.0
"""How often all epochs but the newest two are judged again."""
EASE = 20.0
"""The least pause between two refreshes, as a multiple of what one took."""


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

    def assign(self, view: View, now: float, reason: str) -> None:
        """Compute who reads what, and what moved; for another thread."""
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

    def judge(self, reported: list[Covered], now: float) -> None:
        """Judge the epochs; for another thread."""
        newest = len(reported) - 2
        judged = {}
        for number, one in enumerate(reported):
            known = self._judged.get(one.epoch)
            if known is None or number >= newest or now - known[0] > SETTLED_SECONDS:
                known = now, *judge_epoch(one, self.dataset.record.total_samples)
            judged[one.epoch] = known
        self._judged = judged

    @property
    def consumed(self) -> int | None:
        """How many samples of all epochs were consumed; None: nobody reports it."""
        return sum(count for _, _, count in self._judged.values()) if self._judged else None

    def show(self) -> views.Dataset:
        """All of it."""
        record = self.dataset.record
        return copied(
            record,
            views.Dataset,
            shard_count=record.shard_count,
            total_bytes=record.layout.total_bytes if record.layout else None,
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
        """Refresh, unless it was done just now."""
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
                ledgers = job.epochs.ledgers.get(record.dataset_id, {})
                reported = job.coverages.of(record.dataset_id, ledgers)
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
    """One dataset to refresh."""

    board: Board
    reported: list[Covered]
    view: View | None
    """Who shares the shards; None: the ranks share batches."""


def _work(work: list[_Work], now: float, reason: str) -> None:
    left = SHARDS_ASSIGNED
    for board, reported, view in work:
        if view is not None:
            left -= board.dataset.record.shard_count
            if left >= 0:
                board.assign(view, now, reason)
        board.judge(reported, now)


PROVABLE = 1_000_000_000
"""For larger datasets only counts are compared: the digest would take over ten seconds."""


def judge_epoch(covered: Covered, total: int) -> tuple[views.Coverage, int]:
    """The verdict on an epoch, and how many samples were consumed; for another thread."""
    seen = Digest(total, covered.digest)
    count = seen.count
    complete = covered.complete
    verdict = judge(
        seen,
        _expected(total, seen),
        expected=covered.expected,
        assumed=covered.assumed,
        dropped=covered.dropped,
    )
    clean = not (verdict.missing or verdict.repeated or covered.assumed)
    coverage = copied(
        covered,
        views.Coverage,
        total=total,
        covered=verdict.covered,
        missing=verdict.missing,
        repeated=verdict.repeated,
        complete=complete,
        exact=complete and clean and total <= PROVABLE,
        ended_incomplete=covered.ended_incomplete or (complete and verdict.missing > 0),
    )
    return coverage, count


def _expected(total: int, seen: Digest) -> Digest:
    if total <= PROVABLE:
        return _whole(total)
    # The sums that were seen count as right, so that only counts are compared.
    starts = np.arange(SIZE // 16, dtype=np.uint64) * np.uint64(seen.width)
    stops = np.minimum(starts + np.uint64(seen.width), np.uint64(total))
    counts = np.where(starts < total, stops - np.minimum(starts, stops), np.uint64(0))
    return Digest(total, counts.astype("<u8").tobytes() + seen.to_bytes()[SIZE // 2 :])


@lru_cache(maxsize=64)
def _whole(total: int) -> Digest:
    return whole(total)
