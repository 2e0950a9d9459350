import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtruntime.errors import ShardError
from dtruntime.sharding import (
    Membership,
    SlotTable,
    fewest_moves,
    lowest_free_slots,
    plan_change,
    plan_moves,
)


def test_one_worker_joining_a_hundred_moves_one_share():
    plan = plan_change(SlotTable(10_000), (100, ()), join=[100], samples=1_000_000)
    assert plan.shards_moved == plan.fewest_shards == 99
    assert plan.samples_moved == 9_900
    assert plan.bytes_moved is None
    assert plan.gained == {100: 99}
    assert sum(plan.lost.values()) == 99
    assert (plan.least_load, plan.most_load) == (99, 100)
    assert plan.fraction_moved == 0.0099


def test_counts_per_shard_are_summed_exactly():
    table = SlotTable(50)
    samples, size_bytes = np.arange(50), np.arange(50) * 1000
    plan = plan_change(table, (5, ()), leave=[2], samples=samples, size_bytes=size_bytes)
    shards = table.shards_of(2, 5)
    assert plan.samples_moved == shards.sum()
    assert plan.bytes_moved == shards.sum() * 1000
    assert plan.lost == {2: 10}
    assert 2 not in plan.gained
    assert plan.after == Membership(5, {2})


def test_a_slot_past_the_end_leaves_holes_before_it():
    plan = plan_change(SlotTable(100), (2, ()), join=[4])
    assert plan.after == Membership(5, {2, 3})
    assert plan.gained[4] == plan.least_load == 33


@given(st.integers(0, 2000), st.integers(1, 60), st.data())
def test_a_plan_is_what_then_happens(shard_count, slot_count, data):
    table = SlotTable(shard_count)
    slots = st.sets(st.integers(0, slot_count - 1), max_size=slot_count - 1)
    before = Membership(slot_count, frozenset(data.draw(slots)))
    join = lowest_free_slots(before, data.draw(st.integers(1, 5)))
    leave = data.draw(st.sets(st.sampled_from(sorted(set(range(slot_count)) - set(before.dead)))))
    plan = plan_change(table, before, join=join, leave=leave)
    old, new = table.owners(*before), table.owners(*plan.after)
    assert plan.shards_moved == np.count_nonzero(old != new) >= plan.fewest_shards
    assert set(plan.after.dead) == (set(before.dead) | leave) - set(join)
    for slot in range(plan.after.slot_count):
        change = np.count_nonzero(new == slot) - np.count_nonzero(old == slot)
        assert plan.gained.get(slot, 0) - plan.lost.get(slot, 0) == change
    assert plan.most_load - plan.least_load <= 1


def test_nothing_changed_moves_nothing():
    plan = plan_change(SlotTable(0), (3, {1}), samples=5, size_bytes=[])
    assert (plan.shards_moved, plan.samples_moved, plan.bytes_moved) == (0, 0, 0)
    assert plan.fraction_moved == 0


def test_weights_may_change_too():
    before, after = Membership(4, (), [8, 8, 8, 8]), Membership(4, (), [8, 8, 8, 4])
    plan = plan_moves(SlotTable(1000), before, after)
    assert plan.fewest_shards <= plan.shards_moved < 2 * plan.fewest_shards
    assert (plan.least_load, plan.most_load) == (143, 286)


@pytest.mark.parametrize(
    ("owners", "after", "fewest"),
    [
        ([0, 0, 0, 0], Membership(2), 2),
        ([0, 0, 0, 1], Membership(2), 1),
        ([0, 0, 1, 1], Membership(2), 0),
        ([0, 1, 2, 3], Membership(2), 2),
        ([0, 0, 1, 1, 1], Membership(2), 0),
        ([0, 0, 1, 1, 1], Membership(3, {1}), 3),
        ([0, 0, 1, 1, 1, 1], Membership(2, (), [1, 2]), 0),
    ],
)
def test_fewest_moves_is_the_lower_bound(owners, after, fewest):
    assert fewest_moves(np.array(owners, dtype=np.int32), after) == fewest


def test_newcomers_take_the_lowest_holes_first():
    assert lowest_free_slots((5, {3, 1}), 0) == ()
    assert lowest_free_slots((5, {3, 1}), 1) == (1,)
    assert lowest_free_slots((5, {3, 1}), 4) == (1, 3, 5, 6)
    with pytest.raises(ValueError, match="count"):
        lowest_free_slots((5, ()), -1)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"join": [0]}, ValueError, r"only free slots can join, not \[0\]"),
        ({"join": [-1]}, ValueError, r"only free slots can join, not \[-1\]"),
        ({"leave": [1]}, ValueError, r"only live slots can leave, not \[1\]"),
        ({"leave": [3]}, ValueError, r"only live slots can leave, not \[3\]"),
        ({"join": ["1"]}, TypeError, "str"),
        ({"samples": [1, 2]}, ValueError, "samples must be a total or have 10 numbers"),
        ({"size_bytes": 1.5}, TypeError, "size_bytes must be whole numbers"),
        ({"leave": [0, 2]}, ShardError, "slots are dead"),
    ],
)
def test_impossible_changes_are_refused(change, error, message):
    with pytest.raises(error, match=message):
        plan_change(SlotTable(10), (3, {1}), **change)


def test_a_weighted_slot_past_the_end_needs_a_weight():
    with pytest.raises(ValueError, match="has no weight: use plan_moves"):
        plan_change(SlotTable(10), Membership(2, (), [1, 2]), join=[2])
