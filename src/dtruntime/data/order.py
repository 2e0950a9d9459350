"""The order in which an epoch's samples are read, and by whom: pure functions of their arguments.

*Global* order is one sequence for the whole job. A position in it is the complete state of an
epoch, whatever the number of workers, loader processes or the batch size. The sequence is read in
*streams* side by side: sample ``p`` is number ``p // streams`` of stream ``p mod streams``. A rank
takes its part of a batch from as few streams as possible, so that with ``streams`` a multiple of
the number of ranks no two ranks read the same shard, except at the seams.

*Affinity* order keeps a worker on its own shards across epochs, so that caches stay warm; its
state is the list of memberships that the epoch has seen, with the progress of each rank.

Both shuffle in two steps: the order of the shards, then the samples within windows of shards. So a
worker reads whole shards, and every sample can still end up anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..sharding import Membership, Permutation, SlotTable, shuffled

Ints = NDArray[np.int64]

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
AtLeastOne = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]

DEFAULT_WINDOW = 8
_SHARDS, _SAMPLES = 1, 2
"""Tags that give the two shuffles different keys."""


@dataclass(frozen=True, slots=True)
class Shuffle:
    """What determines an epoch's order."""

    seed: int = 0
    epoch: int = 0
    enabled: bool = True
    window: int = DEFAULT_WINDOW
    """How many shards are mixed with each other."""

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"a shuffle window has at least one shard, not {self.window}")

    @property
    def window_size(self) -> int:
        """How many shards are read together: one without shuffling."""
        return self.window if self.enabled else 1

    def shard_order(self, shard_count: int) -> Ints:
        """The shards in reading order."""
        if not self.enabled:
            return np.arange(shard_count, dtype=np.int64)
        return Permutation(shard_count, self.seed, self.epoch, _SHARDS).slice(0, shard_count)

    def within(self, length: int, key: int) -> Ints | None:
        """The order of the samples of a window; ``None``: unchanged."""
        if not self.enabled:
            return None
        return shuffled(length, self.seed, self.epoch, _SAMPLES, key)


class OrderPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What determines the order of all epochs; a position is valid only with it."""

    order: str
    samples: AtLeastOne
    fingerprint: str
    layout: str
    seed: int
    shuffle: bool
    window: AtLeastOne
    streams: AtLeastOne

    def shuffle_in(self, epoch: int) -> Shuffle:
        """What determines the order of one epoch."""
        return Shuffle(self.seed, epoch, self.shuffle, self.window)

    def difference(self, other: OrderPlan) -> str:
        """How another plan differs."""
        return "; ".join(
            f"{field}: {getattr(self, field)!r} in the state, {getattr(other, field)!r} here"
            for field in self.__struct_fields__
            if getattr(self, field) != getattr(other, field)
        )


class Window:
    """Shards whose samples are shuffled together, or a part of the result."""

    def __init__(
        self,
        shards: Ints,
        starts: Ints,
        shuffle: Shuffle,
        skip: int = 0,
        stop: int | None = None,
    ) -> None:
        """Samples ``skip`` to ``stop`` of the shuffled shards."""
        self.shards = shards
        self.skip = skip
        self._starts = starts
        self._shuffle = shuffle
        self._size = int((starts[shards + 1] - starts[shards]).sum())
        self.stop = self._size if stop is None else stop

    def __len__(self) -> int:
        return self.stop - self.skip

    def part(self, start: int, stop: int) -> Window:
        """Samples ``start`` to ``stop`` of this window."""
        return Window(self.shards, self._starts, self._shuffle, self.skip + start, self.skip + stop)

    def joined(self, following: Window) -> Window | None:
        """Both as one; ``None`` when they are shuffled, or lack samples where they meet."""
        if self._shuffle.enabled or following.skip or self.stop != self._size:
            return None
        shards = np.concatenate((self.shards, following.shards))
        stop = self.stop + following.stop
        return Window(shards, self._starts, self._shuffle, self.skip, stop)

    def places(self) -> Ints | slice:
        """The places of its samples among the concatenated samples of its shards."""
        part = slice(self.skip, self.stop)
        return part if self._order is None else self._order[part]

    def numbers(self) -> Ints:
        """The numbers of all its samples, in reading order."""
        runs = [np.arange(self._starts[i], self._starts[i + 1]) for i in self.shards.tolist()]
        numbers = np.concatenate(runs)
        return numbers[self.places()]

    @cached_property
    def _order(self) -> Ints | None:
        return self._shuffle.within(self._size, int(self.shards[0]))


class Lane:
    """Samples to read one after the other: windows that were begun, then whole shards."""

    __slots__ = ("_bounds", "_shuffle", "_size", "_starts", "begun", "shards")

    def __init__(
        self, shards: Ints, starts: Ints, shuffle: Shuffle, begun: Sequence[Window] = ()
    ) -> None:
        self.begun = tuple(begun)
        self.shards = shards
        self._starts = starts
        self._shuffle = shuffle
        self._size = shuffle.window_size
        sizes = starts[shards + 1] - starts[shards]
        lengths = np.array([len(window) for window in self.begun], np.int64)
        if len(shards):
            whole = np.add.reduceat(sizes, np.arange(0, len(shards), self._size))
            lengths = np.concatenate((lengths, whole))
        self._bounds = np.concatenate(([0], np.cumsum(lengths)))

    def __len__(self) -> int:
        return int(self._bounds[-1])

    def windows(self, start: int, stop: int | None = None) -> Iterator[tuple[int, Window]]:
        """The windows with positions ``start`` to ``stop``, each with its first position."""
        end = len(self) if stop is None else stop
        index = int(np.searchsorted(self._bounds, start, side="right")) - 1
        while index < len(self._bounds) - 1 and (first := int(self._bounds[index])) < end:
            yield first, self._window(index)
            index += 1

    def between(self, start: int, stop: int) -> list[Window]:
        """Positions ``start`` to ``stop`` as windows that were begun."""
        self._check(start)
        self._check(stop)
        parts = []
        for first, window in self.windows(start, stop):
            low, high = max(0, start - first), min(len(window), stop - first)
            parts.append(window.part(low, high))
        return parts

    def rest(self, consumed: int) -> tuple[list[Window], Ints]:
        """What is left after ``consumed`` samples: windows that were begun, and whole shards."""
        self._check(consumed)
        index = int(np.searchsorted(self._bounds, consumed, side="right")) - 1
        inside = consumed - int(self._bounds[index])
        begun = list(self.begun[index + 1 :] if inside else self.begun[index:])
        if inside:
            window = self._window(index)
            begun.insert(0, window.part(inside, len(window)))
        first = max(0, index + bool(inside) - len(self.begun)) * self._size
        return begun, self.shards[first:]

    def window_end(self, position: int) -> int:
        """Where the window that contains ``position`` ends."""
        index = int(np.searchsorted(self._bounds, position, side="right"))
        return int(self._bounds[min(index, len(self._bounds) - 1)])

    def _check(self, consumed: int) -> None:
        if not 0 <= consumed <= len(self):
            raise ValueError(f"{consumed} of {len(self)} samples cannot have been consumed")

    def _window(self, index: int) -> Window:
        if index < len(self.begun):
            return self.begun[index]
        first = (index - len(self.begun)) * self._size
        return Window(self.shards[first : first + self._size], self._starts, self._shuffle)


class SampleRun(NamedTuple):
    """Consecutive samples of one stream (global order) or of one rank's lane (affinity order)."""

    number: int
    """The stream, or the rank."""
    start: int
    stop: int


def global_lane(starts: Ints, shuffle: Shuffle) -> Lane:
    """All samples in global order, stream after stream.

    ``starts`` are the first samples of all shards, followed by the number of samples.
    """
    order = shuffle.shard_order(len(starts) - 1)
    return Lane(order[starts[order + 1] > starts[order]], starts, shuffle)


