"""How often a run recovers before it gives up."""

import pytest

from dtruntime import Recovery, StrataError
from dtruntime.run.recovery import Failures


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_first_failures_are_not_held_up_and_later_ones_are():
    clock = Clock()
    failures = Failures(Recovery(max_failures=8), clock)
    waits = [failures.count("x") for _ in range(8)]
    assert waits[0] == 0
    assert waits == sorted(waits)
    assert waits[-1] > 0


def test_too_many_in_the_window_end_the_run_with_the_reason():
    failures = Failures(Recovery(max_failures=2), Clock())
    failures.count("a")
    failures.count("b")
    with pytest.raises(StrataError, match=r"gives up.*worker-3 was lost"):
        failures.count("worker-3 was lost")


def test_what_others_of_the_crew_have_seen_counts_too():
    clock = Clock()
    old, new = Failures(Recovery(max_failures=20), clock), Failures(Recovery(), clock)
    for _ in range(20):
        old.count("x")
        clock.now += 1
    new.adopt(old.ages())
    new.adopt([3])
    with pytest.raises(StrataError, match="21 failures"):
        new.count("x")


def test_old_failures_are_forgotten():
    clock = Clock()
    failures = Failures(Recovery(max_failures=2, window_seconds=10), clock)
    for _ in range(20):
        clock.now += 6
        failures.count("x")


@pytest.mark.parametrize(
    ("given", "timeout", "waits"),
    [(None, 30.0, 45.0), (None, 3.0, 45.0), (None, 45.0, 67.5), (None, 600.0, 900.0), (5, 600, 5)],
)
def test_word_of_a_loss_is_awaited_for_longer_than_the_coordinator_needs(given, timeout, waits):
    assert Recovery(detect_seconds=given).detects_within(timeout) == waits
    assert Recovery().detect_seconds is None


@pytest.mark.parametrize(
    "wrong",
    [{"min_workers": 0}, {"max_failures": -1}, {"wait_seconds": -1}, {"window_seconds": -1}],
)
def test_nonsense_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Recovery(**wrong)
