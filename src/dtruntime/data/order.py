"""In which order an epoch's samples are read, and by whom: pure functions of their arguments.

*Global* order fixes one sequence for the whole job. A position in it is the whole state of
an epoch, whatever the number of workers, loader processes or the batch size. *Affinity*
order keeps a worker on its own shards across epochs, so that caches stay warm; its state is
the list of memberships the epoch has seen, with how far each rank came.

Both shuffle in two steps: the order of the shards, then the samples within windows of
shards. So a worker reads whole shards, and every sample can still end up anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..sharding import Permutation, SlotTable

Ints = NDArray[np.int64]

DEFAULT_WINDOW = 8
_SHARDS, _SAMPLES = 1, 2
"""Tags that keep the keys of the two shuffles apart."""


@dataclass(frozen=True, slots=True)
class Shuffle:
    """What decides an epoch's order."""

    seed: int = 0
    epoch: int = 0
    enabled: bool = True
    window: int = DEFAULT_WINDOW
    """How many shards are mixed with each other."""

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"a shuffle window has at least one shard, not {self.window}")

    def shard_order(self, shard_count: int) -> Ints:
        """The shards in reading order."""
        if not self.enabled:
            return np.arange(shard_count, dtype=np.int64)
        return Permutation(shard_count, self.seed, self.epoch, _SHARDS).slice(0, shard_count)

    def within(self, length: int, key: int, offsets: Ints) -> Ints:
        """Places in a window of ``length`` samples that its ``offsets`` read from."""
        if not self.enabled:
            return offsets
        return Permutation(length, self.seed, self.epoch, _SAMPLES, key).take(offsets)


class Window:
    """Some shards whose samples are mixed, from ``skip`` samples on."""

    __slots__ = ("_bounds", "_shuffle", "_starts", "shards", "skip")

    def __init__(self, shards: Ints, starts: Ints, shuffle: Shuffle, skip: int = 0) -> None:
        sizes = starts[shards + 1] - starts[shards]
        self.shards = shards
        self.skip = skip
        self._starts = starts
        self._shuffle = shuffle
        self._bounds = np.concatenate(([0], np.cumsum(sizes)))

    def __len__(self) -> int:
        return int(self._bounds[-1]) - self.skip

    def after(self, count: int) -> Window:
        """The window without its next ``count`` samples."""
        return Window(self.shards, self._starts, self._shuffle, self.skip + count)

    def samples(self, offsets: Ints) -> Ints:
        """The numbers of the samples at ``offsets``."""
        length = int(self._bounds[-1])
        places = self._shuffle.within(length, int(self.shards[0]), offsets + self.skip)
        which = np.searchsorted(self._bounds, places, side="right") - 1
        return self._starts[self.shards[which]] + places - self._bounds[which]


class Lane:
    """Samples that are read one after the other: windows that were begun, then whole shards."""

    __slots__ = ("_bounds", "_shuffle", "_size", "_starts", "begun", "shards")

    def __init__(
        self, shards: Ints, starts: Ints, shuffle: Shuffle, begun: Sequence[Window] = ()
    ) -> None:
        self.begun = tuple(begun)
        self.shards = shards
        self._starts = starts
        self._shuffle = shuffle
        self._size = shuffle.window if shuffle.enabled else max(1, len(shards))
        sizes = starts[shards + 1] - starts[shards]
        lengths = np.array([len(window) for window in self.begun], np.int64)
        if len(shards):
            whole = np.add.reduceat(sizes, np.arange(0, len(shards), self._size))
            lengths = np.concatenate((lengths, whole))
        self._bounds = np.concatenate(([0], np.cumsum(lengths)))

    def __len__(self) -> int:
        return int(self._bounds[-1])

    def samples(self, positions: ArrayLike) -> Ints:
        """The numbers of the samples at ``positions``."""
        places = np.asarray(positions, dtype=np.int64)
        which = np.searchsorted(self._bounds, places, side="right") - 1
        found = np.empty(places.shape, np.int64)
        for index in np.unique(which):
            here = which == index
            found[here] = self._window(int(index)).samples(places[here] - self._bounds[index])
        return found

    def rest(self, consumed: int) -> tuple[list[Window], Ints]:
        """After ``consumed`` samples: windows that are begun, and shards that are untouched."""
        if not 0 <= consumed <= len(self):
            raise ValueError(f"{consumed} of {len(self)} samples cannot have been consumed")
        index = int(np.searchsorted(self._bounds, consumed, side="right")) - 1
        inside = consumed - int(self._bounds[index])
        begun = list(self.begun[index + 1 :] if inside else self.begun[index:])
        if inside:
            begun.insert(0, self._window(index).after(inside))
        first = max(0, index + bool(inside) - len(self.begun)) * self._size
        return begun, self.shards[first:]

    def _window(self, index: int) -> Window:
        if index < len(self.begun):
            return self.begun[index]
        first = (index - len(self.begun)) * self._size
        return Window(self.shards[first : first + self._size], self._starts, self._shuffle)


