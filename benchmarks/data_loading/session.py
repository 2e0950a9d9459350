"""One run: data written, then assignment, loading and resuming measured."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from .. import machine
from . import assignment, dataset, resume
from .profiles import Profile
from .race import Race
from .results import Contest, Results

FORMATS = ("parquet", "csv", "tfrecord")
PARTS = ("assignment", *FORMATS, "resume")
PACKAGES = ("dtruntime", "numpy", "pyarrow")

Announce = Callable[[str], None]


def run(
    profile: Profile, chosen: Sequence[str], peers: Path, scratch: Path, announce: Announce
) -> Results:
    """Measure the chosen parts; `announce` is told what is under way."""
    environment = machine.describe(PACKAGES)
    # Everybody in one environment, so that all read with the same pyarrow and numpy.
    python = peers / "bin" / "python"
    environment["peers_installed"] = (peers / ".ready").exists()
    if not environment["peers_installed"]:
        python = Path(sys.executable)
    assigned, resumed, problem = [], [], ""
    if "assignment" in chosen:
        assigned = assignment.compare(python, profile.shapes, profile.rounds, announce)
    contests = [
        _contest(name, profile, python, scratch, announce) for name in FORMATS if name in chosen
    ]
    if "resume" in chosen:
        resumed, problem = resume.compare(python, profile.resume_samples, profile.rounds, announce)
    return Results(environment, assigned, contests, resumed, problem)


def _contest(
    name: str, profile: Profile, python: Path, scratch: Path, announce: Announce
) -> Contest:
    rows = {
        "parquet": profile.parquet_rows,
        "csv": profile.csv_rows,
        "tfrecord": profile.tfrecord_rows,
    }[name]
    sizes = profile.batch_sizes if name == "parquet" else profile.batch_sizes[:1]
    announce(f"writing {rows:,} rows of {name}")
    folder = scratch / name
    folder.mkdir()
    data = dataset.write(name, rows, folder / "data")
    race = Race(python, data, profile.converted_rows, folder, announce)
    contest = race.run(sizes, profile.rounds, profile.seconds)
    shutil.rmtree(folder)
    return contest
