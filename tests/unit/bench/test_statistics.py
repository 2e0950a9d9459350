"""What single values come to."""

import pytest

from dtruntime.bench.report import Series, Times, in_turn, percentile, results


def test_rate_is_compared_with_the_limit_of_the_same_round() -> None:
    limit = Series("write", "bytes", bytes_each=1)
    ours = Series("save", "bytes", "write", bytes_each=1)
    for seconds, factor in ((1.0, 2.0), (10.0, 1.0), (2.0, 4.0)):
        limit.add(seconds, 100)
        ours.add(seconds * factor, 100)

    write, save = results([limit, ours])

    assert write.of_limit is None
    assert write.per_second == 50
    assert save.of_limit == 0.5
    assert save.seconds == [2.0, 10.0, 8.0]
    assert (save.least_seconds, save.median_seconds, save.longest_seconds) == (2.0, 8.0, 10.0)


def test_rate_and_time_agree_for_an_even_number_of_rounds() -> None:
    record = Series("read", "bytes", bytes_each=1)
    for seconds in (1.0, 4.0):
        record.add(seconds, 100)

    (measure,) = results([record])

    assert measure.median_seconds == 2.5
    assert measure.per_second == 40


def test_what_moves_nothing_has_no_rate() -> None:
    limit, stall = Series("copy", "bytes"), Series("stall", "bytes", "copy")
    limit.add(1.0, 100)
    stall.add(0.001)

    assert results([limit, stall])[1].per_second is None
    assert results([limit, stall])[1].of_limit is None


def test_turns_of_different_length_are_compared_by_their_rates() -> None:
    limit, ours = Series("scan", "samples"), Series("loader", "samples", "scan")
    limit.add(2.0, 1000)
    ours.add(1.0, 250)

    assert results([limit, ours])[1].of_limit == 0.5


def test_single_calls_are_kept() -> None:
    record = Series("barrier", "calls")
    record.add(1.0, 100, [number / 1000 for number in range(1, 101)])

    (measure,) = results([record])

    assert len(measure.call_seconds) == 100
    assert measure.call_p50_seconds == 0.05
    assert measure.call_p99_seconds == 0.099


@pytest.mark.parametrize(("percent", "expected"), [(1, 1), (50, 2), (75, 3), (99, 4), (100, 4)])
def test_percentile_is_a_value_that_was_measured(percent: float, expected: float) -> None:
    assert percentile([4, 2, 1, 3], percent) == expected


def test_percentile_of_nothing_is_unknown() -> None:
    assert percentile([], 50) is None


def test_another_one_is_first_in_each_round() -> None:
    assert [in_turn("abc", number) for number in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]


def test_few_rounds_are_spread_over_all_that_could_be_first() -> None:
    firsts = [in_turn("abcdef", number, rounds=3)[0] for number in range(3)]
    assert firsts == ["a", "c", "e"]


def test_spread_is_relative_to_the_median() -> None:
    times = Times.of([3.0, 1.0, 2.0])
    assert (times.median, times.best, times.worst, times.spread) == (2.0, 1.0, 3.0, 1.0)
