"""Several datasets read as one, in given shares.

Sequences of samples that a whole job reads: of one dataset, or of several mixed by weight.

A sequence is read in strands: its sample ``p`` is number ``p // streams`` of strand
``p mod streams``.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import ShardError
from ..sharding import shuffled
from ..types import check_whole
from .columns import Block
from .order import GlobalOrder, Shuffle
from .prefetch import LaneReader, ShardFetcher
from .source import Source


class Mixture:
    """Samples of several datasets in the proportion of their weights.

    The shares are exact in every thousand samples of a stream. An epoch of the mixture has
    ``samples`` samples, by default as many as make the first dataset run out. Each dataset goes on
    in the next epoch where this one left it, and begins anew, in another order, only when all its
    samples were read once.
    """

    def __init__(
        self, parts: Mapping[str, tuple[Source, float]], samples: int | None = None
    ) -> None:
        """``parts`` are the datasets and their weights, by name. All must have the same columns."""
        if not parts:
            raise ShardError("a mixture needs at least one dataset")
        for name, (source, _) in parts.items():
            if not isinstance(source, Source):
                raise TypeError(f"{name!r} must be a Source, not {type(source).__name__}")
        self.names = tuple(parts)
        self.sources = tuple(source for source, _ in parts.values())
        self.quotas = quotas([weight for _, weight in parts.values()])
        self._check_columns()
        totals = [source.total for source in self.sources]
        self.offsets = np.concatenate(([0], np.cumsum(totals)[:-1]))
        """What is added to a dataset's sample numbers to tell them from the others'."""
        self.total = sum(totals)
        due = [len(s) * BLOCK // int(q) for s, q in zip(self.sources, self.quotas, strict=True)]
        self._samples = min(due) if samples is None else check_whole("samples", samples)
        if self._samples < 1:
            raise ValueError(f"an epoch has at least one sample, not {self._samples}")
        key = repr((self.names, self.quotas.tolist(), self._samples))
        joined = "".join(source.layout for source in self.sources) + key
        self.layout = hashlib.sha256(joined.encode()).hexdigest()[:16]
        prints = "".join(source.fingerprint for source in self.sources)
        self.fingerprint = hashlib.sha256(prints.encode()).hexdigest()[:32]

    def __len__(self) -> int:
        return self._samples

    @property
    def mean_shard_bytes(self) -> int:
        """How large a shard is, of the dataset where they are largest."""
        return max(source.mean_shard_bytes for source in self.sources)

    def _check_columns(self) -> None:
        first = self.sources[0].schema
        if ORIGIN in first.names:
            raise ShardError(
                f"the datasets have a column {ORIGIN!r}, which a mixture adds: leave it out"
            )
        for name, source in zip(self.names[1:], self.sources[1:], strict=True):
            if not source.schema.equals(first):
                raise ShardError(
                    f"datasets {self.names[0]!r} and {name!r} of a mixture have different columns "
                    f"({first.names} and {source.schema.names}, or their types): choose columns "
                    "that both have"
                )


Ints = NDArray[np.int64]

ORIGIN = "__dataset__"
"""The column that says from which dataset of a mixture a sample is."""
BLOCK = 1000
"""In so many samples of a strand, each dataset of a mixture has exactly its share."""
_MIX = 3


class Strand(ABC):
    """A part of a sequence that is read from front to back."""

    @abstractmethod
    def read(self, start: int, stop: int) -> Block:
        """Samples ``start`` to ``stop`` of the strand, not before what was read last."""


class PlainStrand(Strand):
    """A strand of one epoch of one dataset."""

    def __init__(
        self, order: GlobalOrder, number: int, fetcher: ShardFetcher, prefetch_shards: int
    ) -> None:
        self._order = order
        self._begin, self._end = order.strand(number)
        self._fetcher = fetcher
        self._prefetch_shards = prefetch_shards
        self._reader: LaneReader | None = None

    def __len__(self) -> int:
        return self._end - self._begin

    def read(self, start: int, stop: int) -> Block:
        """Samples ``start`` to ``stop``."""
        first = self._begin + start
        if self._reader is None:
            self._reader = LaneReader(
                self._order.lane, self._fetcher, first, self._end, self._prefetch_shards
            )
        return self._reader.read(first, self._begin + stop)


class EndlessStrand(Strand):
    """A strand of one dataset through all epochs."""

    def __init__(
        self, fetcher: ShardFetcher, shuffle: Shuffle, streams: int, number: int, prefetch: int
    ) -> None:
        self._fetcher = fetcher
        self._shuffle = shuffle
        self._streams = streams
        self._number = number
        self._prefetch = prefetch
        self._epoch = -1
        self._current = self._strand(0)
        self._length = len(self._current)

    def read(self, start: int, stop: int) -> Block:
        """Samples ``start`` to ``stop``, counted from the first epoch's first."""
        parts = []
        while start < stop:
            epoch, inside = divmod(start, self._length)
            if epoch != self._epoch:
                self._current, self._epoch = self._strand(epoch), epoch
            count = min(stop - start, self._length - inside)
            parts.append(self._current.read(inside, inside + count))
            start += count
        return Block.concat(parts)

    def _strand(self, epoch: int) -> PlainStrand:
        shuffle = Shuffle(self._shuffle.seed, epoch, self._shuffle.enabled, self._shuffle.window)
        order = GlobalOrder(self._fetcher.source.starts, shuffle, self._streams)
        return PlainStrand(order, self._number, self._fetcher, self._prefetch)


