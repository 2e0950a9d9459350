"""``strata demo``: see it work on this machine."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..config import ENVIRONMENT
from ..display import open_console
from ..errors import StrataError
from .invocation import ending_on_signals, whole_between

KEPT_FOLDER = ".strata-demo"
LAUNCHER_VARIABLES = (
    "COORDINATOR_URL",
    "RANK",
    "SLURM_RESTART_COUNT",
    "STRATA_ATTEMPT",
    "STRATA_JOB",
    "TORCHELASTIC_RESTART_COUNT",
    "WORKER_ID",
    "WORLD_SIZE",
)


def add_parser(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "demo",
        help="train a model on this machine, kill a worker, and see that nothing is lost",
        description="Start a coordinator and workers as processes on this machine, on loopback "
        "only. They train a small model on parquet files; one of them is killed and replaced. "
        "Then the same is done undisturbed, and what came out is compared: exit code 0 means "
        "that no sample was lost or repeated, and that the weights are the same bit for bit.",
    )
    for name, least, most, default, what in (
        ("--workers", 1, 64, 4, "worker processes"),
        ("--epochs", 1, 1000, 3, "times that the workers read all data"),
        ("--samples", 1000, 10_000_000, 24_000, "pictures to train on"),
        ("--seed", 0, 2**32 - 1, 0, "the same seed gives the same data and the same model"),
    ):
        parser.add_argument(
            name,
            type=whole_between(least, most),
            default=default,
            metavar="N",
            help=f"{what} (default {default})",
        )
    parser.add_argument(
        "--kill",
        choices=["worker", "coordinator", "none"],
        default="worker",
        help="what is killed in the middle (default worker)",
    )
    parser.add_argument(
        "--keep",
        nargs="?",
        const=KEPT_FOLDER,
        metavar="DIR",
        help=f"work in DIR (default {KEPT_FOLDER}), and keep data, checkpoints and logs there",
    )
    parser.add_argument(
        "--stay",
        action=argparse.BooleanOptionalAction,
        help="at the end keep the dashboard until Enter is pressed (default: in a terminal)",
    )
    parser.add_argument("--plain", action="store_true", help="lines of text, no live table")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the demonstration; 0 when all its checks passed."""
    if importlib.util.find_spec("pyarrow") is None:
        raise StrataError(
            "the demo trains from parquet files and needs pyarrow, which is not installed: "
            "pip install pyarrow"
        )
    # Here, since no other command should pay for loading numpy and the demo.
    from ..demo.demonstration import DemoFailed, Demonstration
    from ..demo.proof import Kill
    from ..demo.scenario import Scenario
    from ..demo.terminal_view import TerminalView

    _isolate()
    console = open_console(colour=not options.plain)
    stay: bool | None = options.stay
    with ending_on_signals(), _workspace(options.keep) as root:
        plan = Scenario(
            root=str(root),
            workers=options.workers,
            epochs=options.epochs,
            seed=options.seed,
            total_samples=options.samples,
        )
        view = TerminalView(console, plain=options.plain or not console.is_terminal)
        view.began(plan)
        try:
            with Demonstration(plan, Kill(options.kill), view) as demonstration:
                with view:
                    outcome = demonstration.run()
                view.ended(outcome, kept_at=options.keep)
                if demonstration.dashboard and (_is_watched() if stay is None else stay):
                    view.stays(demonstration.dashboard)
                    sys.stdin.readline()
        except DemoFailed as failure:
            view.failed(failure, kept_at=options.keep)
            return 1
        except (KeyboardInterrupt, SystemExit):
            view.interrupted()
            raise
    return 0 if outcome.passed else 1


def _is_watched() -> bool:
    """Whether a person is at the terminal."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()


@contextlib.contextmanager
def _workspace(folder: str | None) -> Iterator[Path]:
    """A folder for the run: the one named, else a temporary one that is removed."""
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="strata-demo-", ignore_cleanup_errors=True) as name:
            yield Path(name)
        return
    from ..demo.scenario import PLAN_FILE

    path = Path(folder).absolute()
    if path.exists() and not path.is_dir():
        raise StrataError(f"{folder} is a file: name a folder for the demo")
    if path.exists() and any(path.iterdir()):
        if not (path / PLAN_FILE).exists():
            raise StrataError(
                f"{folder} is not empty and was not made by the demo: name another folder"
            )
        shutil.rmtree(path)
    path.mkdir(parents=True, exist_ok=True)
    yield path


def _isolate() -> None:
    """Keep the surroundings out of the run, here and in the processes it starts.

    Variables of a launcher would place the workers into another run, and gRPC would send even
    loopback traffic to a proxy.
    """
    for name in (*ENVIRONMENT, *LAUNCHER_VARIABLES):
        os.environ.pop(name, None)
    os.environ["no_grpc_proxy"] = "127.0.0.1"  # noqa: SIM112 - gRPC knows no other spelling
