"""How many files an operation crosses, and that docs/architecture.md tells its way."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "record-walks.py"

MOST_FILES = {"heartbeat": 18, "save": 38, "load": 28, "first_batch": 19}
"""What is recorded; a change may lower these, and the aim is 17, 27, 20 and 15 files."""

Visits = dict[str, dict[str, list[str]]]


@pytest.fixture(scope="module")
def visits() -> Visits:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--json"], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return {name: walk["visits"] for name, walk in json.loads(done.stdout).items()}


@pytest.mark.parametrize("walk", MOST_FILES)
def test_operation_crosses_few_files(visits: Visits, walk: str) -> None:
    files = list(visits[walk])
    assert len(files) <= MOST_FILES[walk], "\n".join([f"{len(files)} files:", *files])


@pytest.mark.parametrize(
    ("walk", "first", "last"),
    [
        ("heartbeat", "client", "coordinator/state/machine.py"),
        ("save", "checkpoint/manager.py", "storage/local_disk/local_stream.py"),
        ("load", "checkpoint/manager.py", "checkpoint/load/pack_reader.py"),
        ("first_batch", "data/loader.py", "data/readers/parquet.py"),
        ("death", "client", "coordinator/state/barriers.py"),
    ],
)
def test_recording_follows_an_operation_through_all_threads(
    visits: Visits, walk: str, first: str, last: str
) -> None:
    files = list(visits[walk])
    assert any(file.startswith(first) for file in files)
    assert last in files