class MixedStrand(Strand):
    """Strands of several datasets, interleaved by a pattern that repeats its shares exactly."""

    def __init__(
        self, parts: Sequence[Strand], quotas: Ints, offsets: Ints, seed: int, number: int
    ) -> None:
        """``offsets`` are added to the numbers of each part's samples."""
        self._parts = parts
        self._quotas = quotas
        self._offsets = offsets
        self._seed = seed
        self._number = number

    def read(self, start: int, stop: int) -> Block:
        """Samples ``start`` to ``stop``."""
        origins = self._origins(start, stop)
        before = self._before(start)
        blocks, places = [], []
        for number, part in enumerate(self._parts):
            here = np.flatnonzero(origins == number)
            if len(here):
                first = int(before[number])
                blocks.append(part.read(first, first + len(here)))
                places.append(here)
        mixed = Block.concat(blocks).take(np.argsort(np.concatenate(places)))
        return Block({**mixed.columns, ORIGIN: origins}, mixed.numbers + self._offsets[origins])

    def _origins(self, start: int, stop: int) -> Ints:
        """The dataset of each sample."""
        patterns = [self._pattern(b) for b in range(start // BLOCK, -(-stop // BLOCK))]
        skipped = start - start % BLOCK
        return np.concatenate(patterns)[start - skipped : stop - skipped]

    def _before(self, start: int) -> Ints:
        """How many samples of each dataset come before ``start``."""
        block, inside = divmod(start, BLOCK)
        seen = np.bincount(self._pattern(block)[:inside], minlength=len(self._quotas))
        counts: Ints = block * self._quotas + seen
        return counts

    def _pattern(self, block: int) -> Ints:
        cards = np.repeat(np.arange(len(self._quotas)), self._quotas)
        return cards[shuffled(BLOCK, self._seed, _MIX, block, self._number)]


def quotas(weights: Sequence[float]) -> Ints:
    """Whole numbers in proportion to ``weights``, at least 1 each, that add up to `BLOCK`."""
    shares = np.asarray(weights, float)
    if not len(shares) or not np.isfinite(shares).all() or (shares <= 0).any():
        raise ValueError(f"the weights of a mixture must be positive numbers, not {weights}")
    exact = shares / shares.sum() * BLOCK
    counts: Ints = np.maximum(1, np.floor(exact)).astype(np.int64)
    missing = BLOCK - int(counts.sum())
    if missing < 0 or len(shares) > BLOCK // 2:
        raise ValueError(f"a weight is below one in {BLOCK}: leave that dataset out")
    counts[np.argsort(counts - exact, kind="stable")[:missing]] += 1
    return counts


def check_sizes(names: Sequence[str], sizes: Sequence[int], streams: int) -> None:
    """Every strand of a mixture needs a sample of each dataset."""
    for name, size in zip(names, sizes, strict=True):
        if size < streams:
            raise ShardError(
                f"dataset {name!r} has {size} samples, fewer than the {streams} streams that the "
                "mixture is read in: use fewer streams, or leave it out"
            )
