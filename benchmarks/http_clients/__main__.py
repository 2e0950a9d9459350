"""`python -m benchmarks.http_clients`: measure, show, save."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from ..coordinator.load import LoadError
from ..coordinator.tools import SetupError, find_tools
from . import report, session

RESULTS = Path(__file__).parents[1] / "results"


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.http_clients",
        description="Measure heartbeats while streams of events are read.",
    )
    parser.add_argument("--quick", action="store_true", help="about a minute, noisier numbers")
    parser.add_argument("--server-cores", default="0", help="cores of the server (default: 0)")
    parser.add_argument("--load-cores", default="1", help="cores of the load (default: 1)")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="folder for http_clients.json and .png"
    )
    return parser.parse_args()


def main() -> int:
    """Run the benchmark; the exit status is 1 when it could not, or when calls failed."""
    options = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    console, progress = Console(), Console(stderr=True)
    profile = session.QUICK if options.quick else session.FULL
    try:
        tools = find_tools(options.server_cores, options.load_cores)
        with (
            tempfile.TemporaryDirectory(prefix="strata-bench-") as scratch,
            progress.status("starting") as status,
        ):
            results = session.run(tools, profile, Path(scratch), status.update)
    except (SetupError, LoadError) as exc:
        progress.print(f"error: {exc}", style="red", markup=False, highlight=False)
        return 1
    report.show(results, console)
    report.save(results, options.results / "http_clients.json")
    report.draw(results, options.results / "http_clients.png")
    failed = sum(one.sample.failed for some in results.measured.values() for one in some)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
