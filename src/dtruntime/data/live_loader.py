"""A loader whose share follows the membership: what a lost worker left, others read at once.

The coordinator keeps a ledger of each epoch. A worker claims a little ahead of what it reads, and
commits what it has consumed. When a worker is lost, comes, or falls behind, the ledger begins a
new segment: everybody keeps what it claimed, and the rest is dealt anew, by the same pure
function on every worker. Nobody restarts and nobody waits for the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

from ..sharding import SlotTable
from ..sharding.coverage_digest import Digest
from ..types import check_flag, check_whole
from .batches import Batches, Output
from .columns import Block
from .iteration import LoaderBase
from .loader import prefetch_of, window_of
from .order import AffinityOrder, Lane, OrderPlan, Segment
from .prefetch import LaneReader, ShardFetcher
from .source import Source

WAIT_SECONDS = 5.0
"""How long the coordinator is asked to hold the call of a worker that has nothing to read.

What the worker offers counts for as long, should its machine vanish meanwhile.
"""

Offer = tuple[int, int, bytes]
"""A segment, a place in it, and the digest of what was handed out up to there."""


@dataclass(frozen=True, slots=True)
class ClaimOutcome:
    """The ledger's answer to a claim."""

    outcome: Literal["granted", "moved", "complete", "waiting"]
    slot: int = 0
    segments: tuple[Segment, ...] = ()
    """When moved: all of them; the last is current."""
    claimed: int = 0
    """When moved: what this worker has claimed in the current segment."""
    committed_segment: int = 0
    """When moved: where this worker committed last; 0: it has not claimed yet."""
    committed_position: int = 0
    committed_digest: bytes = b""


class ClaimLedger(Protocol):
    """The coordinator's account of who reads what."""

    def claim(
        self,
        epoch: int,
        plan: str,
        segment: int,
        upto: int,
        length: int,
        wait: float,
        offer: Offer | None = None,
    ) -> ClaimOutcome:
        """Take a lane of ``length`` samples up to a place.

        An ``offer`` is committed if the epoch becomes complete during the call.
        """

    def commit(self, epoch: int, segment: int, position: int, digest: bytes) -> None:
        """Say that what was taken up to a place is consumed for good."""


class _Stretch:
    """A worker's lane in one segment."""

    __slots__ = ("at", "lane", "number", "reader", "upto")

    def __init__(self, number: int, lane: Lane, at: int = 0, upto: int = 0) -> None:
        self.number = number
        self.lane = lane
        self.at = at
        """What was handed out."""
        self.upto = upto
        """What was claimed."""
        self.reader: LaneReader | None = None


