"""README's ten lines on the files that people have."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dtruntime import CheckpointManager

README = Path(__file__).parents[3] / "README.md"
ROWS = 1200


def ten_lines() -> str:
    (block,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
        if 'with Run(\n    "checkpoints"' in block
    ]
    return str(block)


def columns() -> dict[str, list[Any]]:
    rng = np.random.default_rng(5)
    pixels = rng.random((ROWS, 16), dtype=np.float32)
    return {"pixels": list(pixels), "label": (pixels.sum(1).astype(int) % 10).tolist()}


def by_pyarrow(path: Path) -> None:
    pq.write_table(pa.table(columns()), path)


def by_pandas(path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    pandas.DataFrame(columns()).to_parquet(path)


def by_rows(path: Path) -> None:
    names, values = zip(*columns().items(), strict=True)
    rows = [dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)]
    kinds = pa.schema([("pixels", pa.large_list(pa.float32())), ("label", pa.int64())])
    pq.write_table(pa.Table.from_pylist(rows, kinds), path, row_group_size=100)


@pytest.mark.parametrize(
    "write", [pytest.param(by_pyarrow, marks=pytest.mark.long), by_pandas, by_rows]
)
def test_ten_lines_train_on_lists_of_numbers(tmp_path: Path, write: Callable[[Path], None]) -> None:
    pytest.importorskip("torch")
    folder = tmp_path / "data" / "train"
    folder.mkdir(parents=True)
    write(folder / "part-0.parquet")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("COORDINATOR")}
    program = subprocess.run(
        [sys.executable, "-c", ten_lines()],
        cwd=tmp_path,
        env={**environment, "STRATA_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert program.returncode == 0, program.stderr
    assert program.stderr == ""
    steps = -(-ROWS // 128) * 2
    with CheckpointManager(tmp_path / "checkpoints") as manager:
        assert manager.load_latest().step == steps
        state = manager.load_state()
    weights = next(v for k, v in _leaves(state) if k.endswith("weight") and v.shape == (10, 16))
    assert abs(weights).sum() > 0


def _leaves(tree: Any, path: str = "") -> list[tuple[str, Any]]:
    if not isinstance(tree, dict):
        return [(path, tree)] if hasattr(tree, "shape") else []
    return [leaf for key, value in tree.items() for leaf in _leaves(value, f"{path}/{key}")]
