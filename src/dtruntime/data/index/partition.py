"""How a dataset's samples are cut into shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

import numpy as np
from numpy.typing import NDArray

from ...types import check_flag, check_whole
from ..readers import IndexedFile
from .dataset_index import DatasetIndex

ENOUGH_SHARDS = 512
"""Row groups and compressed files are kept whole while there are at least so many shards."""


@dataclass(frozen=True, slots=True)
class ShardPiece:
    """The part of a shard that lies in one file."""

    file: int
    """The file's number in the index."""
    url: str
    start: int
    """The number of the first row in the file."""
    count: int
    bytes: int
    """How much of the file has to be read for it."""


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """A range of samples and where they lie."""

    shard_id: int
    start: int
    end: int
    """Exclusive."""
    pieces: tuple[ShardPiece, ...]

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def urls(self) -> tuple[str, ...]:
        """The files that hold it."""
        return tuple(piece.url for piece in self.pieces)


class Shards(Sequence[ShardSpec]):
    """The shards of a dataset, kept as the numbers between which they lie."""

    def __init__(self, dataset: DatasetIndex, bounds: NDArray[np.int64]) -> None:
        self.dataset = dataset
        self.bounds = bounds
        """The first sample of each shard, and behind the last the number of all samples."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @overload
    def __getitem__(self, number: int) -> ShardSpec: ...
    @overload
    def __getitem__(self, number: slice) -> list[ShardSpec]: ...
    def __getitem__(self, number: int | slice) -> ShardSpec | list[ShardSpec]:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        if not -len(self) <= number < len(self):
            raise IndexError(f"shard {number} is not one of {len(self)}")
        shard_id = number % len(self)
        start, end = int(self.bounds[shard_id]), int(self.bounds[shard_id + 1])
        return ShardSpec(shard_id, start, end, tuple(self._pieces(start, end)))

    @cached_property
    def bytes_read(self) -> NDArray[np.int64]:
        """How much has to be read for each shard; what two of them need counts for both."""
        counts, lengths = _reading_units(self.dataset)
        ends = np.cumsum(counts)
        read = np.concatenate(([0], np.cumsum(lengths)))
        first = np.searchsorted(ends, self.bounds[:-1], side="right")
        last = np.searchsorted(ends - counts, self.bounds[1:], side="left")
        total: NDArray[np.int64] = read[last] - read[first]
        return total

    def _pieces(self, start: int, end: int) -> Iterator[ShardPiece]:
        bounds = self.dataset.bounds
        first = int(np.searchsorted(bounds, start, side="right")) - 1
        for number in range(first, int(np.searchsorted(bounds, end, side="left"))):
            begin, stop = int(bounds[number]), int(bounds[number + 1])
            low, high = max(start, begin) - begin, min(end, stop) - begin
            if low < high:
                file = self.dataset.files[number]
                yield ShardPiece(number, file.url, low, high - low, _bytes_read(file, low, high))


def shards(index: DatasetIndex, shard_size: int, exact: bool = False) -> Shards:
    """Cut a dataset into shards of about ``shard_size`` samples.

    A shard ends where a row group, a block or a file does, so that nothing is read for two
    shards. Row groups and compressed files larger than ``shard_size`` are kept whole as well,
    unless that left fewer than ``ENOUGH_SHARDS`` to share among workers: then they are cut into
    equal parts. With ``exact`` every shard but the last has ``shard_size`` samples.
    """
    check_whole("shard_size", shard_size, 1)
    total = index.total_samples
    marks = np.arange(shard_size, total, shard_size, dtype=np.int64)
    if not check_flag("exact", exact):
        ends = _natural_ends(index, max(shard_size, total // ENOUGH_SHARDS))
        marks = _nearest(ends, marks)
    return Shards(index, np.unique(np.concatenate(([0], marks, [total]))))


def _natural_ends(index: DatasetIndex, largest: int) -> NDArray[np.int64]:
    """Where shards may end: behind each unit of reading, or within one that is too large."""
    counts, _ = _reading_units(index)
    parts = np.maximum(1, np.rint(counts / largest).astype(np.int64))
    unit = np.repeat(np.arange(len(counts)), parts)
    step = np.arange(len(unit)) - np.repeat(np.cumsum(parts) - parts, parts) + 1
    before = np.cumsum(counts) - counts
    ends: NDArray[np.int64] = before[unit] + counts[unit] * step // parts[unit]
    return ends


def _reading_units(index: DatasetIndex) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The samples and bytes of what is read at once: blocks, or files that have to be whole."""
    units = [
        (file.blocks.counts, file.blocks.lengths)
        if file.seekable
        else (np.array([file.samples]), np.array([file.stat.size]))
        for file in index.files
    ]
    counts, lengths = (np.concatenate(column) for column in zip(*units, strict=True))
    return counts[counts > 0], lengths[counts > 0]


def _nearest(ends: NDArray[np.int64], marks: NDArray[np.int64]) -> NDArray[np.int64]:
    above = np.minimum(np.searchsorted(ends, marks), len(ends) - 1)
    below = np.maximum(above - 1, 0)
    closer = marks - ends[below] < ends[above] - marks
    return np.where(closer, ends[below], ends[above])


def _bytes_read(file: IndexedFile, start: int, stop: int) -> int:
    if not file.seekable:
        return file.stat.size
    numbers = file.blocks.covering(start, stop)
    return int(file.blocks.lengths[numbers.start : numbers.stop].sum())
