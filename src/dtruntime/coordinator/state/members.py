"""Members of a job, its ranks, and the members it has lost.

Memory is proportional to the members that there are, not to the ranks: a job may have tens of
thousands of ranks before the first worker registers.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator, Set

from ...types import Membership, WorkerState
from .commands import Heartbeat, Lost
from .records import ReportRecord, WorkerRecord, copied


class Member:
    """The current or last holder of a rank."""

    __slots__ = (
        "beat_at",
        "epoch",
        "heard",
        "incarnation",
        "last_seen",
        "live",
        "pulse",
        "rank",
        "record",
    )

    def __init__(self, record: WorkerRecord, heard: int, job: str, now: float) -> None:
        self.record = record
        self.rank = record.rank
        self.incarnation = record.incarnation
        self.live = record.membership == Membership.LIVE
        self.last_seen = now if self.live else record.heard_at or record.registered_at
        self.heard = heard
        """The job's next incarnation when it was last heard from: a logical clock."""
        self.pulse = _stored_pulse(record, job)
        self.beat_at = 0.0
        """When its last heartbeat came."""
        self.epoch: int | None = None

    @property
    def worker_id(self) -> str:
        """The name it registered under."""
        return self.record.worker_id

    @property
    def last_step(self) -> int | None:
        """The newest step it reported."""
        return self.pulse.step if self.pulse else None

    @property
    def last_report(self) -> ReportRecord | None:
        """Its last heartbeat, for its record."""
        pulse = self.pulse
        return copied(pulse, ReportRecord, message=pulse.report) if pulse else None

    @property
    def has_finished(self) -> bool:
        """Whether it left because it was done."""
        left = self.record.membership == Membership.LEFT
        return left and self.record.detail == WorkerState.FINISHED

    def knew(self, other: Member) -> bool:
        """Whether ``other`` was heard from while this member was registered."""
        return other.heard > self.incarnation


def _stored_pulse(record: WorkerRecord, job: str) -> Heartbeat | None:
    last = record.report
    if last is None:
        return None
    identity = {"worker_id": record.worker_id, "incarnation": record.incarnation}
    return copied(last, Heartbeat, job=job, report=last.message, **identity)


class RankSet(Set[int]):
    """A set of ranks as a bitmap; iterates in ascending order."""

    __slots__ = ("_bits",)

    def __init__(self, ranks: Iterable[int] = ()) -> None:
        highest = max((ranks := list(ranks)), default=-1)
        bits = bytearray(highest // 8 + 1)
        for rank in ranks:
            bits[rank >> 3] |= 1 << (rank & 7)
        self._bits = int.from_bytes(bits, "little")

    @classmethod
    def below(cls, count: int) -> RankSet:
        """All ranks below ``count``."""
        return cls._of((1 << count) - 1)

    @classmethod
    def _of(cls, bits: int) -> RankSet:
        ranks = cls()
        ranks._bits = bits
        return ranks

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
        return self._bits.bit_count()

    def add(self, rank: int) -> None:
        """Put a rank in."""
        self._bits |= 1 << rank

    def highest(self) -> int:
        """The highest rank; -1 where there is none."""
        return self._bits.bit_length() - 1

    def copy(self) -> RankSet:
        """An independent copy."""
        return self._of(self._bits)

    def difference(self, ranks: Iterable[int]) -> RankSet:
        """The ranks that are not in ``ranks``."""
        return self._of(self._bits & ~_bits_of(ranks))

    def intersection(self, ranks: Iterable[int]) -> RankSet:
        """The ranks that are in ``ranks`` too."""
        return self._of(self._bits & _bits_of(ranks))

    def union(self, ranks: Iterable[int]) -> RankSet:
        """These ranks and those of ``ranks``."""
        return self._of(self._bits | _bits_of(ranks))


def _bits_of(ranks: Iterable[int]) -> int:
    return ranks._bits if isinstance(ranks, RankSet) else RankSet(ranks)._bits


class Slots:
    """The holders of a job's ranks, as a sparse list."""

    __slots__ = ("_holders", "_length", "_ranks")

    def __init__(self, length: int = 0) -> None:
        self._length = length
        self._holders: dict[int, Member] = {}
        self._ranks: list[int] = []
        """The held ranks, ascending."""

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, rank: int) -> Member | None:
        if not 0 <= rank < self._length:
            raise IndexError(f"there is no rank {rank} among {self._length}")
        return self._holders.get(rank)

    def __setitem__(self, rank: int, holder: Member | None) -> None:
        held = rank in self._holders
        if holder is not None:
            self._holders[rank] = holder
            if not held:
                insort(self._ranks, rank)
        elif held:
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


LOSSES_KEPT = 256
TIMES_KEPT = 64


class MemberLosses:
    """The newest losses in order; of older ones only how recent they were."""

    def __init__(self, newest_generation: int, heard: int, lost_at: tuple[float, ...] = ()) -> None:
        self.newest_generation = newest_generation
        """The generation that the newest loss began."""
        self._kept: deque[Lost] = deque()
        self._forgotten_generation = newest_generation
        self._forgotten_heard: float = heard
        self._forgotten_why = "not known any more"
        self.times: deque[float] = deque(lost_at, maxlen=TIMES_KEPT)
        """When members were lost, but for those that left or went with their whole world."""

    def add(self, loss: Lost) -> None:
        """A member was lost."""
        self.newest_generation = loss.generation
        self._kept.append(loss)
        if len(self._kept) > LOSSES_KEPT:
            forgotten = self._kept.popleft()
            self._forgotten_generation = forgotten.generation
            self._forgotten_heard = max(self._forgotten_heard, forgotten.last_heard)

    def forget_state(self, generation: int) -> None:
        """A state of ``generation`` was lost: its members have lost each other."""
        if generation < self._forgotten_generation:
            return
        self.newest_generation = max(self.newest_generation, generation)
        self._forgotten_generation = generation
        self._forgotten_heard = math.inf
        self._forgotten_why = "the coordinator has lost its state"

    def since(self, generation: int, incarnation: int = 0, until: int | None = None) -> list[Lost]:
        """Losses after ``generation``, up to ``until``, of members that ``incarnation`` knew.

        A member that was last heard from before ``incarnation`` registered was never known to it.
        Forgotten losses count as known to everybody who could have known them.
        """
        if generation >= self.newest_generation:
            return []
        last = self.newest_generation if until is None else until
        losses = [
            loss
            for loss in self._kept
            if generation < loss.generation <= last and loss.last_heard > incarnation
        ]
        forgotten = min(self._forgotten_generation, last)
        if generation < forgotten and incarnation < self._forgotten_heard:
            losses.insert(0, Lost(forgotten, "", 0, self._forgotten_why))
        return losses
