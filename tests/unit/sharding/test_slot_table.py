import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtruntime.errors import ShardError
from dtruntime.sharding import Membership, SlotTable, fewest_moves

shard_counts = st.one_of(st.integers(0, 300), st.integers(0, 20_000))
slot_counts = st.one_of(st.integers(1, 40), st.integers(1, 1000))
seeds = st.integers(0, 5)


@st.composite
def memberships(draw, max_slots=1000):
    slot_count = draw(st.one_of(st.integers(1, 40), st.integers(1, max_slots)))
    share = draw(st.sampled_from([0.0, 0.02, 0.3, 0.9]))
    chance = np.random.default_rng(draw(st.integers(0, 1000))).random(slot_count)
    dead = set(np.flatnonzero(chance < share).tolist())
    dead.discard(draw(st.integers(0, slot_count - 1)))
    return Membership(slot_count, frozenset(dead))


@st.composite
def weighted_memberships(draw, max_slots=300):
    slot_count, dead, _ = draw(memberships(max_slots))
    choice = draw(st.sampled_from([(1, 1), (4, 8), (1, 8), (1, 1000), (2**30, 2**31 - 1)]))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    weights = rng.integers(choice[0], choice[1], size=slot_count, endpoint=True).tolist()
    return Membership(slot_count, dead, weights)


def live_loads(table, membership):
    loads = np.bincount(table.owners(*membership), minlength=membership.slot_count)
    assert not loads[list(membership.dead)].any()
    return np.delete(loads, list(membership.dead))


def built_slot_by_slot(table, slot_count):
    """The base map by its definition, from the one-slot order that the pool starts with."""
    n = table.shard_count
    lists = [table._chain._pool[:n].tolist()]
    for k in range(1, slot_count):
        each, extra = divmod(n, k + 1)
        newcomer = []
        for slot, shards in enumerate(lists):
            keep = each + (slot < extra)
            newcomer.append(shards[keep:])
            del shards[keep:]
        lists.append([shard for cut in newcomer for shard in cut])
    return lists


@given(shard_counts, memberships(), seeds)
def test_live_loads_never_differ_by_more_than_one(shard_count, membership, seed):
    loads = live_loads(SlotTable(shard_count, seed=seed), membership)
    assert loads.sum() == shard_count
    assert loads.max() - loads.min() <= 1


@given(shard_counts, slot_counts, seeds)
def test_a_joining_slot_takes_its_share_and_moves_nothing_else(shard_count, slot_count, seed):
    table = SlotTable(shard_count, seed=seed)
    moved = table.moves((slot_count, ()), (slot_count + 1, ()))
    assert moved.size == shard_count // (slot_count + 1)
    assert (table.owners(slot_count + 1)[moved] == slot_count).all()


@given(shard_counts, st.integers(2, 1000), seeds, st.data())
def test_a_lone_death_moves_only_the_dead_slots_shards(shard_count, slot_count, seed, data):
    table = SlotTable(shard_count, seed=seed)
    dead = data.draw(st.integers(0, slot_count - 1))
    moved = table.moves((slot_count, ()), (slot_count, {dead}))
    assert np.array_equal(moved, table.shards_of(dead, slot_count))


@given(shard_counts, memberships(), seeds)
def test_replacements_in_all_holes_bring_the_base_map_back(shard_count, membership, seed):
    table = SlotTable(shard_count, seed=seed)
    base = table.owners(membership.slot_count).copy()
    table.owners(*membership)
    assert np.array_equal(table.owners(membership.slot_count), base)


@given(shard_counts, memberships(), seeds)
def test_holes_move_only_the_shards_of_dead_slots(shard_count, membership, seed):
    slot_count, dead, _ = membership
    while slot_count - 1 in dead:
        slot_count -= 1
    table = SlotTable(shard_count, seed=seed)
    base = table.owners(slot_count)
    moved = base != table.owners(*membership)
    assert np.array_equal(moved, np.isin(base, list(dead)))


