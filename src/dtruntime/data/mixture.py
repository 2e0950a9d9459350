"""Mixtures: several datasets read as one, in given proportions."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..errors import ShardError
from ..sharding import shuffled
from ..types import check_whole
from .columns import Block
from .order import OrderPlan, global_lane, stream_bounds
from .prefetch import LaneReader, ShardFetcher
from .source import Source

Ints = NDArray[np.int64]

ORIGIN = "__dataset__"
"""The column with the dataset of each sample of a mixture."""
BLOCK = 1000
"""The number of samples of a stream in which each dataset has exactly its share."""
_MIX = 3


class Mixture:
    """Samples of several datasets in proportion to their weights.

    The shares are exact in every thousand samples of a stream. An epoch of the mixture has
    ``samples`` samples, by default as many as until the first dataset runs out. Each dataset
    continues in the next epoch where this one ended, and starts again, in another order, only when
    all its samples were read once.
    """

    def __init__(
        self, parts: Mapping[str, tuple[Source, float]], samples: int | None = None
    ) -> None:
        """``parts`` has each dataset and its weight, by name; all must have the same columns."""
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
        """Added to a dataset's sample numbers to make them unique."""
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
        """The average size of a shard, of the dataset with the largest."""
        return max(source.mean_shard_bytes for source in self.sources)

    def check_streams(self, streams: int) -> None:
        """Raise ``ShardError`` unless every stream has a sample of each dataset."""
        for name, source in zip(self.names, self.sources, strict=True):
            if len(source) < streams:
                raise ShardError(
                    f"dataset {name!r} has {len(source)} samples, fewer than the {streams} streams "
                    "that the mixture is read in: use fewer streams, or leave it out"
                )

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


class MixtureReader:
    """Reads one stream of a mixture forward, through all epochs of its datasets.

    Datasets alternate in a pattern that has each one's exact share in every `BLOCK`.
    """

    def __init__(
        self,
        mixture: Mixture,
        plan: OrderPlan,
        stream: int,
        fetchers: Sequence[ShardFetcher],
        prefetch_shards: int,
    ) -> None:
        """``fetchers`` has one for each dataset of the mixture."""
        self._mixture = mixture
        self._plan = plan
        self._stream = stream
        self._fetchers = fetchers
        self._prefetch_shards = prefetch_shards
        self._readers: dict[int, tuple[int, LaneReader]] = {}
        """The current epoch and reader of each dataset."""

    def read(self, start: int, stop: int) -> Block:
        """Samples ``start`` to ``stop`` of the stream, after those read before."""
        origins = self._origins(start, stop)
        before = self._before(start)
        blocks, places = [], []
        for dataset in range(len(self._fetchers)):
            here = np.flatnonzero(origins == dataset)
            if len(here):
                first = int(before[dataset])
                blocks.append(self._read(dataset, first, first + len(here)))
                places.append(here)
        mixed = Block.concat(blocks).take(np.argsort(np.concatenate(places)))
        numbers = mixed.numbers + self._mixture.offsets[origins]
        return Block({**mixed.columns, ORIGIN: origins}, numbers)

    def _read(self, dataset: int, start: int, stop: int) -> Block:
        """Samples of this stream of one dataset, counted through all its epochs."""
        samples = len(self._mixture.sources[dataset])
        begin, end = stream_bounds(samples, self._plan.streams, self._stream)
        parts = []
        while start < stop:
            epoch, inside = divmod(start, end - begin)
            count = min(stop - start, end - begin - inside)
            parts.append(self._reader(dataset, epoch).read(inside, inside + count))
            start += count
        return Block.concat(parts)

    def _reader(self, dataset: int, epoch: int) -> LaneReader:
        if dataset not in self._readers or self._readers[dataset][0] != epoch:
            shuffle = replace(self._plan.shuffle_in(epoch), seed=self._plan.seed + dataset)
            lane = global_lane(self._mixture.sources[dataset].starts, shuffle)
            bounds = stream_bounds(len(lane), self._plan.streams, self._stream)
            reader = LaneReader(lane, self._fetchers[dataset], *bounds, self._prefetch_shards)
            self._readers[dataset] = epoch, reader
        return self._readers[dataset][1]

    def _origins(self, start: int, stop: int) -> Ints:
        """The dataset of each sample."""
        patterns = [self._pattern(b) for b in range(start // BLOCK, -(-stop // BLOCK))]
        skipped = start - start % BLOCK
        return np.concatenate(patterns)[start - skipped : stop - skipped]

    def _before(self, start: int) -> Ints:
        """How many samples of each dataset come before ``start``."""
        block, inside = divmod(start, BLOCK)
        quotas = self._mixture.quotas
        seen = np.bincount(self._pattern(block)[:inside], minlength=len(quotas))
        counts: Ints = block * quotas + seen
        return counts

    def _pattern(self, block: int) -> Ints:
        quotas = self._mixture.quotas
        datasets = np.repeat(np.arange(len(quotas)), quotas)
        return datasets[shuffled(BLOCK, self._plan.seed, _MIX, block, self._stream)]


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
