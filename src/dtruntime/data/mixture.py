"""Several datasets read as one, in given shares."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

from ..errors import ShardError
from ..types import check_whole
from .loading.sequences import BLOCK, ORIGIN, quotas
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
