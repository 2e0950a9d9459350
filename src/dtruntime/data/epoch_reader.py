"""What a rank reads of an epoch, for each kind of order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from ..errors import ShardError
from ..sharding import SlotTable
from .columns import Block
from .loader_state import LoaderState, OrderPlan
from .mixture import EndlessStrand, MixedStrand, Mixture, PlainStrand, Strand, check_sizes
from .order import AffinityOrder, GlobalOrder, Lane, Lanes, Segment, Shuffle, spans
from .prefetch import LaneReader, ShardFetcher
from .source import Source

Fetchers = Sequence[ShardFetcher]


@dataclass(frozen=True, slots=True)
class EpochPosition:
    """A position in an epoch."""

    epoch: int = 0
    position: int = 0
    past: tuple[Segment, ...] = ()
    """Stretches of the epoch with other members."""
    positions: tuple[int, ...] = ()
    """Where each rank is, when they are not all at ``position``."""

    def of(self, rank: int) -> int:
        """Where a rank is."""
        return self.positions[rank] if self.positions else self.position


@dataclass(frozen=True, slots=True)
class RankPortion:
    """Which part of the reading is this rank's, and in which portions."""

    rank: int
    world: int
    batch: int
    """Samples of all ranks in global order, of one in affinity order."""
    last: Last
    prefetch_shards: int


class Program(ABC):
    """What is read, from a place on."""

    def __init__(self, plan: OrderPlan, share: RankPortion) -> None:
        self._plan = plan
        self._share = share

    @abstractmethod
    def track(self, place: EpochPosition, fetchers: Fetchers = ()) -> Track:
        """This rank's steps; without fetchers they can only be counted."""

    @abstractmethod
    def place(self, state: LoaderState) -> EpochPosition:
        """Where a state says that the epoch is, for the ranks there are now."""

    @abstractmethod
    def consumed(self, state: LoaderState) -> int:
        """How many samples of the epoch all ranks had consumed."""

    def _shuffle(self, epoch: int) -> Shuffle:
        return Shuffle(self._plan.seed, epoch, self._plan.shuffle, self._plan.window)


