"""Names and numbers that are accepted, and those that are not."""

import numpy as np
import pytest

from dtruntime.types import ShardInfo, check_id, check_whole


@pytest.mark.parametrize(
    "good",
    ["a", "0", "_", "worker-0", "epoch 5", "a.b", "host:1", "me@host", "a/b", "a+b=c#d", "x" * 200],
)
def test_usable_identifier_is_returned(good: str) -> None:
    assert check_id("thing", good) is good


@pytest.mark.parametrize(
    "bad",
    ["", "-a", ".a", "/a", " a", "a..b", "..", "a\n", "a\0", "a\tb", "é", "a\\b", "a*", "x" * 201],
)
def test_unusable_identifier_is_refused_with_the_rule(bad: str) -> None:
    with pytest.raises(ValueError, match=r"thing .* is not a valid identifier: use 1 to 200"):
        check_id("thing", bad)


def test_refusal_does_not_repeat_a_huge_name() -> None:
    with pytest.raises(ValueError, match="thing") as caught:
        check_id("thing", "x" * 100_000)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("bad", [None, 7, b"a", ["a"]])
def test_identifier_of_another_type_is_a_type_error(bad: object) -> None:
    with pytest.raises(TypeError, match="thing must be a str"):
        check_id("thing", bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("good", [0, 5, np.int64(5), np.uint8(5), 2**63 - 1], ids=repr)
def test_whole_number_is_returned_as_an_int(good: object) -> None:
    number = check_whole("n", good)
    assert type(number) is int
    assert number == good


@pytest.mark.parametrize(
    "bad", [None, "5", 5.0, np.float64(5), True, np.bool_(True), [5]], ids=repr
)
def test_number_of_another_type_is_a_type_error(bad: object) -> None:
    with pytest.raises(TypeError, match="n must be an int, not "):
        check_whole("n", bad)


@pytest.mark.parametrize("bad", [-1, 2**63, -(10**30)])
def test_number_out_of_bounds_is_refused(bad: int) -> None:
    with pytest.raises(ValueError, match="n must be between 0 and"):
        check_whole("n", bad)
    with pytest.raises(ValueError, match="n must be between 1 and 3, not 4"):
        check_whole("n", 4, 1, 3)


def test_length_of_a_shard_is_its_number_of_samples() -> None:
    assert len(ShardInfo(3, 30, 35)) == 5
