"""Reading data undisturbed says nothing: whoever sees a warning has something to look at."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq
import pytest

from dtruntime.testing import LocalCoordinator
from tests.support.data.record_files import example, write_records

PROGRAM = """
import warnings

warnings.simplefilter("always")  # what Python or a package warns of is shown, also unused files

from dtruntime import DatasetRegistry, TrainingOrchestrator
from dtruntime.data import Loader, Mixture
from dtruntime.data.torch import TorchLoader

if __name__ == "__main__":
    with TrainingOrchestrator(world_size=1) as worker:
        worker.register()
        datasets = DatasetRegistry()
        for format in ("parquet", "csv", "tfrecord"):
            datasets.register(format, f"data/{format}", format, shard_size=50, shuffle=True)
            datasets.register(format, f"data/{format}", format, shard_size=50, shuffle=True)
            assert len(datasets.get_shard(format, 0, 0)) == 2
            assert sum(len(shard) for shard in datasets.get_shards(format, 0)) == 400
            for options in ({}, {"output": "torch"}, {"order": "affinity"}, {"last": "pad"}):
                loader = datasets.loader(format, 32, **options)
                seen = [len(batch["label"]) for epoch in range(2) for batch in loader]
                again = datasets.loader(format, 32, **options)
                again.load_state_dict(loader.state_dict())
                next(iter(again))
            for coverage in datasets.coverage(format):
                assert coverage.complete, coverage
            live = datasets.live_loader(format, 32, epoch=5)
            for batch in live:
                live.commit()
        datasets.register_dataset("numbers", 1000, 100)
        list(datasets.loader("numbers", 64, decode=lambda s: s["sample"], transform=lambda b: b))
        parts = {name: (datasets.source(name, columns=["label"]), 1) for name in ("csv", "parquet")}
        list(Loader(Mixture(parts), 32))
        torch_loader = TorchLoader(
            datasets.loader("parquet", 32, output="torch"),
            num_workers=2,
            multiprocessing_context="spawn",
        )
        for epoch in range(2):
            assert len(list(torch_loader)) == 13
        datasets.close()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    for part in range(2):
        numbers = range(part * 200, part * 200 + 200)
        table = pa.table({"pixels": list(rng.random((200, 4), np.float32)), "label": numbers})
        for format in ("parquet", "csv", "tfrecord"):
            (tmp_path / "data" / format).mkdir(parents=True, exist_ok=True)
        pq.write_table(table, tmp_path / f"data/parquet/{part}.parquet", row_group_size=50)
        arrow_csv.write_csv(table.select(["label"]), tmp_path / f"data/csv/{part}.csv")
        records = [example({"x": ("float", [n, n]), "label": ("int64", [n])}) for n in numbers]
        write_records(tmp_path / f"data/tfrecord/{part}.tfrecord", records)
    return tmp_path


@pytest.mark.long
def test_reading_undisturbed_says_nothing(
    coordinator: LocalCoordinator, job: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    for name in ("STRATA_LOG", "RUST_LOG", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COORDINATOR_URL", coordinator.url)
    monkeypatch.setenv("STRATA_JOB", job)
    monkeypatch.setenv("STRATA_CACHE_DIR", str(folder / "cache"))
    (folder / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
