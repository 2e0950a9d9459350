"""Samples in reading order: windows of shards whose samples are mixed, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...sharding import Permutation, shuffled

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

    @property
    def window_size(self) -> int:
        """How many shards are read together: one where nothing is mixed."""
        return self.window if self.enabled else 1

    def shard_order(self, shard_count: int) -> Ints:
        """The shards in reading order."""
        if not self.enabled:
            return np.arange(shard_count, dtype=np.int64)
        return Permutation(shard_count, self.seed, self.epoch, _SHARDS).slice(0, shard_count)

    def within(self, length: int, key: int) -> Ints | None:
        """Places in a window of ``length`` samples in reading order; ``None``: as they lie."""
        if not self.enabled:
            return None
        return shuffled(length, self.seed, self.epoch, _SAMPLES, key)


class Window:
    """Some shards whose samples are mixed, or a part of their mixture."""

    def __init__(
        self,
        shards: Ints,
        starts: Ints,
        shuffle: Shuffle,
        skip: int = 0,
        stop: int | None = None,
    ) -> None:
        """From the ``skip``-th sample of the mixture to before the ``stop``-th."""
        self.shards = shards
        self.skip = skip
        self._starts = starts
        self._shuffle = shuffle
        self.bounds = np.concatenate(([0], np.cumsum(starts[shards + 1] - starts[shards])))
        """Where each shard's samples begin when all lie one after the other."""
        self.stop = int(self.bounds[-1]) if stop is None else stop

    def __len__(self) -> int:
        return self.stop - self.skip

    def part(self, start: int, stop: int) -> Window:
        """Samples ``start`` to ``stop`` of this window."""
        return Window(self.shards, self._starts, self._shuffle, self.skip + start, self.skip + stop)

    def joined(self, following: Window) -> Window | None:
        """Both as one, where nothing is mixed and none of their shards' samples is left out."""
        if self._shuffle.enabled or following.skip or self.stop != self.bounds[-1]:
            return None
        shards = np.concatenate((self.shards, following.shards))
        stop = self.stop + following.stop
        return Window(shards, self._starts, self._shuffle, self.skip, stop)

    def places(self) -> Ints | slice:
        """Where its samples are, when its shards' samples lie one after the other."""
        part = slice(self.skip, self.stop)
        return part if self._order is None else self._order[part]

    def numbers(self) -> Ints:
        """The numbers of all its samples, in reading order."""
        runs = [np.arange(self._starts[i], self._starts[i + 1]) for i in self.shards.tolist()]
        numbers = np.concatenate(runs)
        return numbers[self.places()]

    def samples(self, offsets: Ints) -> Ints:
        """The numbers of the samples at ``offsets``."""
        places = offsets + self.skip if self._order is None else self._order[offsets + self.skip]
        which = np.searchsorted(self.bounds, places, side="right") - 1
        return self._starts[self.shards[which]] + places - self.bounds[which]

    @cached_property
    def _order(self) -> Ints | None:
        return self._shuffle.within(int(self.bounds[-1]), int(self.shards[0]))


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
        self._size = shuffle.window_size
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

    def windows(self, start: int, stop: int | None = None) -> Iterator[tuple[int, Window]]:
        """The windows that hold positions ``start`` to ``stop``, each with its first position."""
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
        """After ``consumed`` samples: windows that are begun, and shards that are untouched."""
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
        """Where the window that holds ``position`` ends."""
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
