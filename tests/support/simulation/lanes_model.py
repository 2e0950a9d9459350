"""A small model of what workers read: lanes as a pure function of an epoch's segments."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from dtruntime.coordinator.state.records import SegmentRecord

Lanes = dict[int, list[int]]
"""Samples by slot."""


def lanes_of(samples: int, segments: Sequence[SegmentRecord]) -> list[Lanes]:
    """The lanes in each segment. What nobody took is dealt anew, in rounds, by weight."""
    return list(_lanes(samples, tuple(segments)))


@lru_cache(maxsize=512)
def _lanes(samples: int, segments: tuple[SegmentRecord, ...]) -> tuple[Lanes, ...]:
    if not segments:
        return ()
    before, current = _lanes(samples, segments[:-1]), segments[-1]
    pool = set(range(samples))
    if before:
        taken = segments[-2].taken
        pool = {x for slot, lane in before[-1].items() for x in lane[taken[slot] :]}
        for back in current.taken_back:
            pool |= set(before[back.segment - 1][back.slot][back.start : back.stop])
    return (*before, _deal(sorted(pool, key=lambda x: (x * 7919) % 101), current))


def _deal(pool: list[int], segment: SegmentRecord) -> Lanes:
    live = [slot for slot in range(segment.slot_count) if slot not in segment.dead]
    weights = segment.weights or (1,) * segment.slot_count
    rounds = [slot for slot in live for _ in range(1 + weights[slot] // 25)]
    lanes: Lanes = {slot: [] for slot in live}
    for number, sample in enumerate(pool):
        lanes[rounds[number % len(rounds)]].append(sample)
    return lanes
