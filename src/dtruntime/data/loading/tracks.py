"""One rank's batches of an epoch, from a position on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, NamedTuple

from ..columns import Block
from ..order.lanes import Lane
from ..order.sequence import spans
from ..prefetch import LaneReader
from .sequences import Strand

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
