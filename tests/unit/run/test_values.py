"""The values of a run: what comes back of them, and what is not theirs."""

from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from dtruntime import Run


class Adam(NamedTuple):
    count: int  # type: ignore[assignment]
    moments: dict[str, Any]


def finish(folder: Path, state: dict[str, Any], steps: int = 2) -> dict[str, Any]:
    with Run(folder, max_steps=steps, state=state) as run:
        list(run)
    return run.state


@pytest.mark.parametrize(
    ("then", "told"),
    [
        ({"weights": np.zeros(3)}, r"no value of weights \(it has params\).*state="),
        ({"params": np.zeros(3), "more": 1}, r"no value of more"),
        ({"params": np.zeros(4)}, r"params was numpy float64 \(3,\) and is numpy float64 \(4,\)"),
        ({"params": np.zeros(3, "f4")}, r"is numpy float32"),
        ({"params": {"w": np.zeros(3)}}, r"params was .* and is not there, params/w was not there"),
        ({"params": [0.0] * 3}, r"params was numpy float64 \(3,\) and is not there"),
    ],
)
def test_checkpoint_of_other_values_is_refused(
    tmp_path: Path, then: dict[str, Any], told: str
) -> None:
    finish(tmp_path, {"params": np.zeros(3)})
    with pytest.raises(ValueError, match=told):
        finish(tmp_path, then, steps=4)
    assert finish(tmp_path, {"params": np.ones(3)})["params"].tolist() == [0, 0, 0]


def test_values_may_become_others_while_a_run_goes_on(tmp_path: Path) -> None:
    def initial() -> dict[str, Any]:
        return {"best": None, "losses": np.zeros(0), "seen": [], "opt": {}}

    with Run(tmp_path, max_steps=2, state=initial()) as run:
        for step in run:
            run.state["best"] = np.float64(step)
            run.state["losses"] = np.append(run.state["losses"], step)
            run.state["seen"].append(Adam(step, {}))
            run.state["opt"]["w"] = np.ones(2)
            run.state["new"] = 1
    found = finish(tmp_path, initial())
    assert found["best"] == 1.0
    assert found["losses"].tolist() == [0, 1]
    assert found["seen"] == [(0, {}), (1, {})]
    assert found["opt"]["w"].tolist() == [1, 1]
    assert found["new"] == 1


def test_named_tuples_come_back_as_what_they_were(tmp_path: Path) -> None:
    def initial() -> dict[str, Any]:
        return {
            "opt": (Adam(0, {"w": np.zeros(2)}), [Adam(0, {})]),
            "counts": defaultdict(int),
            "ordered": OrderedDict(b=1),
        }

    with Run(tmp_path, max_steps=2, state=initial()) as run:
        for _ in run:
            first, rest = run.state["opt"]
            moments = {"w": first.moments["w"] + 1}
            run.state["opt"] = (first._replace(count=first.count + 1, moments=moments), rest)
            run.state["counts"]["steps"] += 1
    with Run(tmp_path, max_steps=4, state=initial()) as again:
        first, (second,) = again.state["opt"]
        for _ in again:
            again.state["counts"]["again"] += 1
    assert (type(first), type(second)) == (Adam, Adam)
    assert first.count == 2
    assert first.moments["w"].tolist() == [2, 2]
    assert again.state["counts"] == {"steps": 2, "again": 2}
    assert type(again.state["ordered"]) is OrderedDict


def test_value_that_cannot_be_saved_is_refused_before_anything_is_opened(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="state"):
        Run(tmp_path / "never", max_steps=1, state={"x": object()})
    assert not (tmp_path / "never").exists()
