"""`python -m benchmarks.coordinator`: measure, show, save."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path

import grpc
import psutil
from rich.console import Console

from . import plot, report, session
from .load import LoadError
from .profiles import FULL, QUICK
from .tools import SetupError, find_tools

RESULTS = Path(__file__).parents[1] / "results"


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.coordinator",
        description="Measure the coordinator with h2load and verify its replies with k6.",
    )
    parser.add_argument("--quick", action="store_true", help="about a minute, noisier numbers")
    parser.add_argument(
        "--only", action="append", choices=session.OPERATIONS, help="measure this; repeatable"
    )
    parser.add_argument("--server-cores", default="0", help="cores of the servers (default: 0)")
    parser.add_argument("--load-cores", default="1", help="cores of the load (default: 1)")
    parser.add_argument(
        "--data-dir", type=Path, help="where the coordinators store (default: a temporary folder)"
    )
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="folder for coordinator.json and .png"
    )
    return parser.parse_args()


def main() -> int:
    """Run the benchmark; the exit status is 1 when it could not, or when replies were wrong."""
    options = arguments()
    # As Ctrl-C does: leave through the context managers, which stop the servers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    console, progress = Console(), Console(stderr=True)
    if options.data_dir:
        options.data_dir.mkdir(parents=True, exist_ok=True)
    try:
        tools = find_tools(options.server_cores, options.load_cores)
        with (
            tempfile.TemporaryDirectory(prefix="strata-bench-", dir=options.data_dir) as scratch,
            progress.status("starting") as status,
        ):
            results = session.run(
                tools,
                QUICK if options.quick else FULL,
                options.only or session.OPERATIONS,
                Path(scratch),
                status.update,
            )
    except (SetupError, LoadError) as exc:
        return _give_up(progress, str(exc))
    except psutil.NoSuchProcess as exc:
        return _give_up(progress, f"a server ended while it was measured ({exc})")
    except grpc.RpcError as exc:
        return _give_up(progress, f"a call that prepares the load failed: {exc}")
    report.show(results, console)
    report.save(results, options.results / "coordinator.json")
    if results.operations:
        plot.draw(results, options.results / "coordinator.png")
    return 1 if any(measured.failed() for measured in results.operations) else 0


def _give_up(console: Console, message: str) -> int:
    console.print(f"error: {message}", style="red", markup=False, highlight=False)
    return 1


if __name__ == "__main__":
    sys.exit(main())
