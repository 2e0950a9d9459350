"""What a manager is given is checked when it is made, not when the first save fails."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtruntime.checkpoint.manager import CheckpointManager
from dtruntime.errors import ConfigError


@pytest.mark.parametrize(
    "place",
    ["", "hdfs://host/path", "s3://", "s3//bucket/x", "s3:/bucket/x", Path("s3://bucket/x")],
)
def test_place_that_cannot_be_is_refused_at_once(place: Any) -> None:
    with pytest.raises(ConfigError):
        CheckpointManager(place)


@pytest.mark.parametrize(
    ("place", "option", "advice"),
    [
        ("folder", "keep_cuont", "did you mean keep_count?"),
        ("folder", "intervall_steps", "did you mean interval_steps?"),
        ("s3://bucket/x", "end_point", "did you mean endpoint?"),
        ("s3://bucket/x", "secret_access_key", "config={...}"),
        ("folder", "region", "takes direct"),
        ("memory://x", "direct", "takes none"),
    ],
)
def test_mistyped_option_is_refused_with_the_nearest_one(
    place: str, option: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options: dict[str, Any] = {option: "SECRET"}
    with pytest.raises(TypeError, match=f"no option {option!r}") as error:
        CheckpointManager(place, **options)
    assert advice in str(error.value)
    assert "SECRET" not in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        ("keep_count", 1.5, TypeError),
        ("keep_count", math.nan, TypeError),
        ("keep_count", "5", TypeError),
        ("keep_count", True, TypeError),
        ("keep_count", 0, ValueError),
        ("keep_best", 1.5, TypeError),
        ("keep_best", None, TypeError),
        ("keep_best", -1, ValueError),
        ("keep_every", 2.5, TypeError),
        ("keep_every", 0, ValueError),
        ("metric", 3, TypeError),
        ("interval_steps", 1.5, TypeError),
        ("interval_steps", 0, ValueError),
        ("interval_seconds", math.nan, ValueError),
        ("interval_seconds", 0, ValueError),
        ("interval_seconds", "5", TypeError),
        ("interval_seconds", True, TypeError),
        ("memory_budget", math.inf, TypeError),
        ("memory_budget", 0, ValueError),
        ("upload_every", 0, ValueError),
        ("local_keep", 1.5, TypeError),
    ],
)
def test_wrong_value_is_refused_at_once_and_names_its_argument(
    tmp_path: Path, argument: str, value: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=argument):
        CheckpointManager(tmp_path, **{argument: value})


def test_numbers_of_numpy_are_as_good(tmp_path: Path) -> None:
    options: dict[str, Any] = {"keep_count": np.int64(2), "interval_seconds": np.float32(0.5)}
    with CheckpointManager(tmp_path, **options) as manager:
        for step in (1, 2, 3):
            manager.save(b"x", step)
        manager.wait()
        assert manager.steps() == [2, 3]


@pytest.mark.parametrize(
    ("given", "error", "reason"),
    [
        ({"metadata": {"x": "\ud800"}}, ValueError, "metadata 'x' is not text"),
        ({"metadata": {"\udfff": "x"}}, ValueError, "is not text"),
        ({"metadata": {1: "x"}}, TypeError, "names in metadata must be str, not 1"),
        ({"metadata": "note"}, TypeError, "metadata must be a dict, not str"),
        ({"metrics": [0.5]}, TypeError, "metrics must be a dict, not list"),
        ({"metrics": {"loss": "low"}}, ValueError, "low"),
    ],
)
def test_what_is_told_of_a_checkpoint_is_checked_before_it_is_saved(
    given: dict[str, Any], error: type[Exception], reason: str, tmp_path: Path
) -> None:
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(error, match=reason):
            manager.save(b"state", 1, **given)
        metadata: Any = {"note": "schön", "rate": 3e-4}
        manager.save(b"state", 1, metadata=metadata).wait()
        assert manager.steps() == [1]


def test_what_is_told_of_a_distributed_checkpoint_is_checked_too(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from dtruntime.checkpoint.dcp import StrataWriter

    with pytest.raises(ValueError, match="metadata 'x' is not text"):
        StrataWriter(tmp_path, 1, metadata={"x": "\ud800"})
    with pytest.raises(TypeError, match="metrics must be a dict"):
        StrataWriter(tmp_path, 1, metrics=[0.5])  # type: ignore[arg-type]
