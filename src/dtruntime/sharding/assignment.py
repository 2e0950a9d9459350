"""Assignment of shards and files to slots, for any set of live slots."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from functools import cached_property, partial
from operator import index as as_int
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dtruntime.errors import ShardError

from .hashing import WORD, fold, mix_array

Ints = NDArray[np.int64]
Slots = NDArray[np.int32]
Hashes = NDArray[np.uint64]

MAX_COUNT = (1 << 31) - 1
_REMEMBERED = 4
_LARGE = 1 << 20
"""A table with more shards remembers only the last membership, and no lists."""
_FEW_SLOTS = 32
SLICE = 1 << 17
"""How many shards are gathered in one numpy call, during which other threads wait."""
_FREE_ROUNDS = 8
_STEP = 0xD1342543DE82EF95


class Membership(NamedTuple):
    """The slots that share a dataset: ``slot_count`` in all, less the dead.

    ``weights`` has one positive integer for each slot, dead or live; without it all are equal.
    """

    slot_count: int
    dead: Collection[int] = ()
    weights: Sequence[int] | None = None

    def normalised(self) -> Membership:
        """Return the same membership checked, hashable and without dead slots at its end.

        Raises ``ValueError`` or ``TypeError`` for an impossible membership, ``ShardError`` when
        every slot is dead.
        """
        slot_count = as_int(self.slot_count)
        if not 1 <= slot_count <= MAX_COUNT:
            raise ValueError(f"slot_count must be from 1 to {MAX_COUNT}, not {slot_count}")
        dead = _checked_dead(self.dead, slot_count)
        weights = None if self.weights is None else _checked_weights(self.weights, slot_count)
        while slot_count - 1 in dead:
            slot_count -= 1
        return Membership(
            slot_count,
            frozenset(slot for slot in dead if slot < slot_count),
            weights and weights[:slot_count],
        )

    def bounds(self, shard_count: int) -> tuple[Ints, Ints]:
        """Return each slot's exact share of ``shard_count`` shards, rounded down and up."""
        shares = np.ones(self.slot_count, dtype=np.int64)
        if self.weights is not None:
            shares[:] = self.weights
        shares[list(self.dead)] = 0
        least, rest = np.divmod(shard_count * shares, shares.sum())
        return least, least + (rest > 0)


def _checked_dead(dead: Collection[int], slot_count: int) -> frozenset[int]:
    checked = frozenset(as_int(slot) for slot in dead)
    if checked and not 0 <= min(checked) <= max(checked) < slot_count:
        raise ValueError(
            f"dead slots {min(checked)}..{max(checked)} reach outside the {slot_count} slots"
        )
    if len(checked) == slot_count:
        raise ShardError(
            f"all {slot_count} slots are dead, so none can own a shard: let a worker join first"
        )
    return checked


def _checked_weights(weights: Sequence[int], slot_count: int) -> tuple[int, ...]:
    checked = tuple(as_int(weight) for weight in weights)
    if len(checked) != slot_count:
        raise ValueError(f"{slot_count} slots need as many weights, not {len(checked)}")
    if not 1 <= min(checked) <= max(checked) <= MAX_COUNT:
        raise ValueError(
            f"weights must be from 1 to {MAX_COUNT}, not {min(checked)}..{max(checked)}"
        )
    return checked


def assign_with_room(hashes: Hashes, loads: Ints, least: Ints, most: Ints) -> Ints:
    """Return a slot for each hash: slots fill up to ``least`` first, then up to ``most``.

    ``loads`` is what each slot already holds. Together the slots must have enough room.
    """
    slots = _bid(hashes, np.maximum(least - loads, 0))
    left = np.flatnonzero(slots < 0)
    loads = loads + np.bincount(slots[slots >= 0], minlength=loads.size)
    slots[left] = _bid(hashes[left], most - loads)
    return slots


def _bid(hashes: Hashes, room: Ints) -> Ints:
    """Return a slot with room for each hash, earlier hashes first; -1 where room ran out.

    Each hash chooses pseudo-randomly. Its choice hardly depends on which other slots exist or have
    room, so a change of room disturbs few bids.
    """

    def choose(bidders: Ints, room: Ints, number: int) -> Ints:
        step = np.uint64(number * _STEP & WORD)
        draws = mix_array(hashes[bidders] + step)
        free = number < _FREE_ROUNDS
        return _any_slot(draws, room) if free else _open_slot(draws, room, step)

    return assign_in_rounds(hashes.size, room, choose)


