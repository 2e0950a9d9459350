"""What commands share: options and values, the way to a coordinator, output, signals."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from rich.console import RenderableType
from rich.progress import Progress, ProgressColumn
from rich.table import Table
from rich.text import Text

from ..config import DEFAULT_URL
from ..display import count, json_text, open_console, plain
from ..errors import ConfigError, StrataError
from ..telemetry import ROOT, configure_logging

if TYPE_CHECKING:
    from ..client import Observer

T = TypeVar("T")


def add_command(subparsers: Any, name: str, help: str, description: str) -> Any:
    """Declare a command that has actions; returns where `add_action` adds them."""
    parser = subparsers.add_parser(name, help=help, description=description)
    return parser.add_subparsers(dest="action", metavar="ACTION", required=True)


def add_action(
    actions: Any, name: str, text: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    """Declare an action of a command, which can print JSON."""
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)
    return parser


def whole_between(least: int, most: int) -> Callable[[str], int]:
    """Reads a whole number within bounds."""

    def number(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be between {least} and {most}, not {value}")
        return value

    return number


def add_url(parser: argparse.ArgumentParser, *aliases: str) -> None:
    """Declare the option that names the coordinator."""
    text = f"coordinator (default: COORDINATOR_URL, else {DEFAULT_URL})"
    parser.add_argument("--url", *aliases, help=text)


def coordinator_url(options: argparse.Namespace) -> str:
    """The coordinator that a command is about."""
    return str(options.url or os.environ.get("COORDINATOR_URL") or DEFAULT_URL)


def observing(
    run: Callable[[Observer, str, argparse.Namespace], int],
) -> Callable[[argparse.Namespace], int]:
    """A command that is given a connection to its coordinator, and the URL."""

    def run_connected(options: argparse.Namespace) -> int:
        from ..client import Observer

        url = coordinator_url(options)
        with Observer(url) as observer:
            return run(observer, url, options)

    return run_connected


def write(
    report: msgspec.Struct, view: Callable[[], RenderableType], options: argparse.Namespace
) -> int:
    """Print a report, as JSON if asked; returns the exit code of success."""
    if options.json:
        print(json_text(report), flush=True)
    else:
        open_console().print(view())
    return 0


def listing(names: Iterable[str], left: Collection[str], wrapped: str = "") -> Table:
    """An empty table: columns in ``left`` are text, all others numbers."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for name in names:
        justify: Any = "left" if name in left else "right"
        table.add_column(name, justify=justify, no_wrap=name != wrapped)
    return table


def facts_table(facts: Iterable[tuple[str, RenderableType]]) -> Table:
    """Names and values, one pair in a line."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(Text(f"  {name}"), Text(value) if isinstance(value, str) else value)
    return table


def cut(items: Sequence[T], limit: int | None, noun: str) -> tuple[Sequence[T], list[Text]]:
    """The first ``limit`` items, and a line that says how many are not shown."""
    if limit is None or len(items) <= limit + 1:
        return items, []
    return items[:limit], [Text(f"  {count(len(items) - limit, noun)} not shown", "dim")]


def limit_on_terminal(limit: int) -> int | None:
    """How many items to show: on a terminal only some, elsewhere all (None)."""
    return limit if open_console().is_terminal else None


def confirm(question: str, refusal: StrataError) -> None:
    """Ask, and raise ``refusal`` without a yes; `ConfigError` without a terminal."""
    if not sys.stdin.isatty():
        raise ConfigError(f"{question} Cannot ask, since this is not a terminal: use --yes")
    print(f"{plain(question)} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise refusal


def progress_bar(*columns: ProgressColumn) -> Progress:
    """A bar on the terminal that is gone when it ends; nothing elsewhere."""
    console = open_console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def log_only_when_asked() -> None:
    """Write the log when ``STRATA_LOG`` (or ``RUST_LOG``) is set, else nothing."""
    if os.environ.get("STRATA_LOG") or os.environ.get("RUST_LOG"):
        configure_logging()
    else:
        logging.getLogger(ROOT).handlers[:] = [logging.NullHandler()]


@contextlib.contextmanager
def ending_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the command as an exception, as Ctrl-C does."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
