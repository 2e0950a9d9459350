"""``strata status``: what a coordinator, its jobs and their workers do."""

from __future__ import annotations

import argparse
import time
from typing import Any

from rich.console import Console

from ...client import Observer
from ...display import json_text, open_console
from ..invocation import add_url, observing, whole_between
from ..status_report import StatusReport, read_status
from ..status_view import status_view
from ..status_watch import EVENTS_KEPT, SORTS, event_line, watch


def add_parser(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "status",
        help="show a coordinator's jobs and workers",
        description="Show a coordinator, its jobs and their workers; workers with a problem come "
        "first. Keys with --watch in a terminal: q quits, s sorts by something else, arrows and "
        "Page Up/Down scroll, Tab shows the next job, p pauses. A coordinator that goes away is "
        "waited for. Exit code 3: it cannot be reached, 1: the named job does not exist.",
    )
    add_url(parser)
    parser.add_argument("--job", help="only this job")
    parser.add_argument("--watch", action="store_true", help="refresh until q or Ctrl-C")
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="SECONDS", help="with --watch (default 1)"
    )
    parser.add_argument(
        "--sort", choices=SORTS, default=SORTS[0], help="order of the workers with --watch"
    )
    parser.add_argument(
        "--events",
        type=whole_between(0, EVENTS_KEPT),
        default=0,
        metavar="N",
        help="also print the newest N entries of the journal (not with --json or --watch)",
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object (with --watch: one per line)"
    )
    parser.set_defaults(run=observing(run))


def run(observer: Observer, url: str, options: argparse.Namespace) -> int:
    """Show the status, once or again and again."""
    console = open_console()
    if not options.watch:
        _write(read_status(observer, url, options.job), options, console)
        if options.events and not options.json:
            _write_events(observer, options, console)
    elif options.json or not console.is_terminal:
        _print_again_and_again(observer, url, options, console)
    else:
        watch(observer, url, options.job, options.sort, options.interval, console)
    return 0


def _write(report: StatusReport, options: argparse.Namespace, console: Console) -> None:
    if options.json:
        print(json_text(report, indent=not options.watch), flush=True)
    else:
        height = console.height if console.is_terminal else None
        console.print(status_view(report, console.width, height))


def _write_events(observer: Observer, options: argparse.Namespace, console: Console) -> None:
    console.print()
    for event in observer.events(options.job or "")[-options.events :]:
        console.print(event_line(event))


def _print_again_and_again(
    observer: Observer, url: str, options: argparse.Namespace, console: Console
) -> None:
    try:
        while True:
            _write(read_status(observer, url, options.job), options, console)
            time.sleep(options.interval)
    except KeyboardInterrupt:
        return