def assign_in_rounds(count: int, room: Ints, choose: Callable[[Ints, Ints, int], Ints]) -> Ints:
    """Return a slot for each of ``count`` bidders, earlier ones first; -1 where room ran out.

    In each round, ``choose`` returns a slot for each remaining bidder, or -1, given the room that
    is left and the number of the round.
    """
    slots = np.full(count, -1, dtype=np.int64)
    bidders = np.arange(count)
    room = room.copy()
    for number in itertools.count():
        if not bidders.size or not room.any():
            break
        choices = choose(bidders, room, number)
        winning = _winners(choices, room)
        won = choices[winning]
        slots[bidders[winning]] = won
        room -= np.bincount(won, minlength=room.size)
        bidders = np.delete(bidders, winning)
    return slots


def _any_slot(draws: Hashes, room: Ints) -> Ints:
    """Return the slot of each draw, -1 when that slot does not exist or is full.

    Drawing from a power of two keeps nearly all choices when the number of slots changes.
    """
    mask = np.uint64((1 << (room.size - 1).bit_length()) - 1)
    choices = (draws & mask).astype(np.int64)
    choices[choices >= room.size] = -1
    choices[room[choices] == 0] = -1
    return choices


def _open_slot(draws: Hashes, room: Ints, step: np.uint64) -> Ints:
    """Return a slot with room for each draw: the next one on a ring of those slots."""
    slots = np.flatnonzero(room)
    points = mix_array(mix_array(slots.astype(np.uint64)) + step)
    around = np.argsort(points)
    nearest = np.searchsorted(points[around], draws) % slots.size
    return slots[around[nearest]]


def _winners(choices: Ints, room: Ints) -> Ints:
    """Return which bids succeed: the first ones for each slot, as many as it has room for.

    A choice of -1 is no bid.
    """
    bids = np.flatnonzero(choices >= 0)
    bids = bids[np.argsort(choices[bids], kind="stable")]
    slots = choices[bids]
    first = np.flatnonzero(np.diff(slots, prepend=-1))
    rank = np.arange(bids.size) - np.repeat(first, np.diff(first, append=bids.size))
    return bids[rank < room[slots]]


T = TypeVar("T")


