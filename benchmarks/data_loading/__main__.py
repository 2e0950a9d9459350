"""`python -m benchmarks.data_loading`: measure, show, save."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from . import plot, report, session
from .contenders import Kind
from .isolated import ProcessFailed
from .profiles import FULL, QUICK

HERE = Path(__file__).parents[1]
RESULTS = HERE / "results"
PEERS = HERE.parent / ".venv-peers"


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.data_loading",
        description="Measure assignment, loading and resuming beside plain reading and peers.",
    )
    parser.add_argument("--quick", action="store_true", help="two minutes, noisier numbers")
    parser.add_argument(
        "--only", action="append", choices=session.PARTS, help="measure this; repeatable"
    )
    parser.add_argument(
        "--peers", type=Path, default=PEERS, help="environment with the other libraries"
    )
    parser.add_argument(
        "--data-dir", type=Path, help="where the data is written (default: a temporary folder)"
    )
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="folder for data_loading.json and .png"
    )
    return parser.parse_args()


def main() -> int:
    """Run the benchmark; the exit status is 1 when Strata itself could not be measured."""
    options = arguments()
    # As Ctrl-C does: leave through the context managers, which stop the contenders.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    console, progress = Console(), Console(stderr=True)
    if options.data_dir:
        options.data_dir.mkdir(parents=True, exist_ok=True)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="strata-bench-", dir=options.data_dir) as scratch,
            progress.status("starting") as status,
        ):
            results = session.run(
                QUICK if options.quick else FULL,
                options.only or session.PARTS,
                options.peers,
                Path(scratch),
                status.update,
            )
    except ProcessFailed as exc:
        progress.print(f"error: {exc}", style="red", markup=False, highlight=False)
        return 1
    report.show(results, console)
    report.save(results, options.results / "data_loading.json")
    plot.draw(results, options.results / "data_loading.png")
    return 1 if any(r.entry.kind is Kind.STRATA for r in results.failures()) else 0


if __name__ == "__main__":
    sys.exit(main())
