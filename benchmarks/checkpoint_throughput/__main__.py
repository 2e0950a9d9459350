"""`python -m benchmarks.checkpoint_throughput`: measure, show, save."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from . import plot, report, session
from .profiles import FULL, QUICK

RESULTS = Path(__file__).parents[1] / "results"


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.checkpoint_throughput",
        description="Measure saves and loads beside the disk, the memory and other libraries.",
    )
    parser.add_argument("--quick", action="store_true", help="ten minutes, noisier numbers")
    parser.add_argument(
        "--only", action="append", choices=session.PARTS, help="measure this; repeatable"
    )
    parser.add_argument(
        "--data-dir",
        type=Path,
        help="where checkpoints are written, on the disk to measure (default: a temporary folder)",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS,
        help="folder for checkpoint_throughput.json and .png",
    )
    return parser.parse_args()


def main() -> int:
    """Run the benchmark; the exit status is 1 when Strata itself could not be measured."""
    options = arguments()
    # As Ctrl-C does: leave through the context managers, which stop what is running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    console, progress = Console(), Console(stderr=True)
    if options.data_dir:
        options.data_dir.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="strata-bench-", dir=options.data_dir) as scratch,
        progress.status("starting") as status,
    ):
        results = session.run(
            QUICK if options.quick else FULL,
            options.only or session.PARTS,
            Path(scratch),
            status.update,
        )
    report.show(results, console)
    report.save(results, options.results / "checkpoint_throughput.json")
    plot.draw(results, options.results / "checkpoint_throughput.png")
    return 1 if results.strata_failed() else 0


if __name__ == "__main__":
    sys.exit(main())
