"""Values on the command line."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType

from ..telemetry import ROOT, configure_logging


def whole_between(least: int, most: int) -> Callable[[str], int]:
    """Reads a whole number within bounds."""

    def number(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be between {least} and {most}, not {value}")
        return value

    return number


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
