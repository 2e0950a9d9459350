"""What is kept: never fewer than the newest, never by what is not committed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtruntime.retention import Retention, RetentionCandidate


def made(*steps, metrics=None):
    return [
        RetentionCandidate(number, step, {"loss": metrics[number]} if metrics else {})
        for number, step in enumerate(steps)
    ]


def left(retention, checkpoints):
    gone = retention.dropped(checkpoints)
    return [c.step for c in checkpoints if c not in gone]


def test_newest_are_kept():
    assert left(Retention(2), made(10, 20, 30, 40)) == [30, 40]
    assert left(Retention(None), made(10, 20, 30)) == [10, 20, 30]
    assert left(Retention(5), made(10)) == [10]


def test_newest_means_committed_last_not_the_highest_step():
    assert left(Retention(1), made(10, 100, 60)) == [60]


def test_every_so_many_steps_are_kept_too():
    kept = left(Retention(1, keep_every=100), made(50, 100, 150, 200, 250))
    assert kept == [100, 200, 250]


def test_best_by_metric_are_kept_too():
    losses = [0.5, 0.1, float("nan"), 0.4, 0.9]
    checkpoints = made(1, 2, 3, 4, 5, metrics=losses)
    assert left(Retention(1, keep_best=2), checkpoints) == [2, 4, 5]
    assert left(Retention(1, keep_best=1, higher_is_better=True), checkpoints) == [5]
    assert left(Retention(1, keep_best=2, metric="accuracy"), checkpoints) == [5]


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=20),
    st.integers(1, 5),
    st.one_of(st.none(), st.integers(1, 10)),
    st.integers(0, 3),
)
def test_newest_is_never_dropped_and_enough_remain(steps, count, every, best):
    checkpoints = made(*steps, metrics=[float(s % 7) for s in steps])
    dropped = Retention(count, every, best).dropped(checkpoints)
    assert checkpoints[-1] not in dropped
    assert len(checkpoints) - len(dropped) >= min(count, len(checkpoints))


@given(st.sets(st.tuples(st.integers(1, 6), st.integers(0, 9)), min_size=1), st.integers(1, 5))
def test_checkpoints_of_one_sequence_are_counted_one_by_one(places, count):
    """Writers that commit at the same moment give out the same sequence."""
    checkpoints = [RetentionCandidate(sequence, step, {}) for sequence, step in sorted(places)]
    dropped = Retention(count).dropped(checkpoints)
    assert dropped == checkpoints[:-count]


@pytest.mark.parametrize("bad", [{"keep_count": 0}, {"keep_every": 0}, {"keep_best": -1}])
def test_bad_values_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Retention(**bad)
