"""Every sample exactly once, at any number of workers, from any position on."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtruntime.data.order import (
    AffinityOrder,
    Lane,
    Segment,
    Shuffle,
    global_lane,
    runs_of_rank,
    stream_bounds,
)
from dtruntime.sharding import SlotTable

sizes = st.lists(st.integers(0, 40), min_size=1, max_size=40).filter(lambda x: sum(x) > 0)
shuffles = st.builds(
    Shuffle, st.integers(0, 99), st.integers(0, 9), st.booleans(), st.integers(1, 6)
)


def starts_of(lengths: list[int]) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(lengths)))


def samples_of(lane: Lane, start: int, stop: int) -> np.ndarray:
    windows = lane.between(start, stop)
    return np.concatenate([np.empty(0, np.int64), *(window.numbers() for window in windows)])


class GlobalSequence:
    """The sequence of the whole job, as ranks read it from its streams."""

    def __init__(self, starts: np.ndarray, shuffle: Shuffle, streams: int = 1) -> None:
        lane = global_lane(starts, shuffle)
        self._streams = [
            samples_of(lane, *stream_bounds(len(lane), streams, number))
            for number in range(streams)
        ]
        self._length = len(lane)

    def __len__(self) -> int:
        return self._length

    def samples(self, positions: np.ndarray) -> np.ndarray:
        count = len(self._streams)
        return np.array([self._streams[p % count][p // count] for p in positions], np.int64)

    def part(self, start: int, stop: int, rank: int, world: int) -> np.ndarray:
        count = len(self._streams)
        runs = runs_of_rank(count, start, min(stop, self._length), rank, world)
        positions = [np.arange(a, b) * count + stream for stream, a, b in runs]
        return np.concatenate([np.empty(0, np.int64), *positions])


@given(sizes, shuffles, st.integers(1, 9))
def test_global_order_is_a_permutation_of_all_samples(lengths, shuffle, streams) -> None:
    order = GlobalSequence(starts_of(lengths), shuffle, streams)

    assert sorted(order.samples(np.arange(len(order)))) == list(range(sum(lengths)))


@given(sizes, shuffles, st.integers(1, 9), st.data())
def test_batch_split_over_ranks_is_complete_disjoint_and_even(lengths, shuffle, streams, data):
    order = GlobalSequence(starts_of(lengths), shuffle, streams)
    start = data.draw(st.integers(0, len(order)))
    stop = data.draw(st.integers(start, len(order) + 20))
    world = data.draw(st.integers(1, 12))

    parts = [order.part(start, stop, rank, world) for rank in range(world)]

    assert sorted(np.concatenate(parts)) == list(range(start, min(stop, len(order))))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(sizes, shuffles, st.integers(1, 9), st.data())
def test_global_resume_continues_with_any_world_and_batch(lengths, shuffle, streams, data) -> None:
    order = GlobalSequence(starts_of(lengths), shuffle, streams)
    position, seen = 0, []
    while position < len(order):
        world = data.draw(st.integers(1, 6))
        batch = data.draw(st.integers(1, max(1, len(order))))
        parts = (order.part(position, position + batch, rank, world) for rank in range(world))
        seen.extend(order.samples(part) for part in parts)
        position += batch

    assert sorted(np.concatenate(seen)) == list(range(sum(lengths)))


def test_rank_reads_its_own_shards_when_streams_match_the_world() -> None:
    starts = np.arange(0, 64_001, 1000)
    order = GlobalSequence(starts, Shuffle(seed=3, window=2), streams=4)
    shards_of = []
    for rank in range(4):
        positions = np.concatenate(
            [order.part(p, p + 400, rank, 4) for p in range(0, len(order), 400)]
        )
        shards_of.append(set(order.samples(positions) // 1000))

    for one in range(4):
        for other in range(one):
            assert not shards_of[one] & shards_of[other]


def test_epochs_and_seeds_differ_and_repeat() -> None:
    starts = starts_of([50] * 20)

    def sequence(seed: int, epoch: int) -> list[int]:
        order = GlobalSequence(starts, Shuffle(seed, epoch))
        return order.samples(np.arange(len(order))).tolist()

    assert sequence(1, 0) == sequence(1, 0)
    assert sequence(1, 0) != sequence(1, 1)
    assert sequence(1, 0) != sequence(2, 0)


@given(sizes, shuffles, st.data())
@settings(max_examples=200)
def test_affinity_delivers_each_sample_once_through_any_membership_changes(
    lengths, shuffle, data
) -> None:
    starts = starts_of(lengths)
    order = AffinityOrder(SlotTable(len(lengths), seed=5), starts, shuffle)
    seen: list[np.ndarray] = []
    history: list[Segment] = []
    for last in [False] * data.draw(st.integers(0, 4)) + [True]:
        slots = data.draw(st.integers(1, 6))
        dead = data.draw(st.sets(st.integers(0, slots - 1), max_size=slots - 1))
        current = Segment(slots, tuple(sorted(dead)))
        lanes = order.lanes(history, current)
        assert sorted(lanes.lengths) == current.live
        consumed = [0] * slots
        for slot, length in lanes.lengths.items():
            lane = lanes[slot]
            assert len(lane) == length
            consumed[slot] = len(lane) if last else data.draw(st.integers(0, len(lane)))
            seen.append(samples_of(lane, 0, consumed[slot]))
        history.append(Segment(slots, current.dead, tuple(consumed)))

    assert sorted(np.concatenate(seen)) == list(range(sum(lengths)))


def test_survivors_keep_their_own_shards_when_one_dies() -> None:
    starts = np.arange(0, 4001, 100)
    order = AffinityOrder(SlotTable(40, seed=1), starts, Shuffle(seed=1, window=1))
    before = order.lanes([], Segment(4))
    after = order.lanes([Segment(4, (), (300,))], Segment(4, (2,)))

    for slot in (0, 1, 3):
        assert set(before[slot].shards[3:]) <= set(after[slot].shards)


def test_consuming_more_than_there_is_is_an_error() -> None:
    with pytest.raises(ValueError, match="cannot have been consumed"):
        Lane(np.arange(2), np.array([0, 3, 6]), Shuffle()).rest(7)
