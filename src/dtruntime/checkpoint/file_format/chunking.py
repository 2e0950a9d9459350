"""How a part's buffers lie in its stream, and where the stream is cut into chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

PAGE = 4096
ALIGNMENT = 64
"""Every buffer begins at a multiple of this, so that arrays can be used where they lie."""
LARGE = 2**20
"""A buffer of this size has chunks of its own, so that it is told apart when it has not changed."""
CHUNK = 8 * 2**20
"""No chunk is larger."""
GROUP = 64 * 2**20
"""So many bytes are digested and handed to the storage together."""
FIRST_GROUP = 24 * 2**20
"""Fewer at the beginning, so that the storage soon has something to do: a part of an upload is 16
MiB, and a group may lack a chunk."""


@dataclass(frozen=True, slots=True)
class StreamLayout:
    """Where buffers lie, in the order given, and the stretches that make chunks."""

    offsets: tuple[int, ...]
    length: int
    bounds: tuple[int, ...]
    """Where chunks begin, and at the end the length."""

    def chunks(self) -> Iterator[tuple[int, int]]:
        """The start and end of each chunk."""
        return pairwise(self.bounds)


def lay_out(sizes: Sequence[int]) -> StreamLayout:
    """Place buffers one after the other; large ones begin on a page and with a chunk."""
    offsets = []
    bounds = [0]
    at = 0
    for size in sizes:
        large = size >= LARGE
        if large or (bounds[-1] < at and at + size - bounds[-1] > CHUNK):
            at = _aligned(at, PAGE)
            _cut(bounds, at)
        else:
            at = _aligned(at, ALIGNMENT)
        offsets.append(at)
        at += size
        if large:
            while at - bounds[-1] > CHUNK:
                _cut(bounds, bounds[-1] + CHUNK)
            at = _aligned(at, PAGE)
            _cut(bounds, at)
    _cut(bounds, at)
    return StreamLayout(tuple(offsets), at, tuple(bounds))


def packed(bounds: Sequence[int], size: int) -> Iterator[tuple[int, ...]]:
    """The bounds of as many whole chunks as fit ``size`` bytes, again and again."""
    some: list[int] = list(bounds[:1])
    for start, stop in pairwise(bounds):
        if len(some) > 1 and stop - some[0] > size:
            yield tuple(some)
            some = [start]
        some.append(stop)
    if len(some) > 1:
        yield tuple(some)


def grouped(bounds: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The bounds of the groups in a stretch of the stream; the stream's first one is small."""
    if bounds and bounds[0] == 0:
        for first in islice(packed(bounds, FIRST_GROUP), 1):
            yield first
            bounds = bounds[len(first) - 1 :]
    yield from packed(bounds, GROUP)


def _cut(bounds: list[int], at: int) -> None:
    if at > bounds[-1]:
        bounds.append(at)


def _aligned(at: int, to: int) -> int:
    return -(-at // to) * to
