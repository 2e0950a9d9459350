"""`python -m benchmarks.data_loading`: assignment, loading and resuming, part by part."""

from __future__ import annotations

import argparse
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dtruntime.bench.report import Announce

from ..harness import Benchmark, BenchmarkError, Kind, Outcome, busy_note, environment
from ..processes import ProcessFailed
from . import assignment, dataset, report, resume
from .assignment import Shape
from .race import Contest, Race

PEERS = Path(__file__).parents[2] / ".venv-peers"
FORMATS = ("parquet", "csv", "tfrecord")
PACKAGES = ("dtruntime", "numpy", "pyarrow")
NOTE = (
    "Medians of interleaved rounds, each contender in a process of its own, files in the page "
    "cache. Spread is best minus worst round, of the median. The reference's figures are its own "
    "claims, on 64 cores."
)
LOADING_NOTE = (
    "The limit is the fastest way to decode the same rows without a loader. MB/s are of decoded "
    "columns. Prep. is indexing for Strata, conversion for the others; Streaming and LitData "
    "converted a part of the rows only. CPU of loader processes counts where they have ended."
)


@dataclass(frozen=True, slots=True)
class Profile:
    """Rounds and sizes of one run."""

    rounds: int
    seconds: float
    """A pass over the data is cut off so long after its first batch."""
    shapes: tuple[Shape, ...]
    rows: dict[str, int]
    converted_rows: int
    """How many of the rows are converted for libraries that write one sample at a time."""
    batch_sizes: tuple[int, ...] = (4096, 256)
    resume_samples: tuple[int, ...] = (10**7, 10**9)


SHAPES = ((10, 1_000), (100, 10_000), (1_000, 100_000))
FULL = Profile(
    rounds=5,
    seconds=2.5,
    shapes=(*SHAPES, (10_000, 1_000_000)),
    rows={"parquet": 4_000_000, "csv": 400_000, "tfrecord": 200_000},
    converted_rows=250_000,
)
QUICK = Profile(
    rounds=2,
    seconds=1.0,
    shapes=SHAPES,
    rows={"parquet": 800_000, "csv": 80_000, "tfrecord": 40_000},
    converted_rows=50_000,
)


def measure(options: argparse.Namespace, scratch: Path, announce: Announce) -> Outcome:
    """Measure the chosen parts."""
    try:
        return _measure(options, scratch, announce)
    except ProcessFailed as exc:
        raise BenchmarkError(str(exc)) from exc


def _measure(options: argparse.Namespace, scratch: Path, announce: Announce) -> Outcome:
    profile = QUICK if options.quick else FULL
    has_peers = (options.peers / ".ready").exists()
    here = environment(PACKAGES, peers_installed=has_peers)
    # Everybody in one environment, so that all read with the same pyarrow and numpy.
    python = options.peers / "bin" / "python" if has_peers else Path(sys.executable)
    assigned, resumed, problem = [], [], ""
    if "assignment" in options.only:
        assigned = assignment.compare(python, profile.shapes, profile.rounds, announce)
    contests = [
        _contest(name, profile, python, scratch, announce)
        for name in FORMATS
        if name in options.only
    ]
    if "resume" in options.only:
        resumed, problem = resume.compare(python, profile.resume_samples, profile.rounds, announce)
    runners = [runner for contest in contests for runner in contest.runners]
    failures = [runner for runner in runners if runner.error]
    problems = [f"{runner.entry.name}: {runner.error}" for runner in failures]
    results = assigned, contests, resumed
    return Outcome(
        tables=list(report.tables(*results)),
        document={
            "environment": here,
            "assignment": [{**asdict(a), "published": a.published} for a in assigned],
            "loading": [_document(contest) for contest in contests],
            "resume": resumed,
            "resume_problem": problem,
        },
        targets=[
            *assignment.targets(assigned),
            *(target for contest in contests for target in contest.targets()),
            *resume.targets(resumed),
        ],
        notes=[NOTE, *([LOADING_NOTE] if contests else []), *busy_note(here)],
        problems=[*problems, *([f"resuming with Streaming: {problem}"] if problem else [])],
        panels=list(report.panels(*results)),
        failed=any(runner.entry.kind is Kind.STRATA for runner in failures),
    )


def _contest(
    name: str, profile: Profile, python: Path, scratch: Path, announce: Announce
) -> Contest:
    rows = profile.rows[name]
    sizes = profile.batch_sizes if name == "parquet" else profile.batch_sizes[:1]
    announce(f"writing {rows:,} rows of {name}")
    folder = scratch / name
    data = dataset.write(name, rows, folder / "data")
    race = Race(python, data, profile.converted_rows, folder, announce)
    contest = race.run(sizes, profile.rounds, profile.seconds)
    shutil.rmtree(folder)
    return contest


def _document(contest: Contest) -> dict[str, Any]:
    contenders = []
    for runner in contest.runners:
        summaries = {
            size: {**asdict(summary), "of_plain_reading": contest.ratio(summary, size)}
            for size in contest.batch_sizes
            if (summary := runner.summary(size)) is not None
        }
        contenders.append({**asdict(runner), "by_batch_size": summaries})
    data = {**asdict(contest.data), "folder": contest.data.folder.name}
    return {"data": data, "contenders": contenders}


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peers", type=Path, default=PEERS, help="environment with the other libraries"
    )


BENCHMARK = Benchmark(
    name="data_loading",
    description="assignment, loading and resuming beside plain reading and other libraries",
    quick="four minutes",
    measure=measure,
    parts=("assignment", *FORMATS, "resume"),
    options=_options,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
