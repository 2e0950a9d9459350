from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dtruntime.errors import ShardError, ShardNotFoundError
from dtruntime.sharding import ShardManager, ShardRange


def test_the_documented_one_dataset_example_runs():
    manager = ShardManager("imagenet", 1000)
    assert manager.assign_shards(0, "worker-1") == list(range(1000))


def test_the_documented_registration_example_runs():
    manager = ShardManager()
    manager.register_dataset_params("imagenet-1k", 1281167, 10000, True, 42)
    assigned = manager.get_shard_for_worker("imagenet-1k", "worker-01", 0)
    assert sum(map(len, assigned)) == 1281167
    assert max(assigned, key=lambda shard: shard.shard_id) == ShardRange(128, 1280000, 1281167)


@given(st.integers(0, 500), st.integers(1, 20), st.booleans(), st.integers(0, 3))
def test_declared_workers_share_every_shard_evenly(shard_count, worker_count, shuffle, epoch):
    manager = ShardManager("data", shard_count, shuffle=shuffle)
    workers = [f"worker-{i}" for i in range(worker_count)]
    for worker in workers:
        manager.add_worker(worker)
    shares = [manager.assign_shards(epoch, worker) for worker in workers]
    assert sorted(chain(*shares)) == list(range(shard_count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(st.integers(0, 10_000), st.integers(1, 500), st.integers(1, 5))
def test_ranges_cover_every_sample_once(total_samples, shard_size, worker_count):
    manager = ShardManager()
    manager.register_dataset_params("data", total_samples, shard_size, shuffle=True)
    for i in range(worker_count):
        manager.add_worker(str(i))
    ranges = [
        r for i in range(worker_count) for r in manager.get_shard_for_worker("data", str(i), 3)
    ]
    end = 0
    for shard in sorted(ranges, key=lambda r: r.shard_id):
        assert shard.start_index == end
        end = shard.end_index
        assert 0 < len(shard) <= shard_size
    assert end == total_samples


def test_a_worker_keeps_its_shards_and_shuffles_their_order_each_epoch():
    manager = ShardManager("data", 300, shuffle=True, seed=7)
    for worker in "abc":
        manager.add_worker(worker)
    epochs = [manager.assign_shards(epoch, "b") for epoch in range(4)]
    assert len({frozenset(shards) for shards in epochs}) == 1
    assert len({tuple(shards) for shards in epochs}) == 4
    assert manager.assign_shards(2, "b") == epochs[2]


def test_two_shards_keep_their_relative_order_when_membership_changes():
    manager = ShardManager("data", 300, shuffle=True)
    manager.add_worker("a")
    whole = manager.assign_shards(5, "a")
    manager.add_worker("b")
    half = manager.assign_shards(5, "a")
    assert half == [shard for shard in whole if shard in set(half)]


def test_without_shuffle_shards_are_read_in_rising_order():
    manager = ShardManager("data", 300)
    manager.add_worker("a")
    manager.add_worker("b")
    assert manager.assign_shards(1, "b") == sorted(manager.assign_shards(0, "b"))


def test_a_replacement_inherits_the_dead_workers_shards():
    manager = ShardManager("data", 1000)
    for i in range(10):
        assert manager.add_worker(f"worker-{i}") == i
    before = {worker: manager.assign_shards(0, worker) for worker in manager.workers}
    manager.remove_worker("worker-4")
    during = {worker: manager.assign_shards(0, worker) for worker in manager.workers}
    assert all(set(before[worker]) <= set(shards) for worker, shards in during.items())
    assert manager.add_worker("spare") == 4
    assert manager.assign_shards(0, "spare") == before["worker-4"]
    assert manager.assign_shards(0, "worker-5") == before["worker-5"]


def test_workers_that_ask_are_admitted_while_none_are_declared():
    manager = ShardManager("data", 100)
    manager.assign_shards(0, "a")
    manager.assign_shards(0, "b")
    assert manager.workers == {"a": 0, "b": 1}
    assert len(manager.assign_shards(0, "a")) == 50


def test_an_unknown_worker_is_refused_once_workers_are_declared():
    manager = ShardManager("data", 100)
    manager.add_worker("a")
    with pytest.raises(ShardNotFoundError, match="'typo' is not a member: add_worker"):
        manager.assign_shards(0, "typo")
    with pytest.raises(ShardNotFoundError, match="'typo'"):
        manager.remove_worker("typo")
    assert manager.workers == {"a": 0}


def test_a_failed_removal_declares_nothing():
    manager = ShardManager("data", 100)
    with pytest.raises(ShardNotFoundError, match="'a' is not a member"):
        manager.remove_worker("a")
    assert len(manager.assign_shards(0, "a")) == 100
    manager.remove_worker("a")
    with pytest.raises(ShardNotFoundError, match="'a' is not a member"):
        manager.assign_shards(0, "a")


def test_registering_the_same_again_is_a_no_op_and_a_difference_is_shown():
    manager = ShardManager()
    manager.register_dataset_params("data", 100, 10, True, 1)
    manager.register_dataset_params("data", 100, 10, True, 1)
    with pytest.raises(ShardError, match=r"shard_size=10.*not as.*shard_size=20"):
        manager.register_dataset_params("data", 100, 20, True, 1)
    assert manager.datasets["data"].shard_count == 10


def test_what_is_missing_is_named_with_the_remedy():
    with pytest.raises(ShardNotFoundError, match="'nope' is not registered: register_dataset"):
        ShardManager().get_shard_for_worker("nope", "a", 0)
    with pytest.raises(ShardError, match="no dataset of its own"):
        ShardManager().assign_shards(0, "a")


BAD_CALLS = {
    "dataset alone": (lambda: ShardManager("data"), TypeError),
    "count alone": (lambda: ShardManager(shard_count=3), TypeError),
    "negative count": (lambda: ShardManager("data", -1), ValueError),
    "text as count": (lambda: ShardManager("data", "3"), TypeError),  # type: ignore[arg-type]
    "empty dataset": (lambda: ShardManager("", 3), ValueError),
    "negative epoch": (lambda: ShardManager("data", 3).assign_shards(-1, "a"), ValueError),
    "text as epoch": (lambda: ShardManager("data", 3).assign_shards("0", "a"), TypeError),  # type: ignore[arg-type]
    "number as worker": (lambda: ShardManager("data", 3).assign_shards(0, 1), TypeError),  # type: ignore[arg-type]
    "empty worker": (lambda: ShardManager("data", 3).add_worker(""), ValueError),
    "empty shards": (lambda: ShardManager().register_dataset_params("data", 10, 0), ValueError),
    "too many shards": (
        lambda: ShardManager().register_dataset_params("data", 10**12, 1),
        ValueError,
    ),
    "text as seed": (
        lambda: ShardManager().register_dataset_params("data", 10, 1, True, "x"),  # type: ignore[arg-type]
        TypeError,
    ),
    "no dataset": (lambda: ShardManager().register_dataset_params(None, 10, 1), TypeError),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(("call", "error"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_bad_arguments_are_refused(call, error):
    with pytest.raises(error):
        call()


class Members(RuleBasedStateMachine):
    """Workers come and go; whoever is in shares all shards, in the lowest slots free."""

    def __init__(self):
        super().__init__()
        self.manager = ShardManager("data", 97)
        self.slots = {}

    @rule(number=st.integers(0, 12))
    def join(self, number):
        worker = f"worker-{number}"
        free = min(set(range(14)) - set(self.slots.values()))
        assert self.manager.add_worker(worker) == self.slots.setdefault(worker, free)

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def leave(self, data):
        worker = data.draw(st.sampled_from(sorted(self.slots)))
        self.manager.remove_worker(worker)
        del self.slots[worker]

    @invariant()
    def members_share_every_shard_evenly(self):
        assert self.manager.workers == self.slots
        shares = [self.manager.assign_shards(0, worker) for worker in self.slots]
        if shares:
            assert sorted(chain(*shares)) == list(range(97))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1


TestMembers = Members.TestCase
TestMembers.settings = settings(max_examples=40, stateful_step_count=20)
