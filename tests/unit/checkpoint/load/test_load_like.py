"""A state that is loaded in the containers of one that is given."""

import asyncio
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from dtruntime.checkpoint.manager import CheckpointManager


class Moments(NamedTuple):
    count: int  # type: ignore[assignment]
    mean: dict[str, Any]


def state(step: int) -> dict[str, Any]:
    return {
        "optimizer": (Moments(step, {"w": np.full(3, step)}), ()),
        "seen": defaultdict(list, a=[step]),
        "model": torch.nn.BatchNorm1d(2).state_dict(),
        "ordered": OrderedDict(b=1, a=2),
    }


def test_containers_are_those_of_the_given_state(manager: CheckpointManager) -> None:
    manager.save(state(5), 1)
    assert type(manager.load_state()["optimizer"][0]) is tuple
    for found in (
        manager.load_state(like=state(0)),
        asyncio.run(manager.load_state_async(1, like=state(0))),
    ):
        assert isinstance(found["optimizer"][0], Moments)
        assert found["optimizer"][0].count == 5
        assert found["optimizer"][0].mean["w"].tolist() == [5, 5, 5]
        assert found["seen"]["new"] == []
        assert list(found["ordered"]) == ["b", "a"]
        assert found["model"]._metadata == state(0)["model"]._metadata, "torch looks for it"


def test_parts_that_are_chosen_are_shaped_too(manager: CheckpointManager) -> None:
    manager.save(state(5), 1)
    like = {"optimizer": state(0)["optimizer"]}
    found = manager.load_state(keys=["optimizer"], like=like)
    assert found["optimizer"][0].count == 5


@pytest.mark.parametrize(
    ("like", "where"),
    [
        ({"optimizer": ()}, r"state\['optimizer'\]|state has 'seen'"),
        ({**state(0), "optimizer": (Moments(0, {}), ())}, r"\['optimizer'\]\[0\]\[1\] has 'w'"),
        ({**state(0), "more": 1}, "'more', which was not saved"),
        ({**state(0), "seen": []}, r"\['seen'\] was saved as"),
    ],
)
def test_other_form_is_an_error_that_names_the_place(
    manager: CheckpointManager, like: Any, where: str
) -> None:
    manager.save(state(5), 1)
    with pytest.raises(ValueError, match=where):
        manager.load_state(like=like)
