"""Base maps: which slot holds which shard while every slot is live."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from .hashing import fold, mix_array

_FEW_SLOTS = 32
SLICE = 1 << 17
"""So many shards are dealt at once: numpy keeps other threads waiting while it gathers some."""


class Chain:
    """The base maps of one dataset for 1, 2, 3, ... slots, each one step from the last.

    Slot 0 starts with every shard in hashed order. With ``k`` slots, slot ``j`` holds
    ``N // k`` shards, one more when ``j < N % k``; when slot ``k`` joins, each earlier slot
    keeps the front of its list and the newcomer takes what is cut off the ends. Nothing else
    moves. A list only ever loses its end, so one pool of birth lists holds all these maps:
    about ``N × (1 + ln W)`` numbers for ``W`` slots.

    Not safe for concurrent use: asking for more slots extends the pool.
    """

    __slots__ = ("_births", "_made", "_seed", "shard_count")

    def __init__(self, shard_count: int, seed: int) -> None:
        self.shard_count = shard_count
        self._seed = seed
        self._made: NDArray[np.int32] | None = None
        self._births = np.array([0, shard_count], dtype=np.int64)

    @property
    def _pool(self) -> NDArray[np.int32]:
        """The birth lists, one after the other; made when they are first needed."""
        if self._made is None:
            self._made = _hashed_order(self.shard_count, self._seed)
        return self._made

    def sizes(self, slot_count: int) -> NDArray[np.int64]:
        """Return how many shards each of ``slot_count`` slots holds."""
        each, extra = divmod(self.shard_count, slot_count)
        return each + (np.arange(slot_count) < extra)

    def owners(self, slot_count: int) -> NDArray[np.int32]:
        """Return the slot of every shard, with ``slot_count`` slots."""
        self._extend(slot_count)
        each, extra = divmod(self.shard_count, slot_count)
        slots = np.arange(min(slot_count, self.shard_count), dtype=np.int32)
        owners = np.empty(self.shard_count, dtype=np.int32)
        step = max(1, SLICE // max(1, each))
        for first in range(0, slots.size if each else 0, step):
            some = slots[first : first + step]
            for start in range(0, each, SLICE):
                count = min(SLICE, each - start)
                rows = self._rows(first, first + some.size, start, count)
                owners[rows] = np.repeat(some, count)
        for first in range(0, extra, SLICE):
            last = min(extra, first + SLICE)
            owners[self._rows(first, last, each, 1)] = slots[first:last]
        return owners

    def tails(self, keep: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the shards that slots lose when each keeps its first ``keep`` of ``sizes``.

        The last slot's come first.
        """
        self._extend(keep.size)
        losing = np.flatnonzero(sizes > keep)[::-1]
        counts = (sizes - keep)[losing]
        ends = np.cumsum(counts)
        first = self._births[losing] + keep[losing] - (ends - counts)
        places = np.repeat(first, counts) + np.arange(counts.sum())
        return self._pool.take(places)

    def _rows(self, first: int, last: int, start: int, count: int) -> NDArray[np.int32]:
        """Return ``count`` shards from position ``start`` on of slots ``first`` to ``last``."""
        places = self._births[first:last] + start
        if count != 1:
            places = (places[:, None] + np.arange(count)).reshape(-1)
        return self._pool[places]

    def _extend(self, slot_count: int) -> None:
        """Let slots join until there are ``slot_count``, or one for each shard."""
        built = self._births.size - 1
        if slot_count <= built or built >= self.shard_count:
            return
        # A margin, so that a job that grows slot by slot does not copy the pool each time.
        margin = built + built // 8 if built > 1 else 0
        goal = min(max(slot_count, margin), self.shard_count)
        births = np.zeros(goal + 1, dtype=np.int64)
        np.cumsum(self.shard_count // np.arange(1, goal + 1), out=births[1:])
        pool = np.empty(births[-1], dtype=np.int32)
        pool[: self._pool.size] = self._pool
        self._births, self._made = births, pool
        while built < goal:
            built += self._join(built, goal)

    def _join(self, k: int, goal: int) -> int:
        """Let slot ``k`` join, and those after it that the same step serves; return how many."""
        if self.shard_count // k == self.shard_count // (k + 1):
            return self._join_run(k, goal)
        self._join_one(k)
        return 1

    def _join_run(self, k: int, goal: int) -> int:
        """Let slots join as long as each only takes extra shards, one from a slot."""
        each, extra = divmod(self.shard_count, k)
        joining = min(goal, self.shard_count // each) - k
        taken = self._rows(extra - joining * each, extra, each, 1)
        born, end = self._births[k], self._births[k + joining]
        self._pool[born:end] = taken.reshape(joining, each)[::-1].reshape(-1)
        return joining

    def _join_one(self, k: int) -> None:
        """Let slot ``k`` join: every earlier slot may lose shards."""
        each, extra = divmod(self.shard_count, k)
        kept, kept_extra = divmod(self.shard_count, k + 1)
        # Between these slots all lose the same number from the same position.
        edges = sorted({0, extra, kept_extra, k}) if k > _FEW_SLOTS else range(k + 1)
        end = int(self._births[k])
        for first, last in pairwise(edges):
            start = kept + (first < kept_extra)
            count = each + (first < extra) - start
            begin, end = end, end + count * (last - first)
            if last - first == 1:
                source = int(self._births[first]) + start
                self._pool[begin:end] = self._pool[source : source + count]
            else:
                self._pool[begin:end] = self._rows(first, last, start, count)


def _hashed_order(shard_count: int, seed: int) -> NDArray[np.int32]:
    """Return all shards ordered by the high bits of their hash, equal ones by number."""
    keyed = np.arange(shard_count, dtype=np.uint64)
    low_bits = np.uint64((1 << max(shard_count - 1, 0).bit_length()) - 1)
    for start in range(0, shard_count, SLICE):
        shards = keyed[start : start + SLICE]
        shards |= mix_array(shards ^ np.uint64(fold(seed))) & ~low_bits
    keyed.sort()
    keyed &= low_bits
    return keyed.astype(np.int32)
