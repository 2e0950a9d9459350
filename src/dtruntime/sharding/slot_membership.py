"""Who takes part in reading a dataset, and how much each is due."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import index as as_int
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dtruntime.errors import ShardError

MAX_COUNT = (1 << 31) - 1


class Membership(NamedTuple):
    """The slots that share a dataset: ``slot_count`` in all, less the dead.

    ``weights`` has one positive integer for each slot, dead or live; without it all are equal.
    """

    slot_count: int
    dead: Collection[int] = ()
    weights: Sequence[int] | None = None

    def normalised(self) -> Membership:
        """Return the same membership checked, hashable and without dead slots at its end.

        Raises ``ValueError`` or ``TypeError`` for a membership that cannot be, ``ShardError``
        when every slot is dead.
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

    def bounds(self, shard_count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
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
