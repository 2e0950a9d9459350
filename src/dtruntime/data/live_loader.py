"""The live loader: its share follows the membership, so others read on for a lost worker.

The coordinator keeps a ledger of each epoch. A worker claims samples a little ahead of reading
them, and commits what it has consumed. When a worker is lost, joins, or falls behind, the ledger
begins a new segment: every worker keeps its claims, and the rest is assigned anew, by the same
pure function on every worker. Nobody restarts and nobody waits for the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

from ..sharding import SlotTable
from ..sharding.coverage_digest import Digest
from ..types import check_whole
from .batches import Batches, Output
from .columns import Block
from .iteration import LoaderBase
from .loader import order_plan, prefetch_of
from .order import AffinityOrder, Lane, Segment
from .prefetch import LaneReader, ShardFetcher
from .source import Source

WAIT_SECONDS = 5.0
"""How long the coordinator holds the call of a worker that has nothing to read.

An offer counts as long as the call is held, even if the worker's machine is lost meanwhile.
"""

Offer = tuple[int, int, bytes]
"""A segment, a position in it, and the digest of what was handed out up to there."""


@dataclass(frozen=True, slots=True)
class ClaimOutcome:
    """The ledger's answer to a claim."""

    outcome: Literal["granted", "moved", "complete", "waiting"]
    slot: int = 0
    segments: tuple[Segment, ...] = ()
    """When moved: all segments; the last is current."""
    claimed: int = 0
    """When moved: what this worker has claimed in the current segment."""
    committed_segment: int = 0
    """When moved: the segment of this worker's last commit; 0: it has not claimed yet."""
    committed_position: int = 0
    committed_digest: bytes = b""


class ClaimLedger(Protocol):
    """The coordinator's record of who reads what."""

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
        """Claim the samples of a lane of ``length`` up to a position.

        An ``offer`` is committed if the epoch becomes complete during the call.
        """

    def commit(self, epoch: int, segment: int, position: int, digest: bytes) -> None:
        """Record that the samples up to a position are consumed."""


class _Claim:
    """What this worker has claimed of its lane in one segment."""

    def __init__(self, segment: int, lane: Lane, at: int, upto: int) -> None:
        self.segment = segment
        self.lane = lane
        self.at = at
        """The position up to which samples were handed out."""
        self.read_upto = at
        self.upto = upto
        """The position up to which samples are claimed."""
        self.reader: LaneReader | None = None