@given(st.integers(0, 2000), st.integers(1, 200), seeds)
def test_the_base_map_is_built_as_defined(shard_count, slot_count, seed):
    table = SlotTable(shard_count, seed=seed)
    owners = table.owners(slot_count)
    for slot, shards in enumerate(built_slot_by_slot(table, slot_count)):
        assert (owners[shards] == slot).all()


@given(st.integers(0, 3000), st.lists(st.integers(1, 300), min_size=1, max_size=6), seeds)
def test_earlier_questions_do_not_change_the_answer(shard_count, slot_counts, seed):
    used = SlotTable(shard_count, seed=seed)
    for slot_count in slot_counts:
        fresh = SlotTable(shard_count, seed=seed)
        assert np.array_equal(used.owners(slot_count), fresh.owners(slot_count))


@given(shard_counts, weighted_memberships(), st.data())
def test_a_slots_shards_are_those_it_owns_in_rising_order(shard_count, membership, data):
    table = SlotTable(shard_count)
    slot = data.draw(st.integers(0, membership.slot_count - 1))
    shards = table.shards_of(slot, *membership)
    assert shards.dtype == np.int64
    assert np.array_equal(shards, np.flatnonzero(table.owners(*membership) == slot))


@given(shard_counts, weighted_memberships(), seeds)
def test_weighted_loads_are_the_exact_share_rounded_down_or_up(shard_count, membership, seed):
    table = SlotTable(shard_count, seed=seed)
    loads = live_loads(table, membership)
    weights = np.delete(np.array(membership.weights, dtype=object), list(membership.dead))
    assert loads.sum() == shard_count
    assert all(abs(loads * weights.sum() - shard_count * weights) < weights.sum())


@given(shard_counts, memberships(), st.integers(1, 9))
def test_equal_weights_are_no_weights(shard_count, membership, weight):
    table = SlotTable(shard_count)
    weighted = membership._replace(weights=[weight] * membership.slot_count)
    assert np.array_equal(table.owners(*weighted), table.owners(*membership))


def moves_over_fewest(table, steps):
    """How many shards a sequence of memberships moves, over the fewest that each could."""
    moved = fewest = 0
    for before, after in pairwise(steps):
        moved += table.moves(before, after).size
        fewest += fewest_moves(table.owners(*before), after)
    return moved / fewest


def churn(slot_count, holes, count, weights=None):
    """Deaths at random, each replaced in the lowest hole once there are ``holes``."""
    rng = np.random.default_rng(3)
    dead = set()
    steps = [Membership(slot_count, frozenset(), weights)]
    while len(steps) <= count:
        if len(dead) < holes and (not dead or rng.random() < 0.5):
            dead.add(int(rng.choice([s for s in range(slot_count) if s not in dead])))
        else:
            dead.remove(min(dead))
        steps.append(Membership(slot_count, frozenset(dead), weights))
    return steps


@pytest.mark.parametrize(
    ("slot_count", "shard_count", "holes", "limit"),
    [
        (10, 1000, 3, 1.3),
        (100, 1000, 10, 1.5),
        (100, 10_000, 20, 1.6),
        (300, 30_000, 10, 1.8),
        (1000, 10_000, 20, 1.1),
        (1000, 100_000, 20, 1.3),
    ],
)
def test_churn_with_several_holes_moves_little_more_than_it_must(
    slot_count, shard_count, holes, limit
):
    table = SlotTable(shard_count, seed=1)
    assert moves_over_fewest(table, churn(slot_count, holes, 60)) < limit


@pytest.mark.parametrize(
    ("slot_count", "shard_count", "limit"),
    [(16, 1000, 2.2), (100, 10_000, 2.8), (1000, 100_000, 6)],
)
def test_churn_of_unequal_slots_moves_a_small_multiple_of_what_it_must(
    slot_count, shard_count, limit
):
    weights = [(8, 4, 8, 2)[slot % 4] for slot in range(slot_count)]
    table = SlotTable(shard_count, seed=1)
    assert moves_over_fewest(table, churn(slot_count, 2, 20, weights)) < limit