class _Recent(OrderedDict[Membership, T]):
    """What was computed for the last few memberships."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def recall(self, key: Membership, compute: Callable[[], T]) -> T:
        if key not in self:
            self[key] = compute()
            while len(self) > self._limit:
                self.popitem(last=False)
        self.move_to_end(key)
        return self[key]


class SlotTable:
    """Assigns ``shard_count`` shards to slots, evenly and with few moves when slots change.

    The same ``shard_count``, ``seed`` and membership give the same owners everywhere. For any
    membership,

    - the live slots' loads differ by at most 1;
    - a slot that joins at the end, with no holes, takes its share and moves nothing else;
    - a slot that dies while all others live loses its shards and moves nothing else;
    - a replacement in that hole brings back the owners from before the death.

    With several holes, a death or a replacement may also move shards from other holes: 1.0 to
    1.5 times the fewest possible moves is usual. Dead slots at the end count as never joined.

    With ``weights``, each slot's load is its exact share rounded down or up, and a slot that
    joins, dies or changes weight moves a small multiple of the shards that must move.

    Keep one table per dataset: it caches the last few memberships, and the lists that make any
    other one cheap; with over a million shards only the last membership. Thread-safe.
    """

    def __init__(self, shard_count: int, *, seed: int = 0) -> None:
        self.shard_count = as_int(shard_count)
        self.seed = as_int(seed)
        if not 0 <= self.shard_count <= MAX_COUNT:
            raise ValueError(f"shard_count must be from 0 to {MAX_COUNT}, not {shard_count}")
        self._chain = Chain(self.shard_count, self.seed)
        self._bid_key = np.uint64(fold(self.seed, 1))
        self._recent = _Recent[_Assignment](_REMEMBERED if self.shard_count <= _LARGE else 1)
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"SlotTable({self.shard_count}, seed={self.seed})"

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(SlotTable, seed=self.seed), (self.shard_count,)

    def owners(
        self, slot_count: int, dead: Collection[int] = (), weights: Sequence[int] | None = None
    ) -> Slots:
        """Return the slot of every shard, as a read-only array.

        Raises ``ShardError`` when every slot is dead.
        """
        return self._assignment(Membership(slot_count, dead, weights)).owners

    def shards_of(
        self,
        slot: int,
        slot_count: int,
        dead: Collection[int] = (),
        weights: Sequence[int] | None = None,
    ) -> Ints:
        """Return the shards of ``slot`` in rising order: none when it is dead.

        Takes time proportional to the result when the membership is one of the last few.
        """
        slot = as_int(slot)
        if not 0 <= slot < slot_count:
            raise ValueError(f"slot {slot} is not one of the {slot_count} slots")
        return self._assignment(Membership(slot_count, dead, weights)).shards_of(slot)

    def load_of(
        self,
        slot: int,
        slot_count: int,
        dead: Collection[int] = (),
        weights: Sequence[int] | None = None,
    ) -> int:
        """Return how many shards ``slot`` has, without listing them."""
        return len(self._assignment(Membership(slot_count, dead, weights)).part(slot))

    def shard_at(
        self,
        position: int,
        slot: int,
        slot_count: int,
        dead: Collection[int] = (),
        weights: Sequence[int] | None = None,
    ) -> int:
        """Return one of the shards of ``slot``, by its place among them in rising order."""
        assignment = self._assignment(Membership(slot_count, dead, weights))
        return assignment.shard_at(slot, position)

    def moves(
        self,
        before: Membership | tuple[int, Collection[int]],
        after: Membership | tuple[int, Collection[int]],
    ) -> Ints:
        """Return the shards, in rising order, whose slot differs between two memberships."""
        return np.flatnonzero(self.owners(*before) != self.owners(*after))

    def _assignment(self, membership: Membership) -> _Assignment:
        key = membership.normalised()
        with self._lock:
            assignment = self._recall(key)
            if self.shard_count > _LARGE:
                # Its lists take more memory than the time they save is worth.
                self._chain = Chain(self.shard_count, self.seed)
            return assignment

    def _recall(self, key: Membership) -> _Assignment:
        return self._recent.recall(key, lambda: _Assignment(self._compute(key)))

    def _compute(self, key: Membership) -> Slots:
        base = Membership(key.slot_count, frozenset())
        if key == base:
            return self._chain.owners(key.slot_count)
        owners = self._recall(base).owners.copy()
        least, most = key.bounds(self.shard_count)
        sizes = self._chain.sizes(key.slot_count)
        keep = _kept(sizes, least, most)
        shards = self._chain.tails(keep, sizes)
        hashes = mix_array(shards.astype(np.uint64) ^ self._bid_key)
        owners[shards] = assign_with_room(hashes, keep, least, most)
        return owners


class _Assignment:
    """The owners of one membership, and on demand the shards grouped by owner."""

    def __init__(self, owners: Slots) -> None:
        owners.flags.writeable = False
        self.owners = owners

    def shards_of(self, slot: int) -> Ints:
        part = self.part(slot)
        return self._groups[0][part.start : part.stop].astype(np.int64)

    def shard_at(self, slot: int, position: int) -> int:
        part = self.part(slot)
        if not 0 <= position < len(part):
            raise IndexError(f"slot {slot} has {len(part)} shards: there is none at {position}")
        return int(self._groups[0][part[position]])

    def part(self, slot: int) -> range:
        """The places of a slot's shards among all shards grouped by owner."""
        ends = self._groups[1]
        if slot >= ends.size:
            return range(0)
        return range(int(ends[slot - 1]) if slot else 0, int(ends[slot]))

    @cached_property
    def _groups(self) -> tuple[Slots, Ints]:
        """The shards grouped by owner, and where each group ends."""
        loads = np.bincount(self.owners)
        if loads.size == 1:
            return np.arange(self.owners.size, dtype=np.int32), np.cumsum(loads)
        # Numpy sorts 16-bit numbers by radix, in linear time.
        narrow = np.uint16 if loads.size <= 1 << 16 else np.uint32
        shards = np.argsort(self.owners.astype(narrow), kind="stable")
        return shards.astype(np.int32), np.cumsum(loads)