def stream_bounds(samples: int, streams: int, number: int) -> tuple[int, int]:
    """Where a stream begins and ends when all streams are concatenated."""
    least, more = divmod(samples, streams)
    begin = number * least + min(number, more)
    return begin, begin + least + (number < more)


def runs_of_rank(streams: int, start: int, stop: int, rank: int, world: int) -> list[SampleRun]:
    """A rank's part of the batch of positions ``start`` to ``stop`` of the sequence.

    The parts of all ranks are disjoint, make up the batch, and differ by at most one sample.
    """
    size = max(0, stop - start)
    low, high = size * rank // world, size * (rank + 1) // world
    if low == high:
        return []
    if start % streams or size % streams:
        return _uneven_runs(streams, start, stop, low, high)
    each, depth = size // streams, start // streams
    runs = []
    for stream in range(low // each, (high - 1) // each + 1):
        first, last = max(low - stream * each, 0), min(high - stream * each, each)
        runs.append(SampleRun(stream, depth + first, depth + last))
    return runs


def _uneven_runs(streams: int, start: int, stop: int, low: int, high: int) -> list[SampleRun]:
    """The same for a batch that is not divided evenly among the streams."""
    numbers = np.arange(streams)
    first = -((numbers - start) // streams)
    ends = np.cumsum(-((numbers - stop) // streams) - first)
    begin, end = np.searchsorted(ends, (low, high - 1), side="right")
    runs = []
    for stream in range(int(begin), int(end) + 1):
        before = int(ends[stream - 1]) if stream else 0
        depth = int(first[stream]) - before
        first_mine, last_mine = max(low, before), min(high, int(ends[stream]))
        if first_mine < last_mine:
            runs.append(SampleRun(stream, depth + first_mine, depth + last_mine))
    return runs


class TakenBack(NamedTuple):
    """A part of a lane that is read again, because its reader was lost before committing."""

    segment: int
    """Counted from 1."""
    slot: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of an epoch during which the membership did not change."""

    slot_count: int
    dead: tuple[int, ...] = ()
    consumed: tuple[int, ...] = ()
    """Samples that each slot consumed; a single number stands for every live slot. A number above
    the length of a lane means all of it."""
    weights: tuple[int, ...] = ()
    """Shares of the shards that nobody has begun; without them the slot table assigns those."""
    taken_back: tuple[TakenBack, ...] = ()
    """What is assigned again when this segment begins."""

    def consumed_by(self, slot: int, length: int) -> int:
        """How many of a lane's ``length`` samples a slot consumed."""
        if slot in self.dead or not self.consumed:
            return 0
        consumed = self.consumed[0] if len(self.consumed) == 1 else self.consumed[slot]
        return min(consumed, length)

    @property
    def live(self) -> list[int]:
        """The slots that are not dead."""
        return sorted(set(range(self.slot_count)).difference(self.dead))


Begun = list[tuple[int, Window]]
"""Windows that were begun, each with the slot that reads on; -1: none."""


class AffinityOrder:
    """Each rank reads its own shards; those of a lost rank are assigned to the others."""

    def __init__(self, table: SlotTable, starts: Ints, shuffle: Shuffle) -> None:
        """``table`` assigns the shards, ``starts`` are as for `global_lane`."""
        self._table = table
        self._starts = starts
        self._shuffle = shuffle
        order = shuffle.shard_order(len(self._starts) - 1)
        self._place = np.empty(len(order), np.int64)
        self._place[order] = np.arange(len(order))
        self._latest: tuple[tuple[tuple[Segment, ...], Segment], Lanes] | None = None

    def lanes(self, history: Sequence[Segment], current: Segment) -> Lanes:
        """What each live slot of ``current`` reads, after the segments in ``history``."""
        key = tuple(history), current
        if self._latest is None or self._latest[0] != key:
            self._latest = key, self._compute_lanes(history, current)
        return self._latest[1]

    def _compute_lanes(self, history: Sequence[Segment], current: Segment) -> Lanes:
        pool = self._starts[1:] > self._starts[:-1]
        begun: Begun = []
        past: list[Lanes] = []
        for segment in history:
            lanes = self._assign(pool, begun + _windows_taken_back(past, segment), segment)
            past.append(lanes)
            pool = np.zeros_like(pool)
            begun = []
            for slot in segment.live:
                lane = lanes[slot]
                windows, untouched = lane.rest(segment.consumed_by(slot, len(lane)))
                pool[untouched] = True
                begun += [(slot, window) for window in windows]
        return self._assign(pool, begun + _windows_taken_back(past, current), current)

    def _assign(self, pool: NDArray[np.bool_], begun: Begun, segment: Segment) -> Lanes:
        shares = self._shares(pool, segment)
        load = shares.loads(self._starts)
        windows: dict[int, list[Window]] = {slot: [] for slot in segment.live}
        for slot, window in sorted(begun, key=lambda item: item[0] not in windows):
            taker = slot if slot in windows else min(windows, key=lambda s: (load[s], s))
            windows[taker].append(window)
            load[taker] += len(window)
        lengths = {slot: int(load[slot]) for slot in windows}
        return Lanes(lengths, shares, self._starts, self._shuffle, windows)

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
        shards_of = []
        for slot, own in owned.items():
            room = max(0, int(quota[slot]) - len(own))
            shards_of.append(np.concatenate((own[: quota[slot]], spare[:room])))
            spare = spare[room:]
        owners = np.repeat(segment.live, [len(shards) for shards in shards_of])
        return _Shares(np.concatenate(shards_of), owners, self._place, segment.slot_count)


class Lanes:
    """The lanes of all live slots; each is computed when it is first used."""

    def __init__(
        self,
        lengths: dict[int, int],
        shares: _Shares,
        starts: Ints,
        shuffle: Shuffle,
        begun: dict[int, list[Window]],
    ) -> None:
        self.lengths = lengths
        """The length of each, by slot."""
        self._shares = shares
        self._starts = starts
        self._shuffle = shuffle
        self._begun = begun
        self._lanes: dict[int, Lane] = {}

    def __getitem__(self, slot: int) -> Lane:
        if slot not in self._lanes:
            lane = Lane(self._shares.of(slot), self._starts, self._shuffle, self._begun[slot])
            self._lanes[slot] = lane
        return self._lanes[slot]


class _Shares:
    """Shards grouped by the slots that read them."""

    def __init__(self, shards: Ints, owners: NDArray[Any], place: Ints, slot_count: int) -> None:
        order = np.argsort(owners.astype(np.int64) * len(place) + place[shards])
        self._shards = shards[order]
        counts = np.bincount(owners, minlength=slot_count)
        self._ends = np.cumsum(counts)
        self._starts = self._ends - counts

    def of(self, slot: int) -> Ints:
        """A slot's shards, in reading order."""
        return self._shards[self._starts[slot] : self._ends[slot]]

    def loads(self, starts: Ints) -> Ints:
        """The number of samples of each slot."""
        sizes = np.concatenate(([0], np.cumsum(starts[self._shards + 1] - starts[self._shards])))
        loads: Ints = sizes[self._ends] - sizes[self._starts]
        return loads


def _windows_taken_back(past: list[Lanes], segment: Segment) -> Begun:
    """The windows that are read again when a segment begins."""
    return [
        (-1, window)
        for back in segment.taken_back
        for window in past[back.segment - 1][back.slot].between(back.start, back.stop)
    ]


def _quotas(count: int, segment: Segment) -> Ints:
    """Each slot's share of ``count`` shards: rounded down, the rest to the lowest slots."""
    least, most = Membership(segment.slot_count, segment.dead, segment.weights).bounds(count)
    spare = count - int(least.sum())
    least[np.flatnonzero(most > least)[:spare]] += 1
    return least
