"""Each rank reads its own shards, and what a lost rank left is dealt to the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

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

    def lanes(self, history: Sequence[Segment], current: Segment) -> dict[int, Lane]:
        """What each live slot of ``current`` has to read, after the segments before it."""
        pool = self._starts[1:] > self._starts[:-1]
        begun: Begun = []
        past: list[dict[int, Lane]] = []
        for segment in history:
            lanes = self._deal(pool, begun + _again(past, segment), segment)
            past.append(lanes)
            pool[:] = False
            begun = []
            for slot, lane in lanes.items():
                windows, untouched = lane.rest(segment.consumed_by(slot, len(lane)))
                pool[untouched] = True
                begun += [(slot, window) for window in windows]
        return self._deal(pool, begun + _again(past, current), current)

    def _deal(self, pool: NDArray[np.bool_], begun: Begun, segment: Segment) -> dict[int, Lane]:
        live = segment.live
        whole = self._shares(pool, segment)
        sizes = self._starts[1:] - self._starts[:-1]
        load = {slot: int(sizes[shards].sum()) for slot, shards in whole.items()}
        windows: dict[int, list[Window]] = {slot: [] for slot in live}
        for slot, window in sorted(begun, key=lambda item: item[0] not in windows):
            taker = slot if slot in windows else min(live, key=lambda s: (load[s], s))
            windows[taker].append(window)
            load[taker] += len(window)
        return {
            slot: Lane(whole[slot], self._starts, self._shuffle, windows[slot]) for slot in live
        }

    def _shares(self, pool: NDArray[np.bool_], segment: Segment) -> dict[int, Ints]:
        """The untouched shards of each live slot, in reading order."""
        owned = {slot: self._untouched(pool, slot, segment) for slot in segment.live}
        if not segment.weights:
            return owned
        quota = _quotas(int(pool.sum()), segment)
        kept = {slot: shards[: quota[slot]] for slot, shards in owned.items()}
        spare = np.concatenate([shards[quota[slot] :] for slot, shards in owned.items()])
        spare = spare[np.argsort(self._place[spare], kind="stable")]
        for slot, shards in kept.items():
            room = int(quota[slot]) - len(shards)
            given, spare = spare[:room], spare[room:]
            mine = np.concatenate((shards, given))
            kept[slot] = mine[np.argsort(self._place[mine], kind="stable")]
        return kept

    def _untouched(self, pool: NDArray[np.bool_], slot: int, segment: Segment) -> Ints:
        shards = self._table.shards_of(slot, segment.slot_count, segment.dead)
        mine = shards[pool[shards]]
        return mine[np.argsort(self._place[mine], kind="stable")]


def _again(past: list[dict[int, Lane]], segment: Segment) -> Begun:
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
