"""How many files an operation crosses, and that docs/architecture.md tells its way."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repository.docs.test_names import hops_in

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts" / "record-walks.py"

MOST_FILES = {"heartbeat": 17, "save": 27, "load": 20, "first_batch": 14}
"""How many files each walk may cross."""

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


TITLES = {
    "heartbeat": "A heartbeat",
    "save": "A durable save",
    "load": "A load",
    "first_batch": "The first batch",
    "death": "A death",
}


@pytest.mark.parametrize("walk", TITLES)
def test_documented_walk_is_the_recorded_one(visits: Visits, walk: str) -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = re.split(r"^#+ ", text.partition(f"### {TITLES[walk]}\n")[2], flags=re.MULTILINE)[0]
    hops = hops_in(section.partition("The recording does not include")[0])
    assert len(hops) > 10
    elsewhere = [(file, name) for file, name in hops if name not in visits[walk].get(file, ())]
    assert not elsewhere, f"not visited: {elsewhere}"