class GlobalProgram(Program):
    """One sequence for all ranks."""

    def __init__(self, source: Source, plan: OrderPlan, share: RankPortion) -> None:
        super().__init__(plan, share)
        self._source = source
        self._order: tuple[int, GlobalOrder] | None = None

    def track(self, place: EpochPosition, fetchers: Fetchers = ()) -> Track:
        """This rank's part of every batch."""
        length, origin = self._extent(place.epoch)
        mine = max(1, self._plan.streams // self._share.world)
        ahead = -(-self._share.prefetch_shards // mine)

        def strand(number: int) -> Strand:
            return self._strand(place.epoch, number, fetchers, ahead)

        return GlobalTrack(
            strand,
            self._plan.streams,
            length=length,
            origin=origin,
            position=place.position,
            batch=self._share.batch,
            rank=self._share.rank,
            world=self._share.world,
            last=self._share.last,
        )

    def place(self, state: LoaderState) -> EpochPosition:
        """The same position, whatever the ranks."""
        length, _ = self._extent(state.epoch)
        if state.position > length:
            raise ShardError(
                f"the state is at sample {state.position} of an epoch that has {length}: it was "
                "changed or damaged. Load another one, or start afresh"
            )
        return EpochPosition(state.epoch, state.position)

    def consumed(self, state: LoaderState) -> int:
        """The position itself."""
        return state.position

    def _extent(self, epoch: int) -> tuple[int, int]:
        """How many samples an epoch has, and which of the run is its first."""
        return len(self._source), 0

    def _strand(self, epoch: int, number: int, fetchers: Fetchers, ahead: int) -> Strand:
        if self._order is None or self._order[0] != epoch:
            order = GlobalOrder(self._source.starts, self._shuffle(epoch), self._plan.streams)
            self._order = epoch, order
        return PlainStrand(self._order[1], number, fetchers[0], ahead)


class MixedProgram(GlobalProgram):
    """One sequence of several datasets."""

    def __init__(self, mixture: Mixture, plan: OrderPlan, share: RankPortion) -> None:
        super().__init__(mixture.sources[0], plan, share)
        check_sizes(mixture.names, [len(s) for s in mixture.sources], plan.streams)
        self._mixture = mixture

    def _extent(self, epoch: int) -> tuple[int, int]:
        return len(self._mixture), epoch * len(self._mixture)

    def _strand(self, epoch: int, number: int, fetchers: Fetchers, ahead: int) -> Strand:
        parts = [
            EndlessStrand(
                fetcher,
                replace(self._shuffle(0), seed=self._plan.seed + which),
                self._plan.streams,
                number,
                ahead,
            )
            for which, fetcher in enumerate(fetchers)
        ]
        mixture = self._mixture
        return MixedStrand(parts, mixture.quotas, mixture.offsets, self._plan.seed, number)


class AffinityProgram(Program):
    """Each rank its own shards."""

    def __init__(self, source: Source, plan: OrderPlan, share: RankPortion) -> None:
        super().__init__(plan, share)
        self._source = source
        self._table = SlotTable(len(source.starts) - 1, seed=plan.seed)
        self._order: tuple[int, AffinityOrder] | None = None
        self._dealt: tuple[tuple[tuple[Segment, ...], Segment], Lanes] | None = None
        """The lanes that were asked for last."""

    def track(self, place: EpochPosition, fetchers: Fetchers = ()) -> Track:
        """This rank's lane in batches."""

        def reader(lane: Lane, start: int) -> LaneReader:
            return LaneReader(lane, fetchers[0], start, prefetch_shards=self._share.prefetch_shards)

        lanes = self.lanes(place.epoch, place.past, Segment(self._share.world))
        return LaneTrack(
            reader,
            lanes[self._share.rank],
            lanes.lengths,
            self._share.rank,
            positions=place.of,
            batch=self._share.batch,
            last=self._share.last,
        )

    def lanes(self, epoch: int, past: Sequence[Segment], current: Segment) -> Lanes:
        """What each slot reads."""
        if self._order is None or self._order[0] != epoch:
            order = AffinityOrder(self._table, self._source.starts, self._shuffle(epoch))
            self._order, self._dealt = (epoch, order), None
        key = tuple(past), current
        if self._dealt is None or self._dealt[0] != key:
            self._dealt = key, self._order[1].lanes(past, current)
        return self._dealt[1]

    def place(self, state: LoaderState) -> EpochPosition:
        """The same lanes for as many ranks, else what is left dealt anew."""
        past = tuple(Segment(world, consumed=tuple(taken)) for world, taken in state.past)
        if state.world == self._share.world:
            return EpochPosition(state.epoch, state.position, past, state.positions)
        return EpochPosition(state.epoch, 0, (*past, _stretch(state)))

    def consumed(self, state: LoaderState) -> int:
        """What the stretches before have taken, and what each rank has in this one."""
        past = [Segment(world, consumed=tuple(taken)) for world, taken in state.past]
        here = _stretch(state)
        lengths = self.lanes(state.epoch, past, Segment(state.world)).lengths
        taken = sum(here.consumed_by(slot, length) for slot, length in lengths.items())
        return len(self._source) - sum(lengths.values()) + taken


def _stretch(state: LoaderState) -> Segment:
    """The state's own stretch of the epoch, ended where it is."""
    return Segment(state.world, consumed=state.positions or (state.position,))


Last = Literal["keep", "drop", "pad"]


class Step(NamedTuple):
    """What a rank gets in one step."""

    block: Block | None
    """``None``: nothing is left for this rank."""
    padding: int
    """How many samples have to be made up to fill the batch."""
    position: int
    """Where the epoch stands after it."""


class Track(ABC):
    """The steps of one rank."""

    steps: int
    """How many there are."""
    dropped: int
    """Samples of all ranks that no step has."""

    @abstractmethod
    def play(self, part: int = 0, parts: int = 1) -> Iterator[Step]:
        """Every ``parts``-th step, from the ``part``-th on."""


class GlobalTrack(Track):
    """A rank's part of every batch that the whole job reads."""

    def __init__(
        self,
        strand: Callable[[int], Strand],
        streams: int,
        *,
        length: int,
        origin: int,
        position: int,
        batch: int,
        rank: int,
        world: int,
        last: Last,
    ) -> None:
        """The epoch has ``length`` samples, the first of which is number ``origin`` of a run."""
        self._open = strand
        self._streams = streams
        self._length = length
        self._origin = origin
        self._position = position
        self._batch = batch
        self._rank = rank
        self._world = world
        self._last = last
        rest = max(0, length - position)
        self.steps = rest // batch if last == "drop" else -(-rest // batch)
        self.dropped = rest - self.steps * batch if last == "drop" else 0

    def play(self, part: int = 0, parts: int = 1) -> Iterator[Step]:
        """The steps."""
        strands: dict[int, Strand] = {}
        for number in range(part, self.steps, parts):
            start = self._position + number * self._batch
            stop = min(start + self._batch, self._length)
            blocks = []
            for strand, first, end in self._spans(start, stop):
                if strand not in strands:
                    strands[strand] = self._open(strand)
                blocks.append(strands[strand].read(first, end))
            block = Block.concat(blocks) if blocks else None
            yield Step(block, self._padding(block), stop)

    def _spans(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        begin, end = self._origin + start, self._origin + stop
        return [*spans(self._streams, begin, end, self._rank, self._world)]

    def _padding(self, block: Block | None) -> int:
        if self._last != "pad":
            return 0
        full = self._batch * (self._rank + 1) // self._world
        full -= self._batch * self._rank // self._world
        return full - (len(block) if block else 0)


class LaneTrack(Track):
    """A rank's own lane, in batches."""

    def __init__(
        self,
        reader: Callable[[Lane, int], LaneReader],
        lane: Lane,
        lengths: Mapping[int, int],
        rank: int,
        *,
        positions: Callable[[int], int],
        batch: int,
        last: Last,
    ) -> None:
        """``lengths`` are those of all ranks' lanes; ``positions`` says what each has consumed."""
        self._reader = reader
        self._lane = lane
        # Not cut off at the end of a short lane: one rank's position may stand for all ranks.
        self._position = positions(rank)
        self._batch = batch
        self._last = last
        rest = {slot: max(0, length - positions(slot)) for slot, length in lengths.items()}
        if last == "keep":
            self.steps = -(-rest[rank] // batch)
        elif last == "pad":
            self.steps = max(-(-left // batch) for left in rest.values())
        else:
            self.steps = min(left // batch for left in rest.values())
        dropping = last == "drop"
        self.dropped = sum(left - self.steps * batch for left in rest.values()) * dropping

    def play(self, part: int = 0, parts: int = 1) -> Iterator[Step]:
        """The steps."""
        reader = self._reader(self._lane, self._position)
        for number in range(part, self.steps, parts):
            start = self._position + number * self._batch
            stop = min(start + self._batch, len(self._lane))
            block = reader.read(start, stop) if start < stop else None
            missing = self._batch - (len(block) if block else 0)
            yield Step(block, missing * (self._last == "pad"), start + self._batch)
