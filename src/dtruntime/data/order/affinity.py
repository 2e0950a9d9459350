"""Each rank reads its own shards, and what a lost rank left is dealt to the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...sharding import Membership, SlotTable
from .lanes import Ints, Lane, Shuffle, Window


class TakenBack(NamedTuple):
    """A stretch of a lane that is read again, because its reader was lost before committing."""

    segment: int
    """Counted from 1."""
    slot: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of an epoch in which the membership did not change."""

    slot_count: int
    dead: tuple[int, ...] = ()
    consumed: tuple[int, ...] = ()
    """Samples that each slot consumed; a single number stands for every live slot. More than a
    lane has means all of it."""
    weights: tuple[int, ...] = ()
    """Shares in which what nobody has begun is dealt; without them the slot table deals it."""
    taken_back: tuple[TakenBack, ...] = ()
    """What is dealt again when this segment begins."""

    def consumed_by(self, slot: int, length: int) -> int:
        """How many of a lane's ``length`` samples a slot consumed."""
        if slot in self.dead or not self.consumed:
            return 0
        consumed = self.consumed[0] if len(self.consumed) == 1 else self.consumed[slot]
        return min(consumed, length)

    @property
    def live(self) -> list[int]:
        """The slots that took part."""
        gone = set(self.dead)
        return [slot for slot in range(self.slot_count) if slot not in gone]


Begun = list[tuple[int, Window]]
"""Windows that were begun, each with the slot that began it; -1: nobody who still has it."""


class AffinityOrder:
    """Each rank reads its own shards; what a lost rank left is dealt to the others."""

    def __init__(self, table: SlotTable, starts: ArrayLike, shuffle: Shuffle) -> None:
        """``table`` deals the shards, ``starts`` are as for `GlobalOrder`."""
        self._table = table
        self._starts = np.asarray(starts, dtype=np.int64)
        self._shuffle = shuffle
        order = shuffle.shard_order(len(self._starts) - 1)
        self._place = np.empty(len(order), np.int64)
        self._place[order] = np.arange(len(order))

    def lanes(self, history: Sequence[Segment], current: Segment) -> Lanes:
        """What each live slot of ``current`` has to read, after the segments before it."""
        pool = self._starts[1:] > self._starts[:-1]
        begun: Begun = []
        past: list[Lanes] = []
        for segment in history:
            lanes = self._deal(pool, begun + _again(past, segment), segment)
            past.append(lanes)
            pool = np.zeros_like(pool)
            begun = []
            for slot in segment.live:
                lane = lanes[slot]
                windows, untouched = lane.rest(segment.consumed_by(slot, len(lane)))
                pool[untouched] = True
                begun += [(slot, window) for window in windows]
        return self._deal(pool, begun + _again(past, current), current)

    def _deal(self, pool: NDArray[np.bool_], begun: Begun, segment: Segment) -> Lanes:
        shares = self._shares(pool, segment)
        load = shares.loads(self._starts)
        windows: dict[int, list[Window]] = {slot: [] for slot in segment.live}
        for slot, window in sorted(begun, key=lambda item: item[0] not in windows):
            taker = slot if slot in windows else min(windows, key=lambda s: (load[s], s))
            windows[taker].append(window)
            load[taker] += len(window)

        def lane(slot: int) -> Lane:
            return Lane(shares.of(slot), self._starts, self._shuffle, windows[slot])

        return Lanes({slot: int(load[slot]) for slot in windows}, lane)

    def _shares(self, pool: NDArray[np.bool_], segment: Segment) -> _Shares:
        """The untouched shards of each live slot, in reading order."""
        shards = np.flatnonzero(pool)
        owners = self._table.owners(segment.slot_count, segment.dead)[shards]
        shares = _Shares(shards, owners, self._place, segment.slot_count)
        if not segment.weights:
            return shares
        quota = _quotas(len(shards), segment)
        owned = {slot: shares.of(slot) for slot in segment.live}
        spare = np.concatenate([own[quota[slot] :] for slot, own in owned.items()])
        spare = spare[np.argsort(self._place[spare], kind="stable")]
        kept = []
        for slot, own in owned.items():
            room = max(0, int(quota[slot]) - len(own))
            mine = np.concatenate((own[: quota[slot]], spare[:room]))
            kept.append((np.full(len(mine), slot), mine))
            spare = spare[room:]
        owners = np.concatenate([slots for slots, _ in kept])
        return _Shares(
            np.concatenate([mine for _, mine in kept]), owners, self._place, segment.slot_count
        )


class Lanes(Mapping[int, Lane]):
    """The lanes of all live slots; each is made when it is first asked for."""

    def __init__(self, lengths: dict[int, int], make: Callable[[int], Lane]) -> None:
        self.lengths = lengths
        """How long each is."""
        self._make = make
        self._made: dict[int, Lane] = {}

    def __getitem__(self, slot: int) -> Lane:
        if slot not in self._made:
            if slot not in self.lengths:
                raise KeyError(slot)
            self._made[slot] = self._make(slot)
        return self._made[slot]

    def __iter__(self) -> Iterator[int]:
        return iter(self.lengths)

    def __len__(self) -> int:
        return len(self.lengths)


class _Shares:
    """Shards grouped by the slots that read them."""

    def __init__(self, shards: Ints, owners: NDArray[Any], place: Ints, slot_count: int) -> None:
        order = np.argsort(owners.astype(np.int64) * len(place) + place[shards])
        self._shards = shards[order]
        self._owners = owners[order]
        counts = np.bincount(owners, minlength=slot_count)
        self._ends = np.cumsum(counts)
        self._starts = self._ends - counts

    def of(self, slot: int) -> Ints:
        """A slot's shards, in reading order."""
        return self._shards[self._starts[slot] : self._ends[slot]]

    def loads(self, starts: Ints) -> Ints:
        """How many samples each slot has."""
        sizes = np.concatenate(([0], np.cumsum(starts[self._shards + 1] - starts[self._shards])))
        loads: Ints = sizes[self._ends] - sizes[self._starts]
        return loads


def _again(past: list[Lanes], segment: Segment) -> Begun:
    """Windows of what is taken back when a segment begins."""
    return [
        (-1, window)
        for back in segment.taken_back
        for window in past[back.segment - 1][back.slot].between(back.start, back.stop)
    ]


def _quotas(count: int, segment: Segment) -> Ints:
    """How many of ``count`` shards each slot is due: rounded down, the rest to the lowest."""
    least, most = Membership(segment.slot_count, segment.dead, segment.weights).bounds(count)
    spare = count - int(least.sum())
    least[np.flatnonzero(most > least)[:spare]] += 1
    return least
