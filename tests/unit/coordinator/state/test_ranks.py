"""Sets of ranks, against sets of numbers."""

from hypothesis import given
from hypothesis import strategies as st

from dtruntime.coordinator.state.members import RankSet

RANKS = st.sets(st.integers(0, 300), max_size=40)


@given(RANKS, RANKS, st.integers(0, 300))
def test_set_of_ranks_is_a_set_in_rising_order(one: set[int], other: set[int], rank: int) -> None:
    ranks = RankSet(one)
    assert list(ranks) == sorted(one)
    assert len(ranks) == len(one)
    assert (rank in ranks) == (rank in one)
    assert ranks.highest() == max(one, default=-1)
    assert set(ranks.difference(other)) == one - other
    assert set(ranks.intersection(RankSet(other))) == one & other
    assert set(ranks.union(other)) == one | other
    changed = ranks.copy()
    changed.add(rank)
    assert set(changed) == one | {rank}
    assert len(changed) == len(one | {rank})
    assert set(ranks) == one, "the copy is another set"
    assert bool(ranks) == bool(one)
    assert (ranks == RankSet(other)) == (one == other)


@given(st.integers(0, 200))
def test_all_ranks_below_a_number(count: int) -> None:
    assert list(RankSet.below(count)) == list(range(count))
