"""What is left of an epoch is dealt anew, and its ledger stays within bounds."""

import pytest

from dtruntime.coordinator.state import commands as c
from dtruntime.coordinator.state.effects import Put
from dtruntime.coordinator.state.epochs import epochs
from dtruntime.sharding.coverage_digest import Digest
from tests.support.epoch_bench import begin, bench_with_dataset, finish, ledger_of
from tests.support.machine_bench import DATASET, JOB, SAMPLES, Bench, digest_of, refusal


@pytest.fixture
def bench() -> Bench:
    return bench_with_dataset()


def test_idle_member_gets_of_what_is_left_to_a_slow_one(bench: Bench) -> None:
    fast, slow = begin(bench, 2)
    bench.claim(slow, 1, 10, 50)
    for upto in range(10, 51, 10):
        bench.claim(fast, 1, upto, 50)
        bench.now += 0.1
        bench.commit(fast, 1, upto, upto)
    bench.commit(slow, 1, 10, 10)
    reply = bench.claim(fast, 1, 50, 50, timeout=30.0).reply
    assert isinstance(reply, c.Moved)
    assert [s.taken for s in reply.segments] == [(50, 10), ()]
    assert reply.segments[1].weights == (100, 20)
    assert bench.events[-1].fields["why"] == "rebalanced"


def test_waiting_member_gets_of_what_a_late_one_begins_to_claim(bench: Bench) -> None:
    fast, late = begin(bench, 2)
    for upto in range(10, 51, 10):
        bench.claim(fast, 1, upto, 50)
    bench.commit(fast, 1, 50, 50)
    waiting = bench.claim(fast, 1, 50, 50, timeout=30.0)
    assert waiting.held, "the lane of the other is not known"
    reply = bench.claim(late, 1, 10, 50).reply
    assert isinstance(reply, c.Moved)
    assert reply.segments[0].taken == (50, 10)
    assert isinstance(waiting.reply, c.Moved)


def test_little_is_not_dealt_anew(bench: Bench) -> None:
    fast, slow = begin(bench, 2)
    bench.claim(slow, 1, 10, 30)
    finish(bench, fast, 1, 70)
    assert bench.claim(fast, 1, 70, 70, timeout=30.0).held


def test_rest_is_dealt_anew_only_when_half_of_it_is_gone(bench: Bench) -> None:
    fast, slow = begin(bench, 2)
    for upto in (1, 2, 3):
        bench.claim(fast, 1, upto, 3)
    bench.commit(fast, 1, 3, 3)
    assert isinstance(bench.claim(slow, 1, 1, 97).reply, c.Moved)
    finish(bench, fast, 2, 2, before=3)
    assert ledger_of(bench).record.rebalanced_at == 96
    dealt_at = 0
    for upto in range(1, 94):
        reply = bench.claim(slow, ledger_of(bench).current, upto, 94).reply
        if isinstance(reply, c.Moved):
            dealt_at = upto
            break
    assert dealt_at == 46
    assert ledger_of(bench).record.rebalanced_at == 48


def test_wish_for_weights_begins_a_segment(bench: Bench) -> None:
    a, _, _ = begin(bench, 3, upto=10, length=30)
    reply = bench.apply(c.Rebalance(JOB, DATASET, 0, {1: 50, 2: 0}))
    assert reply == c.Rebalanced(2, (100, 50, 1))
    assert bench.apply(c.Rebalance(JOB, DATASET, 0, {1: 50, 2: 0})) == reply
    assert bench.effects == [], "it is dealt so already"
    moved = bench.claim(a, 1, 20, 30).reply
    assert isinstance(moved, c.Moved)
    assert moved.segments[1].weights == (100, 50, 1)
    assert refusal(bench.apply, c.Rebalance(JOB, DATASET, 0, {3: 50})).reason == "unknown_rank"
    assert refusal(bench.apply, c.Rebalance(JOB, DATASET, 1, {1: 50})).reason == "unknown_epoch"


