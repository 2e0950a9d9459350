"""Predicting which shards a change of membership moves."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from operator import index as as_int

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .assignment import Membership, SlotTable


@dataclass(frozen=True, slots=True)
class MovePlan:
    """The effect of a change of membership on one dataset.

    ``samples_moved`` and ``bytes_moved`` are ``None`` where no count was given, exact where one
    was given per shard, and in proportion to the shards moved where only a total was given.
    ``fewest_shards`` is the least that any even assignment would have to move. ``gained`` and
    ``lost`` count shards by slot and leave out slots without any. ``least_load`` and
    ``most_load`` are the live slots' loads after the change.
    """

    before: Membership
    after: Membership
    shard_count: int
    shards_moved: int
    samples_moved: int | None
    bytes_moved: int | None
    fewest_shards: int
    gained: dict[int, int]
    lost: dict[int, int]
    least_load: int
    most_load: int

    @property
    def fraction_moved(self) -> float:
        """The part of all shards that moves, from 0 to 1."""
        return self.shards_moved / self.shard_count if self.shard_count else 0.0


def plan_change(
    table: SlotTable,
    current: Membership | tuple[int, Collection[int]],
    *,
    join: Collection[int] = (),
    leave: Collection[int] = (),
    samples: ArrayLike | None = None,
    size_bytes: ArrayLike | None = None,
) -> MovePlan:
    """Return what moves when the slots ``join`` and ``leave`` the ``current`` membership.

    ``join`` may name dead slots and slots past the end; :func:`lowest_free_slots` gives those
    that newcomers would take. Raises ``ValueError`` for a slot that cannot join or leave, and
    what :func:`plan_moves` raises, which takes ``samples`` and ``size_bytes`` too.
    """
    before = Membership(*current)
    after = _changed(before, {as_int(slot) for slot in join}, {as_int(slot) for slot in leave})
    return plan_moves(table, before, after, samples=samples, size_bytes=size_bytes)


def plan_moves(
    table: SlotTable,
    before: Membership,
    after: Membership,
    *,
    samples: ArrayLike | None = None,
    size_bytes: ArrayLike | None = None,
) -> MovePlan:
    """Return what moves between two memberships.

    ``samples`` and ``size_bytes`` are each a total, or one number for every shard. Raises
    ``ShardError`` when a membership has no live slot.
    """
    old, new = table.owners(*before), table.owners(*after)
    moved = np.flatnonzero(old != new)
    live = np.setdiff1d(np.arange(after.slot_count), list(after.dead))
    loads = np.bincount(new, minlength=after.slot_count)[live]
    return MovePlan(
        before=before,
        after=after,
        shard_count=table.shard_count,
        shards_moved=moved.size,
        samples_moved=_part(samples, moved, table.shard_count, "samples"),
        bytes_moved=_part(size_bytes, moved, table.shard_count, "size_bytes"),
        fewest_shards=fewest_moves(old, after),
        gained=_tally(new[moved]),
        lost=_tally(old[moved]),
        least_load=int(loads.min()),
        most_load=int(loads.max()),
    )


def lowest_free_slots(
    current: Membership | tuple[int, Collection[int]], count: int
) -> tuple[int, ...]:
    """Return the slots that ``count`` newcomers take: the lowest dead ones, then the next."""
    membership = Membership(*current)
    if as_int(count) < 0:
        raise ValueError(f"count must not be negative, not {count}")
    holes = sorted(membership.dead)[:count]
    end = membership.slot_count
    return (*holes, *range(end, end + count - len(holes)))


def fewest_moves(owners: NDArray[np.int32], after: Membership) -> int:
    """Return how many shards must move from ``owners`` to any even assignment to ``after``."""
    least, most = after.bounds(owners.size)
    loads = np.bincount(owners, minlength=after.slot_count)[: after.slot_count]
    extra = int(((loads > least) & (most > least)).sum())
    spare = owners.size - int(least.sum())
    return owners.size - int(np.minimum(loads, least).sum()) - min(extra, spare)


def _changed(before: Membership, joining: set[int], leaving: set[int]) -> Membership:
    members = set(range(before.slot_count)) - set(before.dead)
    taken = {slot for slot in joining if slot in members or slot < 0}
    if taken:
        raise ValueError(f"only free slots can join, not {sorted(taken)}")
    if leaving - members:
        raise ValueError(f"only live slots can leave, not {sorted(leaving - members)}")
    slot_count = max(before.slot_count, max(joining, default=-1) + 1)
    if before.weights is not None and slot_count > before.slot_count:
        raise ValueError(
            f"slot {slot_count - 1} is past the end and has no weight: "
            "use plan_moves, with the weights afterwards"
        )
    live = (members | joining) - leaving
    return Membership(slot_count, frozenset(range(slot_count)) - live, before.weights)


def _part(
    amounts: ArrayLike | None, moved: NDArray[np.int64], shard_count: int, what: str
) -> int | None:
    """Return how much of ``amounts``, one per shard or a total, the moved shards carry."""
    if amounts is None:
        return None
    given = np.asarray(amounts)
    if given.size and given.dtype.kind not in "iu":
        raise TypeError(f"{what} must be whole numbers, not {given.dtype}")
    if given.ndim == 0:
        return int(given) * moved.size // max(shard_count, 1)
    if given.shape != (shard_count,):
        raise ValueError(f"{what} must be a total or have {shard_count} numbers, not {given.shape}")
    return int(given[moved].sum())


def _tally(slots: NDArray[np.int32]) -> dict[int, int]:
    numbers, counts = np.unique(slots, return_counts=True)
    return dict(zip(numbers.tolist(), counts.tolist(), strict=True))
