"""The samples of an epoch that one rank reads, in order.

A rank reads an epoch in steps, one per batch. A step consists of a few *runs*: consecutive samples
of one stream (global order) or of the rank's own lane (affinity order).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..errors import ShardError
from ..sharding import SlotTable
from .columns import Block
from .loader_state import LoaderState
from .mixture import Mixture, MixtureReader
from .order import (
    AffinityOrder,
    Lane,
    Lanes,
    OrderPlan,
    SampleRun,
    Segment,
    global_lane,
    runs_of_rank,
    stream_bounds,
)
from .prefetch import LaneReader, ShardFetcher
from .source import Source

Fetchers = Sequence[ShardFetcher]
Last = Literal["keep", "drop", "pad"]


@dataclass(frozen=True, slots=True)
class EpochPosition:
    """A position in an epoch."""

    epoch: int = 0
    position: int = 0
    past: tuple[Segment, ...] = ()
    """Segments of the epoch with other members."""
    positions: tuple[int, ...] = ()
    """The position of each rank, when they are not all at ``position``."""

    def of(self, rank: int) -> int:
        """The position of a rank."""
        return self.positions[rank] if self.positions else self.position


@dataclass(frozen=True, slots=True)
class RankPortion:
    """The part of an epoch that one rank reads, and its batch size."""

    rank: int
    world: int
    batch: int
    """Samples of all ranks in global order, of one rank in affinity order."""
    last: Last
    prefetch_shards: int


class StepCount(NamedTuple):
    """What is left of an epoch."""

    steps: int
    dropped: int
    """Samples of all ranks that are in no step."""


class Step(NamedTuple):
    """The samples of a rank in one step."""

    block: Block | None
    """``None``: nothing is left for this rank."""
    padding: int
    """How many samples the batch lacks."""
    position: int
    """The position in the epoch after it."""


class EpochReader(ABC):
    """The samples that one rank reads of an epoch, from any position on."""

    def __init__(self, plan: OrderPlan, portion: RankPortion, full: int) -> None:
        """``full`` is the size of a full batch of this rank."""
        self._plan = plan
        self._portion = portion
        self._full = full

    def count(self, at: EpochPosition) -> StepCount:
        """How many steps this rank has left."""
        batch, last = self._portion.batch, self._portion.last
        left = self._left(at)
        if last == "drop":
            steps = min(samples // batch for samples in left.values())
            return StepCount(steps, sum(left.values()) - steps * batch * len(left))
        if last == "pad":
            return StepCount(max(-(-samples // batch) for samples in left.values()), 0)
        return StepCount(-(-left[self._portion.rank] // batch), 0)

    def read(
        self, at: EpochPosition, fetchers: Fetchers, part: int = 0, parts: int = 1
    ) -> Iterator[Step]:
        """Every ``parts``-th step from a position on, starting with step ``part``."""
        pads = self._portion.last == "pad"
        readers: dict[int, LaneReader | MixtureReader] = {}
        for runs, position in self._steps(at, range(part, self.count(at).steps, parts)):
            blocks = []
            for number, start, stop in runs:
                if number not in readers:
                    readers[number] = self._open(at, number, fetchers)
                blocks.append(readers[number].read(start, stop))
            block = Block.concat(blocks) if blocks else None
            padding = self._full - (len(block) if block else 0)
            yield Step(block, padding if pads else 0, position)

    @abstractmethod
    def resume(self, state: LoaderState) -> EpochPosition:
        """The position of a state, for the current number of ranks."""

    @abstractmethod
    def consumed(self, state: LoaderState) -> int:
        """How many samples of the epoch all ranks had consumed, by a state."""

    @abstractmethod
    def _left(self, at: EpochPosition) -> Mapping[int, int]:
        """The samples left, by rank; in global order those of all ranks, for this rank."""

    @abstractmethod
    def _steps(self, at: EpochPosition, numbers: range) -> Iterator[tuple[list[SampleRun], int]]:
        """The runs of some steps, counted from a position, and the position after each step."""

    @abstractmethod
    def _open(
        self, at: EpochPosition, number: int, fetchers: Fetchers
    ) -> LaneReader | MixtureReader:
        """A reader of the stream or lane with a number."""


class GlobalReader(EpochReader):
    """One sequence of batches for all ranks: each rank reads its part of every batch."""

    def __init__(self, source: Source | Mixture, plan: OrderPlan, portion: RankPortion) -> None:
        batch, rank, world = portion.batch, portion.rank, portion.world
        super().__init__(plan, portion, batch * (rank + 1) // world - batch * rank // world)
        if isinstance(source, Mixture):
            source.check_streams(plan.streams)
        self._source = source
        self._lane: tuple[int, Lane] | None = None

    def resume(self, state: LoaderState) -> EpochPosition:
        """The same position for any number of ranks."""
        if state.position > len(self._source):
            raise ShardError(
                f"the state is at sample {state.position} of an epoch that has "
                f"{len(self._source)}: it was changed or damaged. Load another one, or start over"
            )
        return EpochPosition(state.epoch, state.position)

    def consumed(self, state: LoaderState) -> int:
        """The position itself."""
        return state.position

    def _left(self, at: EpochPosition) -> Mapping[int, int]:
        return {self._portion.rank: max(0, len(self._source) - at.position)}

    def _steps(self, at: EpochPosition, numbers: range) -> Iterator[tuple[list[SampleRun], int]]:
        portion, length = self._portion, len(self._source)
        batch, rank, world = portion.batch, portion.rank, portion.world
        # The sequence of a mixture continues through all epochs.
        origin = at.epoch * length if isinstance(self._source, Mixture) else 0
        for number in numbers:
            start = at.position + number * batch
            stop = min(start + batch, length)
            runs = runs_of_rank(self._plan.streams, origin + start, origin + stop, rank, world)
            yield runs, stop

    def _open(
        self, at: EpochPosition, number: int, fetchers: Fetchers
    ) -> LaneReader | MixtureReader:
        streams_here = max(1, self._plan.streams // self._portion.world)
        prefetch = -(-self._portion.prefetch_shards // streams_here)
        if isinstance(self._source, Mixture):
            return MixtureReader(self._source, self._plan, number, fetchers, prefetch)
        if self._lane is None or self._lane[0] != at.epoch:
            lane = global_lane(self._source.starts, self._plan.shuffle_in(at.epoch))
            self._lane = at.epoch, lane
        lane = self._lane[1]
        bounds = stream_bounds(len(lane), self._plan.streams, number)
        return LaneReader(lane, fetchers[0], *bounds, prefetch)


class AffinityReader(EpochReader):
    """Each rank reads its own lane of shards."""

    def __init__(self, source: Source, plan: OrderPlan, portion: RankPortion) -> None:
        super().__init__(plan, portion, portion.batch)
        self._source = source
        self._table = SlotTable(len(source.starts) - 1, seed=plan.seed)
        self._order: tuple[int, AffinityOrder] | None = None

    def resume(self, state: LoaderState) -> EpochPosition:
        """The same lanes for the same number of ranks; otherwise the rest is divided anew."""
        past = _past(state)
        if state.world == self._portion.world:
            return EpochPosition(state.epoch, state.position, past, state.positions)
        return EpochPosition(state.epoch, 0, (*past, _last_segment(state)))

    def consumed(self, state: LoaderState) -> int:
        """What earlier segments consumed, and each rank in the last one."""
        last = _last_segment(state)
        lengths = self._lanes(state.epoch, _past(state), state.world).lengths
        taken = sum(last.consumed_by(slot, length) for slot, length in lengths.items())
        return len(self._source) - sum(lengths.values()) + taken

    def _left(self, at: EpochPosition) -> Mapping[int, int]:
        lengths = self._lanes(at.epoch, at.past, self._portion.world).lengths
        return {slot: max(0, length - at.of(slot)) for slot, length in lengths.items()}

    def _steps(self, at: EpochPosition, numbers: range) -> Iterator[tuple[list[SampleRun], int]]:
        rank, batch = self._portion.rank, self._portion.batch
        length = self._lanes(at.epoch, at.past, self._portion.world).lengths[rank]
        for number in numbers:
            # Not limited to the end of a short lane: one rank's position may stand for all ranks.
            start = at.of(rank) + number * batch
            runs = [SampleRun(rank, start, min(start + batch, length))] if start < length else []
            yield runs, start + batch

    def _open(self, at: EpochPosition, number: int, fetchers: Fetchers) -> LaneReader:
        lane = self._lanes(at.epoch, at.past, self._portion.world)[number]
        return LaneReader(lane, fetchers[0], prefetch_shards=self._portion.prefetch_shards)

    def _lanes(self, epoch: int, past: Sequence[Segment], world: int) -> Lanes:
        if self._order is None or self._order[0] != epoch:
            shuffle = self._plan.shuffle_in(epoch)
            self._order = epoch, AffinityOrder(self._table, self._source.starts, shuffle)
        return self._order[1].lanes(past, Segment(world))


def _past(state: LoaderState) -> tuple[Segment, ...]:
    return tuple(Segment(world, consumed=tuple(taken)) for world, taken in state.past)


def _last_segment(state: LoaderState) -> Segment:
    """The current segment of a state, ended at its position."""
    return Segment(state.world, consumed=state.positions or (state.position,))