def test_weights_follow_the_time_that_members_worked(bench: Bench) -> None:
    a, b, _ = [bench.register(world_size=4, rank=rank) for rank in range(3)]
    bench.claim(a, 0)
    bench.claim(a, 1, 20, 25)
    bench.claim(b, 1, 20, 25)
    bench.now += 1.0
    bench.commit(a, 1, 20, 20)
    bench.now += 1.0
    bench.commit(b, 1, 20, 20)
    bench.now += 50.0
    bench.claim(a, 1, 25, 25)
    bench.now += 0.25
    bench.commit(a, 1, 25, 25)
    reply = bench.apply(c.Rebalance(JOB, DATASET, 0))
    assert reply.weights == (100, 50, 100, 1), "waiting is no work, and rank 3 is vacant"


# Bounds


def test_oldest_epochs_are_forgotten_complete_ones_first(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epochs, "EPOCHS_KEPT", 3)
    (m,) = bench.elastic(1)
    for epoch in range(4):
        bench.claim(m, 0, epoch=epoch)
        if epoch == 1:
            bench.claim(m, 1, 100, 100, epoch=1)
            bench.commit(m, 1, 100, 100, epoch=1)
    assert list(bench.job.epochs.ledgers[DATASET]) == [0, 2, 3]
    bench.claim(m, 0, epoch=4)
    assert list(bench.job.epochs.ledgers[DATASET]) == [2, 3, 4]
    assert refusal(bench.claim, m, 1, 1, 10, epoch=0).reason == "unknown_epoch"


def test_number_of_segments_is_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epochs, "SEGMENTS_LIMIT", 4)
    a, b = begin(bench, 2, upto=1)
    for segment in (2, 3):
        bench.apply(c.Rebalance(JOB, DATASET, 0, {0: 10 * segment}))
        bench.claim(a, segment, 1, 50)
    full = refusal(bench.apply, c.Rebalance(JOB, DATASET, 0, {0: 99}))
    assert full.reason == "too_many_segments"
    bench.leave(b)
    assert isinstance(bench.claim(a, 3, 2, 50).reply, c.Moved), "room is kept for losses"
    bench.claim(a, 4, 90, 97)
    b = bench.register(world_size=2, rank=1)
    assert refusal(bench.claim, b, 0).reason == "too_many_segments"
    assert refusal(bench.claim, a, 4, 91, 97).reason == "too_many_segments"


def test_waits_end_where_no_segment_can_begin(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epochs, "SEGMENTS_LIMIT", 1)
    a, b = begin(bench, 2)
    finish(bench, a, 1, 50)
    waiting = bench.claim(a, 1, 50, 50, timeout=30.0)
    bench.leave(b)
    assert waiting.reply.reason == "too_many_segments"


def test_ledger_with_a_segment_missing_is_left_out_at_the_start(bench: Bench) -> None:
    a, b = begin(bench, 2, upto=20)
    bench.leave(b)
    bench.claim(a, 1, 30, 50)
    rows = dict(bench.rows)
    del rows["segment", JOB, "0:1:corpus"]
    machine = type(bench.machine)(3.0)
    left_out = machine.restore([(*key, row) for key, row in rows.items()], bench.now)
    assert left_out == [
        "epoch 0:corpus with 1 segments of job job",
        "reader 0:1:corpus of job job",
    ]
    assert machine.jobs[JOB].epochs.ledgers == {}


def test_claims_and_commits_write_one_small_record(bench: Bench) -> None:
    a, _ = begin(bench, 2, upto=20)
    for action in (lambda: bench.claim(a, 1, 30, 50), lambda: bench.commit(a, 1, 30, 30)):
        action()
        (put,) = bench.effects
        assert isinstance(put, Put)
        assert put.kind == "reader"


def test_digest_of_an_open_epoch_has_what_everybody_committed(bench: Bench) -> None:
    a, b = begin(bench, 2, upto=20)
    bench.commit(a, 1, 10, 10)
    bench.commit(b, 1, 5, 5, digest=digest_of(range(50, 55)))
    bench.leave(b)
    bench.claim(a, 1, 30, 50)
    merged = Digest(SAMPLES, digest_of([*range(10), *range(50, 55)]))
    assert ledger_of(bench).digest() == merged