class LiveLoader(LoaderBase):
    """Batches of this worker's share of each epoch, until all workers have finished.

    Use it where workers are independent of each other between commits, as in inference,
    preprocessing or asynchronous training. Samples count as consumed when `commit` returns, or
    when the epoch is complete on all workers, which ends the iteration; if the worker dies before,
    others read them again. Waiting for the others at the end of its own samples is not a commit,
    and `close` does not return claimed samples.
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
        self._plan = order_plan(
            source, "affinity", seed=seed, shuffle=shuffle, window=window, streams=1
        )
        self._prefetch = prefetch_of(prefetch_shards, self._plan, source)
        self._plan_name = "/".join(map(str, msgspec.structs.astuple(self._plan)))
        self._table = SlotTable(len(source.starts) - 1, seed=self._plan.seed)
        self._committed: tuple[int, int] = (0, 0)
        self._goto(epoch)

    @property
    def epoch(self) -> int:
        """The current epoch, or the next one."""
        return self._epoch

    @property
    def consumed(self) -> int:
        """How many samples of this epoch were handed out here."""
        return self._seen.count

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, unless the loader is already in it."""
        if check_whole("epoch", epoch) != self._epoch:
            self.close()
            self._goto(epoch)

    def __iter__(self) -> Iterator[Any]:
        """Batches until the epoch is complete, on all workers."""
        with self._begin() as iteration:
            fetcher = ShardFetcher(self._source, self._batches.assemble, self._prefetch)
            iteration.uses(fetcher)
            for claim in self._claims:
                # After an error, what was read without a batch being handed out is read again.
                claim.reader, claim.read_upto = None, claim.at
            yield from iteration.through(self._make_batches(fetcher))
        self._watch.ended(self._epoch)
        self._goto(self._epoch + 1)

    def commit(self) -> None:
        """Record everything handed out as consumed."""
        place = self._place()
        if place is None:
            return
        if place != self._committed:
            self._ledger.commit(self._epoch, *place, self._seen.to_bytes())
            self._committed = place
        while self._claims[0].segment < place[0]:
            self._claims.popleft()

    def _goto(self, epoch: int) -> None:
        self._epoch = check_whole("epoch", epoch)
        self._order: AffinityOrder | None = None
        self._seen = Digest(self._source.total)
        self._claims: deque[_Claim] = deque()
        self._committed = (0, 0)

    def _make_batches(self, fetcher: ShardFetcher) -> Iterator[Any]:
        while (block := self._take(fetcher)) is not None:
            batch = self._batches.make(block, 0, None)
            self._seen.add(block.numbers)
            for claim in self._claims:
                claim.at = claim.read_upto
            self._watch.handed_out(self._epoch, len(block))
            yield batch

    def _take(self, fetcher: ShardFetcher) -> Block | None:
        """The samples of the next batch; ``None`` when the epoch is complete."""
        while True:
            blocks: list[Block] = []
            missing = self._batch
            while missing and (claim := self._readable()) is not None:
                block = self._read(claim, missing, fetcher)
                missing -= len(block)
                blocks.append(block)
            if blocks:
                return Block.concat(blocks)
            if self._is_over():
                return None

    def _read(self, claim: _Claim, count: int, fetcher: ShardFetcher) -> Block:
        if claim.reader is None:
            claim.reader = LaneReader(claim.lane, fetcher, prefetch_shards=self._prefetch)
        start, stop = claim.read_upto, min(claim.upto, claim.read_upto + count)
        block = claim.reader.read(start, stop)
        claim.read_upto = stop
        return block

    def _readable(self) -> _Claim | None:
        """A claim with samples left to read; ``None`` when the lane is at its end."""
        while True:
            for claim in self._claims:
                if claim.read_upto < claim.upto:
                    return claim
            if not self._claim_more():
                return None

    def _claim_more(self) -> bool:
        if not self._claims:
            return self._follow(self._ask(0, 0, 0))
        current = self._claims[-1]
        length = len(current.lane)
        if current.upto == length:
            return False
        upto = current.lane.window_end(current.upto)
        answer = self._ask(current.segment, upto, length)
        if answer.outcome == "granted":
            current.upto = upto
            return True
        return self._follow(answer)

    def _is_over(self) -> bool:
        """Wait for more to read; whether the epoch is complete."""
        if not self._claims:
            return True
        current = self._claims[-1]
        length = len(current.lane)
        question = self._epoch, self._plan_name, current.segment, length, length
        answer = self._ledger.claim(*question, WAIT_SECONDS, self._offer())
        if answer.outcome == "complete":
            return True
        if answer.outcome == "granted":
            # A coordinator of an older version accepts no offers and waits for a commit.
            self.commit()
        self._follow(answer)
        return False

    def _offer(self) -> Offer | None:
        """What was handed out, unless all of it is committed."""
        place = self._place()
        if place is None or place == self._committed:
            return None
        return (*place, self._seen.to_bytes())

    def _place(self) -> tuple[int, int] | None:
        """The segment and position up to which samples were handed out, if any were."""
        last = next((claim for claim in reversed(self._claims) if claim.at), None)
        return None if last is None else (last.segment, last.at)

    def _ask(self, segment: int, upto: int, length: int) -> ClaimOutcome:
        return self._ledger.claim(self._epoch, self._plan_name, segment, upto, length, 0.0)

    def _follow(self, answer: ClaimOutcome) -> bool:
        """Continue in the current segment; whether it may have something to read."""
        if answer.outcome != "moved":
            return False
        first = not self._claims
        current = len(answer.segments)
        if first and answer.committed_segment:
            self._go_back(answer)
        for claim in self._claims:
            if claim.segment < current:
                # A claim may count although its answer was that another segment has begun.
                claim.upto = answer.segments[claim.segment - 1].consumed[answer.slot]
        if not self._claims or self._claims[-1].segment < current:
            lane = self._lane(answer, current)
            self._claims.append(_Claim(current, lane, 0, answer.claimed))
        return True

    def _go_back(self, answer: ClaimOutcome) -> None:
        """Resume what this worker had claimed, from its last commit."""
        self._seen = Digest(self._source.total, answer.committed_digest)
        start = answer.committed_position
        self._committed = answer.committed_segment, start
        for number in range(answer.committed_segment, len(answer.segments) + 1):
            consumed = answer.segments[number - 1].consumed
            upto = consumed[answer.slot] if number < len(answer.segments) else answer.claimed
            self._claims.append(_Claim(number, self._lane(answer, number), start, upto))
            start = 0

    def _lane(self, answer: ClaimOutcome, number: int) -> Lane:
        past, here = answer.segments[: number - 1], answer.segments[number - 1]
        if self._order is None:
            shuffle = self._plan.shuffle_in(self._epoch)
            self._order = AffinityOrder(self._table, self._source.starts, shuffle)
        return self._order.lanes(past, here)[answer.slot]
