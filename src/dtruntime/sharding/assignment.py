"""The slot table: which slot reads which shard, for any set of live slots."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from functools import partial
from operator import index as as_int
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .bidding import deal
from .chain import Chain
from .hashing import fold, mix_array
from .slot_membership import MAX_COUNT, Membership

_REMEMBERED = 4
_LARGE = 1 << 20
"""A table of more shards remembers the last membership only, and no lists."""


class SlotTable:
    """Deals ``shard_count`` shards to slots, evenly and with few moves when slots change.

    A pure function of its arguments: the same ``shard_count``, ``seed`` and membership give
    the same owners everywhere. For any membership,

    - the live slots' loads differ by at most 1;
    - a slot that joins at the end, with no holes, takes its share and moves nothing else;
    - a slot that dies while all others live loses its shards and moves nothing else;
    - a replacement in that hole brings back the owners from before the death.

    With several holes, a death or a replacement may also move shards that were dealt out from
    other holes: 1.0 to 1.5 times the fewest possible moves is usual. Dead slots at the end
    count as never having joined.

    With ``weights``, each slot's load is its exact share rounded down or up, and a slot that
    joins, dies or changes weight moves a small multiple of the shards that must move.

    Keep one table per dataset: it remembers the last few memberships, and the lists from which
    any other is made quickly; of a million shards or more the last membership alone. It may be
    shared between threads.
    """

    def __init__(self, shard_count: int, *, seed: int = 0) -> None:
        self.shard_count = as_int(shard_count)
        self.seed = as_int(seed)
        if not 0 <= self.shard_count <= MAX_COUNT:
            raise ValueError(f"shard_count must be from 0 to {MAX_COUNT}, not {shard_count}")
        self._chain = Chain(self.shard_count, self.seed)
        self._remembered = _REMEMBERED if self.shard_count <= _LARGE else 1
        self._bid_key = np.uint64(fold(self.seed, 1))
        self._recent: OrderedDict[Membership, _Assignment] = OrderedDict()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"SlotTable({self.shard_count}, seed={self.seed})"

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(SlotTable, seed=self.seed), (self.shard_count,)

    def owners(
        self,
        slot_count: int,
        dead: Collection[int] = (),
        weights: Sequence[int] | None = None,
    ) -> NDArray[np.int32]:
        """Return the slot of every shard, as a read-only array.

        Raises ``ShardError`` when every slot is dead.
        """
        return self._assignment(Membership(slot_count, dead, weights)).owners

    def shards_of(
        self,
        slot: int,
        slot_count: int,
        dead: Collection[int] = (),
        weights: Sequence[int] | None = None,
    ) -> NDArray[np.int64]:
        """Return the shards of ``slot`` in rising order: none when it is dead.

        Takes time in proportion to the answer when the membership is one of the last few.
        """
        slot = as_int(slot)
        if not 0 <= slot < slot_count:
            raise ValueError(f"slot {slot} is not one of the {slot_count} slots")
        return self._assignment(Membership(slot_count, dead, weights)).shards_of(slot)

    def load_of(
        self,
        slot: int,
        slot_count: int,
        dead: Collection[int] = (),
        weights: Sequence[int] | None = None,
    ) -> int:
        """Return how many shards ``slot`` has, without listing them."""
        start, end = self._assignment(Membership(slot_count, dead, weights)).part(slot)
        return end - start

    def shard_at(
        self,
        position: int,
        slot: int,
        slot_count: int,
        dead: Collection[int] = (),
        weights: Sequence[int] | None = None,
    ) -> int:
        """Return one of the shards of ``slot``, by its place among them in rising order."""
        assignment = self._assignment(Membership(slot_count, dead, weights))
        return assignment.shard_at(slot, position)

    def moves(
        self,
        before: Membership | tuple[int, Collection[int]],
        after: Membership | tuple[int, Collection[int]],
    ) -> NDArray[np.int64]:
        """Return the shards, in rising order, whose slot differs between two memberships."""
        return np.flatnonzero(self.owners(*before) != self.owners(*after))

    def _assignment(self, membership: Membership) -> _Assignment:
        key = membership.normalised()
        with self._lock:
            known = self._recall(key)
            if self.shard_count > _LARGE:
                # Its lists take more memory than they save time.
                self._chain = Chain(self.shard_count, self.seed)
            return known

    def _recall(self, key: Membership) -> _Assignment:
        known = self._recent.get(key)
        if known is None:
            known = self._recent[key] = _Assignment(self._compute(key))
            while len(self._recent) > self._remembered:
                self._recent.popitem(last=False)
        self._recent.move_to_end(key)
        return known

    def _compute(self, key: Membership) -> NDArray[np.int32]:
        base = Membership(key.slot_count, frozenset())
        if key == base:
            return self._chain.owners(key.slot_count)
        owners = self._recall(base).owners.copy()
        least, most = key.bounds(self.shard_count)
        sizes = self._chain.sizes(key.slot_count)
        keep = _kept(sizes, least, most)
        shards = self._chain.tails(keep, sizes)
        hashes = mix_array(shards.astype(np.uint64) ^ self._bid_key)
        owners[shards] = deal(hashes, keep, least, most)
        return owners


class _Assignment:
    """The owners of one membership, and on demand the shards grouped by owner."""

    __slots__ = ("_groups", "owners")

    def __init__(self, owners: NDArray[np.int32]) -> None:
        owners.flags.writeable = False
        self.owners = owners
        self._groups: tuple[NDArray[np.int32], NDArray[np.int64]] | None = None

    def shards_of(self, slot: int) -> NDArray[np.int64]:
        start, end = self.part(slot)
        return self._grouped()[0][start:end].astype(np.int64)

    def shard_at(self, slot: int, position: int) -> int:
        start, end = self.part(slot)
        if not 0 <= position < end - start:
            raise IndexError(f"slot {slot} has {end - start} shards: there is none at {position}")
        return int(self._grouped()[0][start + position])

    def part(self, slot: int) -> tuple[int, int]:
        """Where the shards of a slot are among all that are grouped by owner."""
        ends = self._grouped()[1]
        if slot >= ends.size:
            return 0, 0
        return (int(ends[slot - 1]) if slot else 0), int(ends[slot])

    def _grouped(self) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        if self._groups is None:
            self._groups = self._group()
        return self._groups

    def _group(self) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        loads = np.bincount(self.owners)
        if loads.size == 1:
            return np.arange(self.owners.size, dtype=np.int32), np.cumsum(loads)
        # Numpy sorts 16-bit numbers by radix, in linear time.
        narrow = np.uint16 if loads.size <= 1 << 16 else np.uint32
        shards = np.argsort(self.owners.astype(narrow), kind="stable")
        return shards.astype(np.int32), np.cumsum(loads)


def _kept(
    sizes: NDArray[np.int64], least: NDArray[np.int64], most: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return how many shards each slot keeps, so that every slot can reach ``least``."""
    keep = np.minimum(sizes, most)
    missing = int(np.maximum(least - sizes, 0).sum() - (sizes - keep).sum())
    if missing > 0:
        keep[np.flatnonzero(keep > least)[-missing:]] -= 1
    return keep
