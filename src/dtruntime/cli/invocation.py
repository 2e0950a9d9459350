"""What commands share: options and values, the way to a coordinator, output, signals."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType

import msgspec
from rich.console import RenderableType
from rich.progress import Progress, ProgressColumn

from ..client import Observer
from ..config import DEFAULT_URL
from ..display import json_text, open_console, plain
from ..errors import ConfigError, StrataError
from ..telemetry import ROOT, configure_logging


def whole_between(least: int, most: int) -> Callable[[str], int]:
    """Reads a whole number within bounds."""

    def number(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be between {least} and {most}, not {value}")
        return value

    return number


def add_url(parser: argparse.ArgumentParser, *aliases: str) -> None:
    """Declare the option that says which coordinator a command is about."""
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
        log_only_when_asked()
        url = coordinator_url(options)
        with Observer(url) as observer:
            return run(observer, url, options)

    return run_connected


def write(
    report: msgspec.Struct, view: Callable[[], RenderableType], options: argparse.Namespace
) -> int:
    """Print a report, as JSON where that is asked for; the exit code of having done so."""
    if options.json:
        print(json_text(report), flush=True)
    else:
        open_console().print(view())
    return 0


def confirm(question: str, refusal: StrataError) -> None:
    """Ask, and raise ``refusal`` without a yes; `ConfigError` where nobody can answer."""
    if not sys.stdin.isatty():
        raise ConfigError(f"{question} There is nobody to answer: say --yes")
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
