"""What a run refuses, before it opens or sends anything."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtruntime import Recovery, Run, ShardError, ShardNotFoundError
from dtruntime.data import Loader, NumberSource

NAN = float("nan")
NOBODY = "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"save_seconds": NAN}, ValueError, "save_seconds must be positive: nan"),
        ({"save_seconds": -1}, ValueError, "save_seconds must be positive: -1"),
        ({"save_seconds": 0}, ValueError, "save_seconds must be positive: 0"),
        ({"save_seconds": "1"}, TypeError, "save_seconds must be a number of seconds, not str"),
        ({"save_steps": 0}, ValueError, "save_steps must be between 1"),
        ({"save_steps": 1.5}, TypeError, "save_steps must be an int"),
        ({"grace_seconds": "x"}, TypeError, "grace_seconds must be a number"),
        ({"grace_seconds": -1}, ValueError, "grace_seconds must not be negative"),
        ({"collective_seconds": 0}, ValueError, "collective_seconds must be positive"),
        ({"process_group": True}, TypeError, "process_group must be 'auto' or a backend of torch"),
        ({"independent": "no"}, TypeError, "independent must be a bool, not str"),
        ({"recovery": 3}, TypeError, "recovery must be a Recovery, not int"),
        ({"track": [1]}, TypeError, "track must be a dict with names, not list"),
        ({"state": [1]}, TypeError, "state must be a dict with names, not list"),
        ({"loader": [1]}, TypeError, "loader must be a dict with names, not list"),
        ({"checkpoint": "x"}, TypeError, "checkpoint must be a dict with names, not str"),
        ({"data": 0}, ValueError, "data must be between 1"),
        ({"data": True}, TypeError, "data must be files .* not a bool"),
        ({"data": 1.5}, TypeError, "data must be files .* not a float"),
        ({"data": {"a": 1}}, TypeError, "data must be files .* not a dict"),
        ({"data": [1], "batch_size": 2}, ValueError, "batch_size cannot be used with this list"),
        ({"data": [1], "global_batch_size": 2}, ValueError, "global_batch_size cannot be used"),
        ({"data": [1], "loader": {"last": "pad"}}, ValueError, "last cannot be used with"),
        ({"data": [1], "format": "csv"}, ValueError, "format cannot be used with this list"),
        ({"data": np.zeros(3), "batch_size": 2}, ValueError, "with this ndarray"),
        ({"data": ["a/b.parquet", "c.csv"]}, ValueError, "list of 2 paths.*folder.*glob"),
        ({"data": (Path("a"),)}, ValueError, "tuple of 1 paths"),
        (
            {"data": Loader(NumberSource(8, 4), 2), "batch_size": 2},
            ValueError,
            "batch_size cannot be used with this Loader",
        ),
        (
            {"data": 60, "loader": {"order": "affinity"}, "coordinator_url": NOBODY},
            ValueError,
            "last='pad' or last='drop'",
        ),
    ],
)
def test_wrong_argument_is_named(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        Run(tmp_path / "never", **{"max_steps": 1, **options})
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"max_failures": NAN}, TypeError, "max_failures must be an int"),
        ({"max_failures": -1}, ValueError, "max_failures must be between 0"),
        ({"min_workers": 0}, ValueError, "min_workers must be between 1"),
        ({"wait_seconds": "a"}, TypeError, "wait_seconds must be a number of seconds, not str"),
        ({"detect_seconds": NAN}, ValueError, "detect_seconds must not be negative: nan"),
        ({"window_seconds": True}, TypeError, "window_seconds must be a number of seconds"),
    ],
)
def test_wrong_argument_of_a_recovery_is_named(
    options: dict[str, Any], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        Recovery(**options)


def test_endless_and_no_patience_are_fine() -> None:
    assert Recovery(assemble_seconds=float("inf"), wait_seconds=0).wait_seconds == 0


@pytest.mark.parametrize("options", [{"world_size": 1, "rank": 0}, {"loader": {"last": "pad"}}])
def test_affinity_order_where_steps_are_as_many_is_fine(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    reading = {"order": "affinity", **options.pop("loader", {})}
    Run(tmp_path, 60, batch_size=5, loader=reading, coordinator_url=NOBODY, **options)


def test_count_of_numpy_is_a_count(tmp_path: Path) -> None:
    with Run(tmp_path, np.int64(20), batch_size=5) as run:
        assert len(list(run)) == 4


def test_texts_are_no_paths(tmp_path: Path) -> None:
    with Run(tmp_path, ["first", "second one"]) as run:
        assert list(run) == ["first", "second one"]


def test_epoch_in_which_everything_is_dropped_is_an_error(tmp_path: Path) -> None:
    run = Run(tmp_path, 5, batch_size=10, loader={"last": "drop"})
    with pytest.raises(ShardError, match=r"no steps: last='drop'"), run:
        list(run)


def test_path_that_is_not_there_is_told_with_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "train-data").mkdir()
    with (
        pytest.raises(ShardNotFoundError, match=r"no file or folder '.*trian-data'; .*train-data"),
        Run(tmp_path / "ck", tmp_path / "trian-data", batch_size=2),
    ):
        pass


def test_files_of_another_format_are_named(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name in ("p0.jsonl", "p1.jsonl"):
        (tmp_path / "data" / name).write_text("{}\n")
    for data in (tmp_path / "data", f"{tmp_path}/data/*.jsonl"):
        with (
            pytest.raises(ShardNotFoundError, match=r"only p0.jsonl, p1.jsonl: .*format=.*iterat"),
            Run(tmp_path / "ck", data, batch_size=2),
        ):
            pass


def test_format_is_found_in_folders_below(tmp_path: Path) -> None:
    (tmp_path / "data" / "day=1").mkdir(parents=True)
    (tmp_path / "data" / "day=1" / "a.csv").write_text("x\n1\n2\n")
    with Run(tmp_path / "ck", tmp_path / "data", batch_size=2) as run:
        assert [sorted(batch["x"]) for batch in run] == [[1, 2]]


def test_shard_size_is_that_of_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.toml").write_text("[dataset]\ndefault_shard_size = 7\n")
    monkeypatch.setenv("STRATA_CONFIG", str(tmp_path / "config.toml"))
    with Run(tmp_path / "ck", 20, batch_size=5) as run:
        stream: Any = run._training.parts.stream
        found = stream.loader._source.starts
    assert found.tolist() == [0, 7, 14, 20]


WITHOUT_PYARROW = """
import sys
sys.modules["pyarrow"] = None
from dtruntime import Run
with Run(sys.argv[1] + "/steps", max_steps=3) as run:
    assert len(list(run)) == 3
with Run(sys.argv[1] + "/batches", [1, 2]) as run:
    assert len(list(run)) == 2
try:
    with Run(sys.argv[1] + "/numbers", 20, batch_size=5) as run:
        list(run)
except Exception as error:
    print(type(error).__name__, error)
"""


def test_base_install_says_what_reading_needs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PYARROW, str(tmp_path)],
        env={**os.environ},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "ConfigError reading data needs pyarrow" in done.stdout
    assert "pip install pyarrow" in done.stdout