class LiveLoader(LoaderBase):
    """Batches of the samples that this worker gets of each epoch, until all workers are through.

    Use it where workers are independent of each other between commits, as in inference,
    preprocessing or asynchronous training. What this worker was given counts for good when
    `commit` returns, and when the epoch is complete on all workers, which ends the iteration; if
    it dies before, others read it again. Waiting for the others at the end of its own samples is
    no commit, and `close` gives back nothing that was claimed.
    """

    def __init__(  # noqa: PLR0913
        self,
        source: Source,
        batch_size: int,
        *,
        ledger: ClaimLedger,
        shuffle: bool = True,
        seed: int = 0,
        epoch: int = 0,
        output: Output = "numpy",
        fill: Mapping[str, Any] | None = None,
        ragged: str | Mapping[str, str] = "error",
        decode: Callable[[dict[str, Any]], Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
        ids: bool = False,
        prefetch_shards: int | None = None,
        window: int | None = None,
    ) -> None:
        """The arguments are those of `Loader`; the order is affinity."""
        if not isinstance(source, Source):
            raise TypeError(f"a live loader reads a Source, not {type(source).__name__}")
        super().__init__()
        self._source = source
        self._batch = check_whole("batch_size", batch_size, 1)
        self._ledger = ledger
        self._batches = Batches(
            output, ids=ids, fill=fill, ragged=ragged, decode=decode, transform=transform
        )
        self._batches.check_columns(source.schema)
        self._plan = OrderPlan(
            order="affinity",
            samples=source.total,
            fingerprint=source.fingerprint,
            layout=source.layout,
            seed=check_whole("seed", seed, most=2**64 - 1),
            shuffle=check_flag("shuffle", shuffle),
            window=window_of(source, window),
            streams=1,
        )
        self._prefetch = prefetch_of(prefetch_shards, self._plan, source)
        self._plan_name = "/".join(map(str, msgspec.structs.astuple(self._plan)))
        self._table = SlotTable(len(source.starts) - 1, seed=self._plan.seed)
        self._committed: tuple[int, int] = (0, 0)
        self._goto(epoch)

    @property
    def epoch(self) -> int:
        """The epoch that is being read, or comes next."""
        return self._epoch

    @property
    def consumed(self) -> int:
        """How many samples of this epoch were handed out here."""
        return self._seen.count

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch; in it already, stay."""
        if check_whole("epoch", epoch) != self._epoch:
            self.close()
            self._goto(epoch)

    def __iter__(self) -> Iterator[Any]:
        """Batches until the epoch is complete, on all workers."""
        with self._begin() as iteration:
            fetcher = ShardFetcher(self._source, self._batches.assemble, self._prefetch)
            iteration.uses(fetcher)
            for stretch in self._stretches:
                stretch.reader = None
            yield from iteration.through(self._made(fetcher))
        self._watch.ended(self._epoch)
        self._goto(self._epoch + 1)

    def commit(self) -> None:
        """Count everything handed out as consumed for good."""
        place = self._place()
        if place is None:
            return
        if place != self._committed:
            self._ledger.commit(self._epoch, *place, self._seen.to_bytes())
            self._committed = place
        while self._stretches[0].number < place[0]:
            self._stretches.popleft()

    # Inside

    def _goto(self, epoch: int) -> None:
        self._epoch = check_whole("epoch", epoch)
        self._order: AffinityOrder | None = None
        self._seen = Digest(self._source.total)
        self._stretches: deque[_Stretch] = deque()
        self._committed = (0, 0)

    def _made(self, fetcher: ShardFetcher) -> Iterator[Any]:
        while True:
            with self._taking() as taken:
                block = self._take(fetcher, taken)
                if block is None:
                    return
                batch = self._batches.make(block, 0, None)
                self._seen.add(block.numbers)
            self._watch.handed_out(self._epoch, len(block))
            yield batch

    @contextmanager
    def _taking(self) -> Iterator[list[tuple[_Stretch, int]]]:
        """Go back to where each stretch was when there is no batch of what was read of it."""
        taken: list[tuple[_Stretch, int]] = []
        try:
            yield taken
        except BaseException:
            for stretch, at in reversed(taken):
                stretch.at = at
            raise

    def _take(self, fetcher: ShardFetcher, taken: list[tuple[_Stretch, int]]) -> Block | None:
        """The samples of the next batch; none when the epoch is complete.

        ``taken`` gets where each stretch was before it was read.
        """
        while True:
            blocks: list[Block] = []
            missing = self._batch
            while missing and (stretch := self._claimed()) is not None:
                taken.append((stretch, stretch.at))
                block = self._read(stretch, missing, fetcher)
                missing -= len(block)
                blocks.append(block)
            if blocks:
                return Block.concat(blocks)
            if self._is_over():
                return None

    def _read(self, stretch: _Stretch, count: int, fetcher: ShardFetcher) -> Block:
        if stretch.reader is None:
            stretch.reader = LaneReader(stretch.lane, fetcher, prefetch_shards=self._prefetch)
        stop = min(stretch.upto, stretch.at + count)
        block = stretch.reader.read(stretch.at, stop)
        stretch.at = stop
        return block

    def _claimed(self) -> _Stretch | None:
        """A stretch with samples that may be read; none when the lane is at its end."""
        while True:
            for stretch in self._stretches:
                if stretch.at < stretch.upto:
                    return stretch
            if not self._claim_more():
                return None

    def _claim_more(self) -> bool:
        if not self._stretches:
            return self._follow(self._ask(0, 0, 0))
        current = self._stretches[-1]
        length = len(current.lane)
        if current.upto == length:
            return False
        upto = current.lane.window_end(current.upto)
        answer = self._ask(current.number, upto, length)
        if answer.outcome == "granted":
            current.upto = upto
            return True
        return self._follow(answer)

    def _is_over(self) -> bool:
        """Wait for more to read; whether the epoch is complete."""
        if not self._stretches:
            return True
        current = self._stretches[-1]
        length = len(current.lane)
        question = self._epoch, self._plan_name, current.number, length, length
        answer = self._ledger.claim(*question, WAIT_SECONDS, self._offer())
        if answer.outcome == "complete":
            return True
        if answer.outcome == "granted":
            # A coordinator of an older version, which takes no offers and waits for a commit.
            self.commit()
        self._follow(answer)
        return False

    def _offer(self) -> Offer | None:
        """What was handed out, if not all of it is committed."""
        place = self._place()
        if place is None or place == self._committed:
            return None
        return (*place, self._seen.to_bytes())

    def _place(self) -> tuple[int, int] | None:
        """The segment and place up to which samples were handed out, if any were."""
        last = next((s for s in reversed(self._stretches) if s.at), None)
        return None if last is None else (last.number, last.at)

    def _ask(self, segment: int, upto: int, length: int) -> ClaimOutcome:
        return self._ledger.claim(self._epoch, self._plan_name, segment, upto, length, 0.0)

    def _follow(self, answer: ClaimOutcome) -> bool:
        """Go on in the current segment; whether there may be something to read in it."""
        if answer.outcome != "moved":
            return False
        first = not self._stretches
        current = len(answer.segments)
        if first and answer.committed_segment:
            self._go_back(answer)
        for stretch in self._stretches:
            if stretch.number < current:
                # A claim may have stood although its answer was that another segment has begun.
                stretch.upto = answer.segments[stretch.number - 1].consumed[answer.slot]
        if not self._stretches or self._stretches[-1].number < current:
            lane = self._lane(answer, current)
            self._stretches.append(_Stretch(current, lane, 0, answer.claimed))
        return True

    def _go_back(self, answer: ClaimOutcome) -> None:
        """Take up what this worker had claimed, from where it last committed."""
        self._seen = Digest(self._source.total, answer.committed_digest)
        start = answer.committed_position
        self._committed = answer.committed_segment, start
        for number in range(answer.committed_segment, len(answer.segments) + 1):
            taken = answer.segments[number - 1].consumed
            upto = taken[answer.slot] if number < len(answer.segments) else answer.claimed
            self._stretches.append(_Stretch(number, self._lane(answer, number), start, upto))
            start = 0

    def _lane(self, answer: ClaimOutcome, number: int) -> Lane:
        past, here = answer.segments[: number - 1], answer.segments[number - 1]
        if self._order is None:
            shuffle = self._plan.shuffle_in(self._epoch)
            self._order = AffinityOrder(self._table, self._source.starts, shuffle)
        return self._order.lanes(past, here)[answer.slot]
