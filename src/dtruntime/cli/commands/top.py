"""``strata top``: a job as it runs, in a terminal."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import Any

from rich.console import Console
from rich.live import Live

from ...client import Observer
from ...config import DEFAULT_URL
from ...display import open_console
from ..invocation import log_only_when_asked
from ..status_watch import SORTS, Keys, Poller, WatchState, read_frame, top_view
from .status import coordinator_url

FRAME_SECONDS = 0.5
"""How often the picture is drawn without a reason: ages grow, and windows change."""


def add_parser(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "top",
        help="watch a job live: workers, barriers, checkpoints, throughput, journal",
        description="Watch a job until q. Keys: s sorts by something else, arrows and Page Up/Down "
        "scroll, Tab shows the next job, p pauses. A coordinator that goes away is waited for. "
        "Without a terminal it is shown once. Exit code 3: it cannot be reached, 1: the named job "
        "does not exist.",
    )
    parser.add_argument("--url", help=f"coordinator (default: COORDINATOR_URL, else {DEFAULT_URL})")
    parser.add_argument("--job", help="this job (default: the one with the most live workers)")
    parser.add_argument("--sort", choices=SORTS, default=SORTS[0], help="order of the workers")
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="SECONDS", help="between looks (default 1)"
    )
    parser.add_argument("--once", action="store_true", help="show it once, without keys")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Show the job, once or until q."""
    log_only_when_asked()
    url = coordinator_url(options)
    console = open_console()
    with Observer(url) as observer:
        look = read_frame(observer, url, options.job)
        state = WatchState(look, options.sort)
        if options.once or not (console.is_terminal and sys.stdin.isatty()):
            height = console.height if console.is_terminal else None
            console.print(top_view(state, console.width, height))
        else:
            _watch(Poller(observer, url, options.interval, look), state, console)
    return 0


def _watch(poller: Poller, state: WatchState, console: Console) -> None:
    """Draw until q or Ctrl-C."""
    with (
        contextlib.suppress(KeyboardInterrupt),
        Keys(sys.stdin.fileno()) as keys,
        Live(console=console, screen=True, auto_refresh=False) as live,
        poller.running(keys.wake) as looks,
    ):
        while not state.done:
            live.update(top_view(state, console.width, console.height), refresh=True)
            for key in keys.read(FRAME_SECONDS):
                state.press(key)
            looks.job = state.job_name
            state.see(looks.newest)