class GlobalOrder:
    """One sequence for the whole job, in ``streams`` strands that are read side by side.

    Sample ``p`` of the sequence comes from strand ``p mod streams``. A rank takes its part of
    every batch from as few strands as possible, so that with ``streams`` a multiple of the
    number of ranks no two ranks read the same shard, except at the seams.
    """

    def __init__(self, starts: ArrayLike, shuffle: Shuffle, streams: int = 1) -> None:
        """``starts`` are the first samples of all shards, and the number of samples at the end."""
        if streams < 1:
            raise ValueError(f"there must be at least one stream, not {streams}")
        bounds = np.asarray(starts, dtype=np.int64)
        order = shuffle.shard_order(len(bounds) - 1)
        order = order[bounds[order + 1] > bounds[order]]
        self.streams = streams
        self._lane = Lane(order, bounds, shuffle)

    def __len__(self) -> int:
        return len(self._lane)

    def samples(self, positions: ArrayLike) -> Ints:
        """The numbers of the samples at ``positions`` of the sequence."""
        places = np.asarray(positions, dtype=np.int64)
        strand, depth = places % self.streams, places // self.streams
        least, more = divmod(len(self), self.streams)
        return self._lane.samples(strand * least + np.minimum(strand, more) + depth)

    def part(self, start: int, stop: int, rank: int, world: int) -> Ints:
        """The positions of one rank in the batch of positions ``start`` to ``stop``.

        The parts of all ranks are disjoint, make up the batch, and differ by at most one.
        """
        batch = np.arange(start, min(stop, len(self)), dtype=np.int64)
        by_strand = batch[np.argsort(batch % self.streams, kind="stable")]
        low, high = len(batch) * rank // world, len(batch) * (rank + 1) // world
        return by_strand[low:high]


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of an epoch in which the membership did not change."""

    slot_count: int
    dead: tuple[int, ...] = ()
    consumed: tuple[int, ...] = ()
    """Samples that each slot consumed; a single number stands for every live slot."""

    def consumed_by(self, slot: int) -> int:
        """How many samples a slot consumed."""
        if slot in self.dead:
            return 0
        return self.consumed[slot if len(self.consumed) > 1 else 0] if self.consumed else 0

    @property
    def live(self) -> list[int]:
        """The slots that took part."""
        gone = set(self.dead)
        return [slot for slot in range(self.slot_count) if slot not in gone]


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

    def lanes(self, history: Iterable[Segment], current: Segment) -> dict[int, Lane]:
        """What each live slot of ``current`` has to read, after the segments before it."""
        pool = self._starts[1:] > self._starts[:-1]
        begun: list[tuple[int, Window]] = []
        for segment in history:
            lanes = self._deal(pool, begun, segment)
            pool[:] = False
            begun = []
            for slot, lane in lanes.items():
                windows, untouched = lane.rest(segment.consumed_by(slot))
                pool[untouched] = True
                begun += [(slot, window) for window in windows]
        return self._deal(pool, begun, current)

    def _deal(
        self, pool: NDArray[np.bool_], begun: list[tuple[int, Window]], segment: Segment
    ) -> dict[int, Lane]:
        live = segment.live
        whole = {slot: self._untouched(pool, slot, segment) for slot in live}
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

    def _untouched(self, pool: NDArray[np.bool_], slot: int, segment: Segment) -> Ints:
        shards = self._table.shards_of(slot, segment.slot_count, segment.dead)
        mine = shards[pool[shards]]
        return mine[np.argsort(self._place[mine], kind="stable")]
