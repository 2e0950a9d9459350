import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtruntime.errors import ShardError, ShardNotFoundError
from dtruntime.sharding import ConsistentHash

names = st.sets(st.text("abcxyz0189-", min_size=1, max_size=6), min_size=1, max_size=12)


def ring_of(nodes, **settings):
    ring = ConsistentHash(**settings)
    for node in nodes:
        ring.add_node(node)
    return ring


def loads(assigned):
    return np.array([shards.size for shards in assigned.values()])


def test_the_documented_example_runs():
    ring = ConsistentHash()
    ring.add_node("worker-1")
    ring.add_node("worker-2")
    assert ring.get_node_for_shard("imagenet", 42) in {"worker-1", "worker-2"}


@given(names, st.randoms())
def test_the_order_of_joining_does_not_matter(nodes, random):
    shuffled = sorted(nodes)
    random.shuffle(shuffled)
    one, other = ring_of(sorted(nodes)), ring_of(shuffled)
    assert one.nodes == other.nodes == tuple(sorted(nodes))
    for key in map(str, range(20)):
        assert one.get_node(key) == other.get_node(key)


@given(names, st.integers(0, 300), st.sampled_from([None, 1, 1.05, 2.0]))
def test_every_shard_is_assigned_once_within_the_bound(nodes, shard_count, load_factor):
    assigned = ring_of(nodes, load_factor=load_factor).assign("data", shard_count)
    assert tuple(assigned) == tuple(sorted(nodes))
    assert np.array_equal(np.sort(np.concatenate([*assigned.values()])), np.arange(shard_count))
    assert all((np.diff(shards) > 0).all() for shards in assigned.values())
    if load_factor is not None:
        assert loads(assigned).max() < load_factor * shard_count / len(nodes) + 1


@given(names, st.integers(1, 100))
def test_single_lookups_agree_with_the_whole_assignment(nodes, shard_count):
    ring = ring_of(nodes)
    for node, shards in ring.assign("data", shard_count).items():
        assert all(ring.get_node_for_shard("data", shard) == node for shard in shards)


def test_a_joining_node_takes_keys_and_moves_no_others():
    ring = ring_of(f"worker-{i}" for i in range(100))
    before = [ring.get_node(f"key-{i}") for i in range(5000)]
    ring.add_node("newcomer")
    after = [ring.get_node(f"key-{i}") for i in range(5000)]
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {"newcomer"}
    assert 20 < len(moved) < 90
    ring.remove_node("newcomer")
    assert [ring.get_node(f"key-{i}") for i in range(5000)] == before


def test_more_points_spread_more_evenly():
    few, many = (
        loads(ring_of((f"w{i}" for i in range(50)), virtual_nodes=v).assign("data", 100_000))
        for v in (5, 500)
    )
    assert many.std() < few.std() / 3


def test_a_load_factor_flattens_the_peaks():
    nodes = [f"worker-{i}" for i in range(100)]
    assert loads(ring_of(nodes).assign("data", 10_000)).max() > 110
    assert loads(ring_of(nodes, load_factor=1.05).assign("data", 10_000)).max() == 105
    assert set(loads(ring_of(nodes, load_factor=1).assign("data", 10_000))) == {100}


def test_datasets_are_spread_independently():
    ring = ring_of(f"worker-{i}" for i in range(10))
    one, other = ([ring.get_node_for_shard(d, i) for i in range(2000)] for d in ("a", "b"))
    assert 100 < sum(map(str.__eq__, one, other)) < 320


def test_a_dataset_named_like_a_node_is_spread_too():
    ring = ring_of(f"worker-{i}" for i in range(10))
    assert ring.assign("worker-3", 100)["worker-3"].size < 40


def test_an_empty_ring_says_what_to_do():
    ring = ConsistentHash()
    for ask in (
        lambda: ring.get_node("key"),
        lambda: ring.get_node_for_shard("imagenet", 42),
        lambda: ring.assign("imagenet", 5),
    ):
        with pytest.raises(ShardError, match=r"ring is empty.*add_node"):
            ask()
    ring.add_node("only")
    assert ring.get_node("key") == "only"
    ring.remove_node("only")
    with pytest.raises(ShardError, match="shard 42 of dataset 'imagenet'"):
        ring.get_node_for_shard("imagenet", 42)


def test_adding_twice_counts_once_and_removing_twice_fails():
    ring = ring_of(["a", "b", "a"])
    assert len(ring) == 2
    assert "a" in ring
    ring.remove_node("a")
    assert ring.nodes == ("b",)
    with pytest.raises(ShardNotFoundError, match="'a' is not on the ring"):
        ring.remove_node("a")


BAD_CALLS = {
    "no points": (lambda: ConsistentHash(0), ValueError),
    "half a point": (lambda: ConsistentHash(1.5), TypeError),  # type: ignore[arg-type]
    "factor below one": (lambda: ConsistentHash(load_factor=0.9), ValueError),
    "factor nan": (lambda: ConsistentHash(load_factor=float("nan")), ValueError),
    "factor inf": (lambda: ConsistentHash(load_factor=float("inf")), ValueError),
    "empty node": (lambda: ConsistentHash().add_node(""), ValueError),
    "number as node": (lambda: ConsistentHash().add_node(7), TypeError),  # type: ignore[arg-type]
    "number as key": (lambda: ring_of("a").get_node(7), TypeError),
    "negative shard": (lambda: ring_of("a").get_node_for_shard("data", -1), ValueError),
    "text as shard": (lambda: ring_of("a").get_node_for_shard("data", "1"), TypeError),
    "no dataset": (lambda: ring_of("a").get_node_for_shard(None, 1), TypeError),
    "negative count": (lambda: ring_of("a").assign("data", -1), ValueError),
}


@pytest.mark.parametrize(("call", "error"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_bad_arguments_are_refused(call, error):
    with pytest.raises(error):
        call()
