"""One sequence of samples for the whole job."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from .lanes import Ints, Lane, Shuffle


class StrandSpan(NamedTuple):
    """A run of samples in one strand of the sequence."""

    strand: int
    start: int
    stop: int


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
        self.lane = Lane(order, bounds, shuffle)
        """All samples, strand after strand."""

    def __len__(self) -> int:
        return len(self.lane)

    def strand(self, number: int) -> tuple[int, int]:
        """Where a strand begins and ends in the lane."""
        least, more = divmod(len(self), self.streams)
        begin = number * least + min(number, more)
        return begin, begin + least + (number < more)

    def samples(self, positions: ArrayLike) -> Ints:
        """The numbers of the samples at ``positions`` of the sequence."""
        places = np.asarray(positions, dtype=np.int64)
        strand, depth = places % self.streams, places // self.streams
        least, more = divmod(len(self), self.streams)
        return self.lane.samples(strand * least + np.minimum(strand, more) + depth)

    def part(self, start: int, stop: int, rank: int, world: int) -> Ints:
        """The positions of one rank in the batch of positions ``start`` to ``stop``.

        The parts of all ranks are disjoint, make up the batch, and differ by at most one.
        """
        parts = self.spans(start, min(stop, len(self)), rank, world)
        runs = [np.arange(a, b) * self.streams + strand for strand, a, b in parts]
        return np.concatenate([np.empty(0, np.int64), *runs])

    def spans(self, start: int, stop: int, rank: int, world: int) -> list[StrandSpan]:
        """The same part as runs within strands."""
        return spans(self.streams, start, stop, rank, world)


def spans(streams: int, start: int, stop: int, rank: int, world: int) -> list[StrandSpan]:
    """A rank's part of the batch of positions ``start`` to ``stop``, as runs within strands."""
    size = max(0, stop - start)
    low, high = size * rank // world, size * (rank + 1) // world
    if low == high:
        return []
    if start % streams or size % streams:
        return _uneven_spans(streams, start, stop, low, high)
    each, depth = size // streams, start // streams
    found = []
    for strand in range(low // each, (high - 1) // each + 1):
        first, last = max(low - strand * each, 0), min(high - strand * each, each)
        found.append(StrandSpan(strand, depth + first, depth + last))
    return found


def _uneven_spans(streams: int, start: int, stop: int, low: int, high: int) -> list[StrandSpan]:
    """The same where not all strands have the same part of the batch."""
    strands = np.arange(streams)
    first = -((strands - start) // streams)
    ends = np.cumsum(-((strands - stop) // streams) - first)
    begin, end = np.searchsorted(ends, (low, high - 1), side="right")
    found = []
    for strand in range(int(begin), int(end) + 1):
        before = int(ends[strand - 1]) if strand else 0
        depth = int(first[strand]) - before
        first_mine, last_mine = max(low, before), min(high, int(ends[strand]))
        if first_mine < last_mine:
            found.append(StrandSpan(strand, depth + first_mine, depth + last_mine))
    return found