def _kept(sizes: Ints, least: Ints, most: Ints) -> Ints:
    """Return how many shards each slot keeps, so that every slot can reach ``least``."""
    keep = np.minimum(sizes, most)
    missing = int(np.maximum(least - sizes, 0).sum() - (sizes - keep).sum())
    if missing > 0:
        keep[np.flatnonzero(keep > least)[-missing:]] -= 1
    return keep


class Chain:
    """The assignments of one dataset to 1, 2, 3, ... live slots, each one step from the last.

    Slot 0 starts with every shard in hashed order. With ``k`` slots, slot ``j`` holds
    ``N // k`` shards, one more when ``j < N % k``; when slot ``k`` joins, each earlier slot
    keeps the front of its list and the newcomer takes what is cut off the ends. Nothing else
    moves. A list only ever loses its end, so one pool of initial lists holds all assignments:
    about ``N × (1 + ln W)`` numbers for ``W`` slots.

    Not thread-safe: asking for more slots extends the pool.
    """

    def __init__(self, shard_count: int, seed: int) -> None:
        self.shard_count = shard_count
        self._seed = seed
        self._births = np.array([0, shard_count], dtype=np.int64)
        """Where each slot's initial list begins in the pool."""

    @cached_property
    def _pool(self) -> Slots:
        """The initial lists of all slots, one after the other."""
        return _hashed_order(self.shard_count, self._seed)

    def sizes(self, slot_count: int) -> Ints:
        """Return how many shards each of ``slot_count`` slots holds."""
        each, extra = divmod(self.shard_count, slot_count)
        return each + (np.arange(slot_count) < extra)

    def owners(self, slot_count: int) -> Slots:
        """Return the slot of every shard, with ``slot_count`` slots."""
        self._extend(slot_count)
        each, extra = divmod(self.shard_count, slot_count)
        slots = np.arange(min(slot_count, self.shard_count), dtype=np.int32)
        owners = np.empty(self.shard_count, dtype=np.int32)
        step = max(1, SLICE // max(1, each))
        for first in range(0, slots.size if each else 0, step):
            some = slots[first : first + step]
            for start in range(0, each, SLICE):
                count = min(SLICE, each - start)
                rows = self._rows(first, first + some.size, start, count)
                owners[rows] = np.repeat(some, count)
        for first in range(0, extra, SLICE):
            last = min(extra, first + SLICE)
            owners[self._rows(first, last, each, 1)] = slots[first:last]
        return owners

    def tails(self, keep: Ints, sizes: Ints) -> Slots:
        """Return the shards that slots lose when each keeps its first ``keep`` of ``sizes``.

        The last slot's come first.
        """
        self._extend(keep.size)
        losing = np.flatnonzero(sizes > keep)[::-1]
        counts = (sizes - keep)[losing]
        ends = np.cumsum(counts)
        first = self._births[losing] + keep[losing] - (ends - counts)
        places = np.repeat(first, counts) + np.arange(counts.sum())
        return self._pool.take(places)

    def _rows(self, first: int, last: int, start: int, count: int) -> Slots:
        """Return ``count`` shards from position ``start`` on of slots ``first`` to ``last``."""
        places = self._births[first:last] + start
        if count != 1:
            places = (places[:, None] + np.arange(count)).reshape(-1)
        return self._pool[places]

    def _extend(self, slot_count: int) -> None:
        """Let slots join until there are ``slot_count``, or one for each shard."""
        built = self._births.size - 1
        if slot_count <= built or built >= self.shard_count:
            return
        # With a margin, a job that grows slot by slot does not copy the pool each time.
        margin = built + built // 8 if built > 1 else 0
        goal = min(max(slot_count, margin), self.shard_count)
        births = np.zeros(goal + 1, dtype=np.int64)
        np.cumsum(self.shard_count // np.arange(1, goal + 1), out=births[1:])
        pool = np.empty(births[-1], dtype=np.int32)
        pool[: self._pool.size] = self._pool
        self._births, self._pool = births, pool
        while built < goal:
            if self.shard_count // built == self.shard_count // (built + 1):
                built += self._join_run(built, goal)
            else:
                self._join_one(built)
                built += 1

    def _join_run(self, k: int, goal: int) -> int:
        """Let slots join while each only takes extra shards, one per slot; return how many."""
        each, extra = divmod(self.shard_count, k)
        joining = min(goal, self.shard_count // each) - k
        extras = self._rows(extra - joining * each, extra, each, 1)
        born, end = self._births[k], self._births[k + joining]
        self._pool[born:end] = extras.reshape(joining, each)[::-1].reshape(-1)
        return joining

    def _join_one(self, k: int) -> None:
        """Let slot ``k`` join: every earlier slot may lose shards."""
        each, extra = divmod(self.shard_count, k)
        kept, kept_extra = divmod(self.shard_count, k + 1)
        # Between these slots all lose the same number from the same position.
        edges = sorted({0, extra, kept_extra, k}) if k > _FEW_SLOTS else range(k + 1)
        end = int(self._births[k])
        for first, last in itertools.pairwise(edges):
            start = kept + (first < kept_extra)
            count = each + (first < extra) - start
            begin, end = end, end + count * (last - first)
            if last - first == 1:
                source = int(self._births[first]) + start
                self._pool[begin:end] = self._pool[source : source + count]
            else:
                self._pool[begin:end] = self._rows(first, last, start, count)


def _hashed_order(shard_count: int, seed: int) -> Slots:
    """Return all shards ordered by the high bits of their hash, equal ones by number."""
    keyed = np.arange(shard_count, dtype=np.uint64)
    low_bits = np.uint64((1 << max(shard_count - 1, 0).bit_length()) - 1)
    for start in range(0, shard_count, SLICE):
        shards = keyed[start : start + SLICE]
        shards |= mix_array(shards ^ np.uint64(fold(seed))) & ~low_bits
    keyed.sort()
    keyed &= low_bits
    return keyed.astype(np.int32)


class FileTable:
    """Assigns files to slots: every file to exactly one, about as many rows to each.

    The same rows and membership give the same owners everywhere. For any membership,

    - the rows of two live slots differ by at most those of the largest file;
    - no live slot is without a file while there are as many files as live slots;
    - a slot that dies loses its files and moves no other file, and a replacement in that hole
      brings back the owners from before.

    Another ``slot_count`` assigns all files anew. Thread-safe.
    """

    def __init__(self, rows: ArrayLike) -> None:
        self._rows = np.asarray(rows, dtype=np.int64)
        # Largest first, equal ones by number: the last ones even out the rest.
        self._order = np.argsort(-self._rows, kind="stable")
        self._recent = _Recent[Slots](_REMEMBERED)
        self._lock = threading.Lock()

    def owners(self, slot_count: int, dead: Collection[int] = ()) -> Slots:
        """Return the slot of every file, as a read-only array.

        Raises ``ShardError`` when every slot is dead.
        """
        # For its checks: dead slots at the end are kept, so that their deaths move little.
        Membership(slot_count, dead).normalised()
        with self._lock:
            return self._recall(Membership(slot_count, frozenset(dead)))

    def files_of(self, slot: int, slot_count: int, dead: Collection[int] = ()) -> Ints:
        """Return the files of ``slot`` in rising order: none when it is dead."""
        return np.flatnonzero(self.owners(slot_count, dead) == slot)

    def _recall(self, key: Membership) -> Slots:
        owners = self._recent.recall(key, lambda: self._compute(key))
        owners.flags.writeable = False
        return owners

    def _compute(self, key: Membership) -> Slots:
        slots = range(key.slot_count)
        if not key.dead:
            owners = np.empty(len(self._rows), dtype=np.int32)
            self._assign(owners, self._order, [(0, 0, slot) for slot in slots])
            return owners
        owners = self._recall(Membership(key.slot_count, frozenset())).copy()
        files = np.bincount(owners, minlength=key.slot_count).tolist()
        rows = np.zeros(key.slot_count, dtype=np.int64)
        np.add.at(rows, owners, self._rows)
        lost = np.isin(owners, list(key.dead))
        live = [(int(rows[slot]), files[slot], slot) for slot in slots if slot not in key.dead]
        self._assign(owners, self._order[lost[self._order]], live)
        return owners

    def _assign(self, owners: Slots, files: Ints, heap: list[tuple[int, int, int]]) -> None:
        """Give each file to the slot with the fewest rows; among those, the fewest files.

        ``heap`` has the rows, files and number of each slot.
        """
        heapq.heapify(heap)
        for file, rows in zip(files.tolist(), self._rows[files].tolist(), strict=True):
            load, count, slot = heap[0]
            owners[file] = slot
            heapq.heapreplace(heap, (load + rows, count + 1, slot))
