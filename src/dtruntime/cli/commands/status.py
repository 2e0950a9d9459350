"""``strata status``: what a coordinator, its jobs and their workers do."""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

from rich.console import Console
from rich.live import Live

from ...client import Observer
from ...config import DEFAULT_URL
from ...display import json_text, open_console
from ...errors import ConnectionError
from ..invocation import log_only_when_asked
from ..status_report import StatusReport, read_status
from ..status_view import status_view


def add_parser(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "status",
        help="show a coordinator's jobs and workers",
        description="Show a coordinator, its jobs and their workers; workers with a problem come "
        "first. Exit code 3: it cannot be reached, 1: the named job does not exist.",
    )
    parser.add_argument("--url", help=f"coordinator (default: COORDINATOR_URL, else {DEFAULT_URL})")
    parser.add_argument("--job", help="only this job")
    parser.add_argument("--watch", action="store_true", help="refresh until Ctrl-C")
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="SECONDS", help="with --watch (default 1)"
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object (with --watch: one per line)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Show the status, once or again and again."""
    log_only_when_asked()
    url = coordinator_url(options)
    with Observer(url) as observer:
        if options.watch:
            _watch(observer, url, options)
        else:
            _write(read_status(observer, url, options.job), options, open_console())
    return 0


def coordinator_url(options: argparse.Namespace) -> str:
    """The coordinator that a command is about."""
    return str(options.url or os.environ.get("COORDINATOR_URL") or DEFAULT_URL)


def _write(report: StatusReport, options: argparse.Namespace, console: Console) -> None:
    if options.json:
        print(json_text(report, indent=not options.watch), flush=True)
    else:
        height = console.height if console.is_terminal else None
        console.print(status_view(report, console.width, height))


def _watch(observer: Observer, url: str, options: argparse.Namespace) -> None:
    """Show it until Ctrl-C; a coordinator that goes away is waited for."""
    console = open_console()
    report = read_status(observer, url, options.job)
    if options.json or not console.is_terminal:
        _print_again_and_again(observer, report, options, console)
        return
    stale_since: float | None = None
    seen = time.monotonic()
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                view = status_view(report, console.width, console.height, stale_since)
                live.update(view, refresh=True)
                time.sleep(options.interval)
                try:
                    report = read_status(observer, url, options.job)
                    seen, stale_since = time.monotonic(), None
                except ConnectionError:
                    stale_since = seen
    except KeyboardInterrupt:
        console.print(status_view(report, console.width, console.height, stale_since))


def _print_again_and_again(
    observer: Observer, report: StatusReport, options: argparse.Namespace, console: Console
) -> None:
    try:
        while True:
            _write(report, options, console)
            time.sleep(options.interval)
            report = read_status(observer, report.coordinator.url, options.job)
    except KeyboardInterrupt:
        return
