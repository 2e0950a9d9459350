"""The loader: batches of a dataset, each sample exactly once per epoch, resumable anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from .._background import Ahead
from ..config import Config
from ..errors import ShardError
from ..sharding.coverage_digest import Digest
from ..sharding.hashing import fold
from ..types import check_flag, check_whole
from .batches import Batches, Output
from .columns import Block
from .epoch_reader import (
    AffinityReader,
    EpochPosition,
    EpochReader,
    GlobalReader,
    Last,
    RankPortion,
    Step,
)
from .index import DatasetIndex
from .iteration import Iteration, LoaderBase
from .loader_state import LoaderState, pack, unpack
from .mixture import ORIGIN, Mixture
from .order import DEFAULT_WINDOW, OrderPlan
from .prefetch import ShardFetcher
from .source import FileSource, Source

Ints = NDArray[np.int64]
T = TypeVar("T")

ORDERS = ("global", "affinity")
LASTS = ("keep", "drop", "pad")
WINDOW_BYTES = 256 * 2**20
"""The most bytes of files in a shuffle window, by default."""
PREFETCH_BYTES = 32 * 2**20
PREFETCH_SMALL = 24
"""How many small shards are prefetched by default, within `PREFETCH_BYTES` of files."""
BATCHES_AHEAD = 2
DIGEST_EVERY = 1 << 16
"""How many samples are added to a digest at once, which makes each one cheaper."""


class Delivery(NamedTuple):
    """A step of one rank."""

    batch: Any
    """``None``: the step has no samples of this rank."""
    position: int
    """The position in the epoch after it."""
    numbers: Ints
    """The numbers of its samples."""
    row_shapes: Mapping[str, tuple[int, ...]]
    """The shapes of list rows, which must be the same in all steps."""


@dataclass(frozen=True, slots=True)
class Consumption:
    """What a rank has consumed of an epoch."""

    epoch: int
    world_size: int
    base: Digest
    """What all ranks had consumed when the epoch was resumed."""
    seen: Digest
    """What this rank has consumed since."""
    assumed: int
    """Samples consumed earlier, by the position, that are not in ``base``."""
    dropped: int
    """Samples that all ranks leave out at the end of the epoch."""
    expected: int
    """The number of samples of the epoch."""
    ended: bool = False
    """Whether this rank has finished its part."""


class Progress(Protocol):
    """Receives what a loader has consumed."""

    def resumed(self) -> None:
        """A state was loaded: another attempt at the epoch begins."""

    def report(self, consumed: Consumption) -> None:
        """Report everything that was handed out."""


class Loader(LoaderBase):
    """Batches of one rank.

    Iterating continues from the loader's position to the end of its epoch; iterating again gives
    the next epoch. Batches that were handed out are consumed, prefetched ones are not.
    `state_dict` is the position between two batches, and `load_state_dict` continues from it with
    any number of ranks, loader processes and samples per batch.
    """

    def __init__(  # noqa: PLR0913
        self,
        source: Source | DatasetIndex | Mixture,
        batch_size: int | None = None,
        *,
        global_batch_size: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        order: str = "global",
        shuffle: bool = True,
        seed: int = 0,
        last: Last = "keep",
        output: Output = "numpy",
        fill: Mapping[str, Any] | None = None,
        ragged: str | Mapping[str, str] = "error",
        decode: Callable[[dict[str, Any]], Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
        ids: bool = False,
        prefetch_shards: int | None = None,
        window: int | None = None,
        streams: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Nothing is read before the first batch is requested.

        - ``source``: files as a `FileSource` (columns, shard size, samples to skip), an index,
          or a `Mixture`.
        - ``batch_size`` is the number of samples per rank, ``global_batch_size`` that of all ranks.
        - ``order``: ``global`` is one sequence of batches for the whole job, which any number of
          ranks can continue; ``affinity`` keeps each rank on the same shards in every epoch.
        - ``last``: ``keep`` hands out every sample, ``drop`` leaves out an incomplete batch,
          ``pad`` fills it up with copies, marked by ``False`` in the column ``__valid__``.
          With ``drop`` and ``pad`` all ranks have the same number of steps and batch size.
        - ``output``: ``numpy``, ``torch`` or ``jax`` give a dict of arrays, ``arrow`` a table.
        - ``decode`` is called with every sample, ``transform`` with every batch, both in a
          background thread. ``fill`` replaces missing values by column. ``ids`` adds the
          samples' numbers as ``__id__``.
        - ``ragged``: lists of the same length become rows of one array. Where lengths differ, it
          decides for all columns or by column: ``error``, ``pad`` (to the longest list of the
          batch, with a column ``NAME__mask`` that is true for values), ``nested`` (torch), or
          ``list`` (an array for each sample).
        - ``prefetch_shards`` are read ahead (by default as many as are shuffled together, more of
          small ones), ``window`` shards are shuffled together, ``streams`` is the number of places
          at which the sequence is read concurrently (by default ``world_size``, after a resume
          that of the state: pass a number to get the same batches at any world size).
        """
        super().__init__()
        self._source = FileSource(source) if isinstance(source, DatasetIndex) else source
        if not isinstance(self._source, Source | Mixture):
            raise TypeError(
                f"a loader reads a Source, a DatasetIndex or a Mixture, not {type(source).__name__}"
                ": FileSource(build_index(path, format)) has samples of files, NumberSource(count) "
                "numbers alone"
            )
        self.rank = check_whole("rank", rank)
        self.world_size = check_whole("world_size", world_size, 1)
        if self.rank >= self.world_size:
            raise ValueError(f"rank {rank} is not one of {world_size} ranks")
        for name, value, choices in (("order", order, ORDERS), ("last", last, LASTS)):
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
        self._batches = Batches(
            output,
            ids=ids,
            pad=last == "pad",
            fill=fill,
            ragged=ragged,
            decode=decode,
            transform=transform,
        )
        self._batches.check_columns(self._source.sources[0].schema)
        self._plan = order_plan(
            self._source,
            order,
            seed=seed,
            shuffle=shuffle,
            window=window,
            streams=self.world_size if streams is None else streams,
        )
        self._has_streams = streams is not None
        self._portion = RankPortion(
            self.rank,
            self.world_size,
            _batch(batch_size, global_batch_size, self.world_size, order),
            last,
            prefetch_of(prefetch_shards, self._plan, self._source),
        )
        self._reader = self._make_reader(self._plan)
        self._progress = progress
        self._place, self._position = EpochPosition(), 0
        self._goto(self._place)

    @property
    def epoch(self) -> int:
        """The current epoch, or the next one."""
        return self._place.epoch

    @property
    def position(self) -> int:
        """Samples consumed of this epoch: by all ranks in global order, else by this one."""
        return self._position

    def __len__(self) -> int:
        """How many steps are left in this epoch."""
        return self._reader.count(self._here()).steps

    @property
    def steps_per_epoch(self) -> int:
        """How many steps a whole epoch has with this batch size and number of ranks."""
        return self._reader.count(EpochPosition(self.epoch)).steps

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, unless the loader is already in it."""
        if check_whole("epoch", epoch) != self.epoch:
            self.close()
            self._goto(EpochPosition(epoch))

    def restart(self) -> None:
        """Go back to the start of the epoch."""
        self.close()
        self._goto(EpochPosition(self.epoch))

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch handed out: under 4 KB of JSON."""
        return LoaderState(
            plan=self._plan,
            epoch=self.epoch,
            position=self.position,
            world=self.world_size,
            rank=self.rank,
            past=tuple((part.slot_count, list(part.consumed)) for part in self._place.past),
            base=pack(self._base),
            seen=pack(self._digest()),
            assumed=self._assumed,
        ).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of this rank, any rank, or all ranks (`merge_states`).

        Raises ``ShardError`` when the state is of other data or of another order, ``ValueError``
        when it is not a state; the loader's position is then unchanged.
        """
        loaded = LoaderState.of(state)
        self._check_plan(loaded.plan)
        reader = self._make_reader(loaded.plan)
        place, consumed = reader.resume(loaded), reader.consumed(loaded)
        base = unpack(loaded.base, loaded.plan.samples)
        seen = unpack(loaded.seen, loaded.plan.samples)
        self.close()
        self._plan, self._reader = loaded.plan, reader
        self._goto(place)
        self._base = base
        if loaded.world == self.world_size == 1:
            self._seen = seen
        # The digest of one of several ranks says nothing about the others.
        self._assumed = consumed - self._base.count - self._seen.count
        if self._progress is not None:
            self._progress.resumed()

    get_state = state_dict
    set_state = load_state_dict

    def __iter__(self) -> Iterator[Any]:
        """Batches up to the end of the epoch."""
        for step in self.deliveries():
            self.accept(step)
            if step.batch is not None:
                yield step.batch
        self.end_epoch()

    def deliveries(
        self,
        part: int = 0,
        parts: int = 1,
        skip: int = 0,
        before: Callable[[int], None] | None = None,
    ) -> Iterator[Delivery]:
        """Every ``parts``-th of the following steps, without recording them as consumed.

        For loader processes, whose steps the training process has to `accept` one by one, in the
        order of their positions, before it calls `end_epoch`. ``skip`` leaves out the first ones.
        ``before`` is called in the thread that makes a batch, with a number that depends on the
        seed, epoch, rank and position alone.
        """
        with self._begin() as iteration:
            steps = self._read_steps(iteration, part + skip * parts, parts)
            deliveries = self._deliveries(steps, before)
            if self._batches.runs_user_code:
                ahead = iteration.uses(Ahead(deliveries, BATCHES_AHEAD, "strata-batches"))
                deliveries = iter(ahead)
            yield from iteration.through(deliveries)

    def through(self, items: Iterable[T]) -> Iterator[T]:
        """Items made by other processes, as the newest iteration of this loader."""
        with self._begin() as iteration:
            yield from iteration.through(items)

    def accept(self, step: Delivery) -> None:
        """Record that a step was handed out.

        Raises ``ShardError`` when list rows have other lengths than those of earlier steps, which
        loader processes by themselves cannot see.
        """
        self._batches.check_row_shapes(step.row_shapes)
        self._position = step.position
        self._count(step.numbers)
        self._watch.handed_out(self.epoch, len(step.numbers))

    def end_epoch(self) -> None:
        """Report the epoch as consumed, and go to the next one."""
        self._report(ended=True)
        self._watch.ended(self.epoch)
        self._goto(EpochPosition(self.epoch + 1))

    def commit(self) -> None:
        """Report what was handed out as consumed, if there is a coordinator."""
        self._report(ended=False)

    def _report(self, *, ended: bool) -> None:
        if self._progress is None:
            return
        steps, dropped = self._reader.count(self._here())
        self._progress.report(
            Consumption(
                epoch=self.epoch,
                world_size=self.world_size,
                base=self._base,
                seen=self._digest(),
                assumed=self._assumed,
                dropped=0 if steps else dropped,
                expected=len(self._source),
                ended=ended,
            )
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_progress": None}

    def _read_steps(self, iteration: Iteration, part: int, parts: int) -> Iterator[Step]:
        prefetch = self._portion.prefetch_shards
        fetchers = [
            iteration.uses(ShardFetcher(source, self._batches.assemble, prefetch))
            for source in self._source.sources
        ]
        return self._reader.read(self._here(), fetchers, part, parts)

    def _deliveries(
        self, steps: Iterator[Step], before: Callable[[int], None] | None
    ) -> Iterator[Delivery]:
        filler: Block | None = None
        for block, padding, position in steps:
            if block is None and padding:
                filler = filler or self._any_sample()
                block = filler.slice(0, 0)
            if block is None:
                yield Delivery(None, position, np.empty(0, np.int64), {})
                continue
            if before is not None:
                before(fold(self._plan.seed, self.epoch, self.rank, position))
            batch = self._batches.make(block, padding, filler)
            shapes = self._batches.row_shapes(block)
            yield Delivery(batch, position, block.numbers, shapes)
            filler = block if len(block) else filler

    def example(self) -> Any:
        """A batch of one sample, as an example; it does not count as consumed."""
        return self._batches.make(self._any_sample(), 0, None)

    def without_samples(self, batch: Any) -> Any:
        """A batch in the form of ``batch``, which this loader made, without samples."""
        return self._batches.without_samples(batch)

    def _any_sample(self) -> Block:
        source = self._source.sources[0]
        shard = int(np.argmax(np.diff(source.starts) > 0))
        first = np.zeros(1, np.int64)
        block = self._batches.assemble([source.read(shard)], slice(0, 1), first)
        if isinstance(self._source, Mixture):
            block.columns[ORIGIN] = first
        return block

    def _make_reader(self, plan: OrderPlan) -> EpochReader:
        if plan.order == "global":
            return GlobalReader(self._source, plan, self._portion)
        if isinstance(self._source, Mixture):
            raise ValueError("a mixture can only be read in global order")
        return AffinityReader(self._source, plan, self._portion)

    def _check_plan(self, plan: OrderPlan) -> None:
        if self._plan.fingerprint != plan.fingerprint:
            raise ShardError(
                f"the state belongs to other data: its files had the fingerprint "
                f"{plan.fingerprint}, these have {self._plan.fingerprint}, so its position is not "
                "valid here. Load the data that it was saved with, or start from the beginning"
            )
        own = self._plan
        if not self._has_streams:
            own = msgspec.structs.replace(own, streams=plan.streams)
        if own != plan:
            raise ShardError(
                f"the state belongs to another order ({plan.difference(own)}): create the loader "
                "with the options of the state"
            )

    def _here(self) -> EpochPosition:
        """The current position, for all ranks as far as this one knows."""
        if self._position == self._place.of(self.rank):
            return self._place
        return replace(self._place, position=self._position, positions=())

    def _goto(self, place: EpochPosition) -> None:
        self._place = place
        self._position = place.of(self.rank)
        self._base, self._seen = Digest(self._plan.samples), Digest(self._plan.samples)
        self._assumed = 0
        self._uncounted: list[Ints] = []
        self._uncounted_samples = 0

    def _count(self, numbers: Ints) -> None:
        self._uncounted.append(numbers)
        self._uncounted_samples += len(numbers)
        if self._uncounted_samples >= DIGEST_EVERY:
            self._digest()

    def _digest(self) -> Digest:
        if self._uncounted:
            self._seen.add(np.concatenate(self._uncounted))
            self._uncounted, self._uncounted_samples = [], 0
        return self._seen


def _batch(one: int | None, all_ranks: int | None, world: int, order: str) -> int:
    """The samples per step: of all ranks in global order, of one in affinity order."""
    if (one is None) == (all_ranks is None):
        raise ValueError("pass either batch_size or global_batch_size")
    if one is not None:
        size = check_whole("batch_size", one, 1)
        return size * world if order == "global" else size
    size = check_whole("global_batch_size", all_ranks, 1)
    if order == "global" and size >= world:
        return size
    if size % world:
        raise ValueError(f"a global_batch_size of {size} cannot be divided by {world} ranks")
    return size // world


def order_plan(
    source: Source | Mixture,
    order: str,
    *,
    seed: int,
    shuffle: bool,
    window: int | None,
    streams: int,
) -> OrderPlan:
    """The order of a source; without ``window``, as many shards as are not too large."""
    if window is None:
        window = max(1, min(DEFAULT_WINDOW, WINDOW_BYTES // max(1, source.mean_shard_bytes)))
    return OrderPlan(
        order=order,
        samples=source.total,
        fingerprint=source.fingerprint,
        layout=source.layout,
        seed=check_whole("seed", seed, most=2**64 - 1),
        shuffle=check_flag("shuffle", shuffle),
        window=check_whole("window", window, 1),
        streams=check_whole("streams", streams, 1),
    )


def prefetch_of(shards: int | None, plan: OrderPlan, source: Source | Mixture) -> int:
    """How many shards to prefetch: enough for the next window, and more of small shards, so that
    reading threads do not wait for the one that assembles blocks."""
    if shards is not None:
        return check_whole("prefetch_shards", shards)
    small = min(PREFETCH_SMALL, PREFETCH_BYTES // max(1, source.mean_shard_bytes))
    return max(Config.load().dataset.prefetch_shards, plan.window if plan.shuffle else 0, small)
