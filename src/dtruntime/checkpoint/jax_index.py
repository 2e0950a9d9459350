"""What a checkpoint of a pytree with sharded arrays says of itself."""

from __future__ import annotations

from math import prod
from typing import Annotated, Any

from msgspec import Meta, Struct

MARK = "strata.arrays"
"""The key in a checkpoint's metadata that tells it from others."""

Count = Annotated[int, Meta(ge=0, le=1 << 53)]
Counts = Annotated[tuple[Count, ...], Meta(max_length=64)]


class Shard(Struct, frozen=True, array_like=True):
    """A box of an array."""

    starts: Counts
    lengths: Counts
    number: Count
    """Which of the part's shards it is."""

    def overlap(self, starts: tuple[int, ...], lengths: tuple[int, ...]) -> Overlap | None:
        """What it has of another box."""
        if not len(starts) == len(lengths) == len(self.starts) == len(self.lengths):
            return None
        sides = list(zip(self.starts, self.lengths, starts, lengths, strict=True))
        first = tuple(max(ours, theirs) for ours, _, theirs, _ in sides)
        last = tuple(min(a + size, b + length) for a, size, b, length in sides)
        if any(stop <= start for start, stop in zip(first, last, strict=True)):
            return None
        return Overlap(
            tuple(at - own for at, own in zip(first, self.starts, strict=True)),
            tuple(at - other for at, other in zip(first, starts, strict=True)),
            tuple(stop - start for start, stop in zip(first, last, strict=True)),
        )


class Overlap(Struct, frozen=True):
    """A box that lies in two others."""

    inside: tuple[int, ...]
    """Where it begins in the first."""
    at: tuple[int, ...]
    """Where it begins in the second."""
    lengths: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many elements it has."""
        return prod(self.lengths)


class ArrayEntry(Struct, frozen=True, forbid_unknown_fields=True, tag="array"):
    """A leaf that is an array of JAX."""

    name: str
    shape: Counts
    dtype: str | dict[str, Any]
    shards: tuple[Shard, ...]
    impl: str | None = None
    """Of random keys: by which method."""


class ValueEntry(Struct, frozen=True, forbid_unknown_fields=True, tag="value"):
    """Another leaf."""

    name: str
    number: Count
    """Which of the part's values it is."""


class Index(Struct, frozen=True, forbid_unknown_fields=True):
    """What one process saved."""

    entries: tuple[ArrayEntry | ValueEntry, ...]
    process: Count
    processes: Count
