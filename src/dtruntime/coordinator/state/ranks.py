"""Ranks of a job without memory for those that nobody holds.

A job may have tens of thousands of ranks before a single worker has come: what is kept of it
follows those who are there.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, MutableSet
from typing import Self

from .members import Member


class RankSet(MutableSet[int]):
    """A set of ranks, a bit for each; iterates in rising order."""

    __slots__ = ("_bits", "_count")

    def __init__(self, ranks: Iterable[int] = ()) -> None:
        highest = max((ranks := list(ranks)), default=-1)
        bits = bytearray(highest // 8 + 1)
        for rank in ranks:
            bits[rank >> 3] |= 1 << (rank & 7)
        self._bits = int.from_bytes(bits, "little")
        self._count = self._bits.bit_count()

    @classmethod
    def below(cls, count: int) -> Self:
        """All ranks below ``count``."""
        made = cls()
        made._bits, made._count = (1 << count) - 1, count
        return made

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, int) and bool(self._bits >> rank & 1)

    def __iter__(self) -> Iterator[int]:
        length = (self._bits.bit_length() + 7) // 8
        for place, bits in enumerate(self._bits.to_bytes(length, "little")):
            while bits:
                lowest = bits & -bits
                yield place * 8 + lowest.bit_length() - 1
                bits ^= lowest

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"RankSet({list(self)})"

    def add(self, rank: int) -> None:
        """Put a rank in."""
        if not self._bits >> rank & 1:
            self._bits |= 1 << rank
            self._count += 1

    def discard(self, rank: int) -> None:
        """Take a rank out, if it is in."""
        if self._bits >> rank & 1:
            self._bits ^= 1 << rank
            self._count -= 1

    def highest(self) -> int:
        """The highest rank; -1 where there is none."""
        return self._bits.bit_length() - 1

    def copy(self) -> RankSet:
        """One that can be changed without this one."""
        return self._made(self._bits)

    def without(self, ranks: Iterable[int]) -> RankSet:
        """The ranks that are not in ``ranks``."""
        return self._made(self._bits & ~_bits_of(ranks))

    def within(self, ranks: Iterable[int]) -> RankSet:
        """The ranks that are in ``ranks`` too."""
        return self._made(self._bits & _bits_of(ranks))

    def joined(self, ranks: Iterable[int]) -> RankSet:
        """These ranks and those of ``ranks``."""
        return self._made(self._bits | _bits_of(ranks))

    def _made(self, bits: int) -> RankSet:
        made = RankSet()
        made._bits, made._count = bits, bits.bit_count()
        return made


def _bits_of(ranks: Iterable[int]) -> int:
    return ranks._bits if isinstance(ranks, RankSet) else RankSet(ranks)._bits


class Slots:
    """The holders of a job's ranks; as long as there are ranks, as large as there are holders."""

    __slots__ = ("_holders", "_length", "_ranks")

    def __init__(self, length: int = 0) -> None:
        self._length = length
        self._holders: dict[int, Member] = {}
        self._ranks: list[int] = []
        """Those that are held, in rising order."""

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, rank: int) -> Member | None:
        if not 0 <= rank < self._length:
            raise IndexError(f"there is no rank {rank} among {self._length}")
        return self._holders.get(rank)

    def __setitem__(self, rank: int, holder: Member | None) -> None:
        known = rank in self._holders
        if holder is not None:
            self._holders[rank] = holder
            if not known:
                insort(self._ranks, rank)
        elif known:
            del self._holders[rank]
            del self._ranks[bisect_left(self._ranks, rank)]

    def __iter__(self) -> Iterator[Member | None]:
        return (self._holders.get(rank) for rank in range(self._length))

    def grow(self, length: int) -> None:
        """Have at least ``length`` ranks."""
        self._length = max(self._length, length)

    def held(self) -> list[Member]:
        """The holders by rank."""
        return [self._holders[rank] for rank in self._ranks]
