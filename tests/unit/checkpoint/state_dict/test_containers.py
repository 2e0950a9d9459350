"""Loaded states in the containers of the program."""

from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import numpy as np
import pytest

from dtruntime.checkpoint.state_dict import flatten, rebuild
from dtruntime.checkpoint.state_dict.rebuilding import containers_of, shaped_like


class Adam(NamedTuple):
    count: Any
    moments: dict[str, Any]


class Empty(NamedTuple):
    pass


def loaded(state: Any) -> Any:
    tree = flatten(state)

    def read(number: int, memory: memoryview) -> None:
        tree.buffers[number].copy_into(memory)

    return rebuild(tree.skeleton, read)


def state(value: float = 0.0) -> Any:
    counts = defaultdict(int, a=int(value))
    return {
        "opt": (Adam(np.array(value), {"w": np.full(3, value)}), Empty(), [Adam(value, {})]),
        "counts": counts,
        "ordered": OrderedDict(b=value, a=value),
    }


@pytest.mark.parametrize("exact", [True, False])
def test_named_tuples_and_dicts_get_their_classes_back(exact: bool) -> None:
    found = shaped_like(state(), loaded(state(2.0)), exact=exact)
    assert isinstance(found["opt"], tuple)
    assert [type(part) for part in found["opt"]] == [Adam, Empty, list]
    assert type(found["opt"][2][0]) is Adam
    assert found["opt"][0].moments["w"].tolist() == [2.0] * 3
    found["counts"]["new"] += 1
    assert found["counts"] == {"a": 2, "new": 1}
    assert list(found["ordered"]) == ["b", "a"]
    assert type(found["ordered"]) is OrderedDict


def test_containers_alone_are_enough_to_give_classes() -> None:
    empty = containers_of(state())
    assert empty["opt"][0] == Adam(None, {"w": None})
    assert type(shaped_like(empty, loaded(state(2.0)), exact=False)["opt"][0]) is Adam


@pytest.mark.parametrize(
    ("like", "saved", "told"),
    [
        ({"a": {"w": 1}}, {"a": {"v": 1}}, r"state\['a'\] has 'v', which is not here"),
        ({"a": 1, "b": 1}, {"a": 1}, "state has 'b', which was not saved"),
        ({"a": np.zeros(3)}, {"a": np.zeros(4)}, r"numpy float64 \(4,\), and is .* \(3,\) here"),
        ({"a": np.zeros(3)}, {"a": np.zeros(3, "f4")}, "numpy float32 .* numpy float64"),
        ({"a": np.zeros(3)}, {"a": [0, 0, 0]}, "saved as a list of 3 parts"),
        ([1, 2], [1], "a list of 1 parts, and is a list of 2 parts"),
        (Adam(1, {}), (1,), "a tuple of 1 parts, and is a Adam of 2 parts"),
        ({"a": {}}, {"a": 1}, r"state\['a'\] was saved as a int"),
    ],
)
def test_difference_is_named_or_left_as_it_was_loaded(like: Any, saved: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        shaped_like(like, saved)
    assert shaped_like(like, saved, exact=False) is not None
    np.testing.assert_equal(shaped_like(like, saved, exact=False), saved)


def test_values_that_are_no_arrays_may_differ() -> None:
    assert shaped_like({"best": None, "step": 1}, {"best": 0.5, "step": "x"}) == {
        "best": 0.5,
        "step": "x",
    }
    assert shaped_like([Adam(0, {})], [(1, {}), (2, {})], exact=False) == [Adam(1, {}), (2, {})]
