"""The one retry policy."""

import itertools
import random

import pytest

from dtruntime.retry import Backoff


def test_delays_double_up_to_the_longest_and_stay_there() -> None:
    backoff = Backoff(first=1.0, longest=8.0)
    for ceiling, delay in zip([1, 2, 4, 8, 8, 8], backoff.delays(random.Random(1)), strict=False):
        assert ceiling / 2 <= delay <= ceiling


def test_delays_differ_between_workers() -> None:
    backoff = Backoff()
    first = list(itertools.islice(backoff.delays(random.Random(1)), 8))
    second = list(itertools.islice(backoff.delays(random.Random(2)), 8))
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_delays_are_drawn_anew_without_a_generator() -> None:
    first = list(itertools.islice(Backoff().delays(), 8))
    second = list(itertools.islice(Backoff().delays(), 8))
    assert first != second


def test_delays_never_end() -> None:
    longest = Backoff().longest
    delays = itertools.islice(Backoff().delays(), 1000, 2000)
    assert all(longest / 2 <= delay <= longest for delay in delays)


@pytest.mark.parametrize(
    "arguments", [{"first": 0}, {"first": -1}, {"first": 10, "longest": 5}, {"factor": 0.5}]
)
def test_impossible_policy_is_refused(arguments: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"must"):
        Backoff(**arguments)