def test_dead_slots_at_the_end_count_as_never_having_joined():
    table = SlotTable(1000)
    assert np.array_equal(table.owners(12, {10, 11}), table.owners(10))
    assert np.array_equal(table.owners(12, {3, 11}), table.owners(11, {3}))
    assert table.shards_of(11, 12, {11}).size == 0


def test_more_slots_than_shards_leaves_some_empty():
    table = SlotTable(3)
    assert np.bincount(table.owners(5), minlength=5).tolist() == [1, 1, 1, 0, 0]
    assert np.bincount(table.owners(5, {0, 4}), minlength=5).tolist() == [0, 1, 1, 1, 0]
    assert SlotTable(0).owners(4, {1}).size == 0


def test_any_collection_names_the_dead():
    table = SlotTable(500)
    expected = table.owners(9, frozenset({2, 5}))
    for dead in ([5, 2, 2], (2, 5), {2: None, 5: None}, np.array([2, 5])):
        assert np.array_equal(table.owners(9, dead), expected)


def test_seeds_give_unrelated_maps():
    same = SlotTable(10_000, seed=1).owners(10) == SlotTable(10_000, seed=2).owners(10)
    assert 800 < np.count_nonzero(same) < 1200


def test_owners_cannot_be_written():
    owners = SlotTable(10).owners(2)
    assert owners.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        owners[0] = 1


def test_what_is_remembered_is_bounded():
    table = SlotTable(100)
    for slot_count in range(1, 50):
        table.shards_of(0, slot_count, {slot_count // 2} if slot_count > 2 else ())
    assert len(table._recent) <= 4


def test_copies_and_pickles_answer_alike():
    table = SlotTable(1000, seed=4)
    expected = table.owners(7, {2})
    for twin in (copy.deepcopy(table), pickle.loads(pickle.dumps(table))):
        assert np.array_equal(twin.owners(7, {2}), expected)


def test_threads_share_a_table():
    shared = SlotTable(20_000)
    slot_counts = [*range(1, 60), *range(60, 1, -1)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda k: shared.shards_of(k - 1, k), slot_counts))
    alone = SlotTable(20_000)
    for slot_count, answer in zip(slot_counts, answers, strict=True):
        assert np.array_equal(answer, alone.shards_of(slot_count - 1, slot_count))


def test_no_live_slot_is_an_error_that_says_what_to_do():
    with pytest.raises(ShardError, match=r"all 2 slots are dead.*let a worker join"):
        SlotTable(10).owners(2, {0, 1})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0,), ValueError, "slot_count must be from 1"),
        ((-3,), ValueError, "slot_count must be from 1"),
        ((2.0,), TypeError, "float"),
        ((3, {3}), ValueError, "reach outside the 3 slots"),
        ((3, {-1}), ValueError, "reach outside the 3 slots"),
        ((3, {"0"}), TypeError, "str"),
        ((3, (), [1, 2]), ValueError, "3 slots need as many weights, not 2"),
        ((2, (), [1, 0]), ValueError, "weights must be from 1"),
        ((2, (), [1, 1.5]), TypeError, "float"),
    ],
)
def test_impossible_memberships_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        SlotTable(10).owners(*arguments)


def test_impossible_tables_and_slots_are_refused():
    with pytest.raises(ValueError, match="shard_count"):
        SlotTable(-1)
    with pytest.raises(ValueError, match="shard_count"):
        SlotTable(2**31)
    with pytest.raises(TypeError):
        SlotTable("10")  # type: ignore[arg-type]
    for slot in (-1, 4):
        with pytest.raises(ValueError, match="not one of the 4 slots"):
            SlotTable(10).shards_of(slot, 4)
