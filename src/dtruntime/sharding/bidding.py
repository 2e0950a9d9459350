"""Dealing shards that lost their slot to slots that have room."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .hashing import WORD, mix_array

_FREE_ROUNDS = 8
_STEP = 0xD1342543DE82EF95


def deal(
    hashes: NDArray[np.uint64],
    loads: NDArray[np.int64],
    least: NDArray[np.int64],
    most: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return a slot for each hash: slots fill up to ``least`` first, then up to ``most``.

    ``loads`` is what each slot holds already. All slots together must have enough room.
    """
    slots = _bid(hashes, np.maximum(least - loads, 0))
    left = np.flatnonzero(slots < 0)
    loads = loads + np.bincount(slots[slots >= 0], minlength=loads.size)
    slots[left] = _bid(hashes[left], most - loads)
    return slots


def _bid(hashes: NDArray[np.uint64], room: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a slot with room for each hash, earlier hashes first; -1 where room ran out.

    Each round, every hash without a slot bids for one of its own pseudo-random choice. The
    choices hardly depend on which other slots there are or have room, so that a change of
    room disturbs few bids.
    """
    slots = np.full(hashes.size, -1, dtype=np.int64)
    bidders = np.arange(hashes.size)
    room = room.copy()
    rounds = 0
    while bidders.size and room.any():
        step = np.uint64(rounds * _STEP & WORD)
        draws = mix_array(hashes[bidders] + step)
        free = rounds < _FREE_ROUNDS
        choices = _any_slot(draws, room) if free else _open_slot(draws, room, step)
        winning = winners(choices, room)
        won = choices[winning]
        slots[bidders[winning]] = won
        room -= np.bincount(won, minlength=room.size)
        bidders = np.delete(bidders, winning)
        rounds += 1
    return slots


def _any_slot(draws: NDArray[np.uint64], room: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the slot each draw stands for, -1 when that slot does not exist or is full.

    Drawing from a power of two keeps nearly all choices when the number of slots changes.
    """
    mask = np.uint64((1 << (room.size - 1).bit_length()) - 1)
    choices = (draws & mask).astype(np.int64)
    choices[choices >= room.size] = -1
    choices[room[choices] == 0] = -1
    return choices


def _open_slot(
    draws: NDArray[np.uint64], room: NDArray[np.int64], step: np.uint64
) -> NDArray[np.int64]:
    """Return a slot with room for each draw: the next one on a ring of those slots."""
    slots = np.flatnonzero(room)
    points = mix_array(mix_array(slots.astype(np.uint64)) + step)
    around = np.argsort(points)
    nearest = np.searchsorted(points[around], draws) % slots.size
    return slots[around[nearest]]


def winners(choices: NDArray[np.int64], room: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return which bids succeed: the first ones for each slot, as many as it has room for.

    A choice of -1 is no bid.
    """
    bids = np.flatnonzero(choices >= 0)
    bids = bids[np.argsort(choices[bids], kind="stable")]
    slots = choices[bids]
    first = np.flatnonzero(np.diff(slots, prepend=-1))
    rank = np.arange(bids.size) - np.repeat(first, np.diff(first, append=bids.size))
    return bids[rank < room[slots]]
