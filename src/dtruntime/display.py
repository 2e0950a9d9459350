"""How the command line writes times, sizes and counts."""

from __future__ import annotations

import io
import os
import sys

from rich.console import Console
from rich.filesize import decimal

PIPE_WIDTH = 160
"""Columns of output that goes to no terminal, unless ``COLUMNS`` says otherwise."""


def open_console(*, colour: bool = True, stderr: bool = False) -> Console:
    """The console of a command; what its encoding lacks is replaced, never an error."""
    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")
    width = None if stream.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    return Console(
        file=stream,
        width=width,
        highlight=False,
        color_system="auto" if colour else None,
    )


def size(number: int) -> str:
    """Bytes in decimal units: ``1.2 MB``."""
    return decimal(number)


def count(number: int, noun: str) -> str:
    """A number of things: ``1 barrier``, ``1,200 barriers``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """A time in two or three digits of its largest units: ``1.8 ms``, ``4.2 s``, ``2 h 05 m``."""
    if seconds < 0:
        return f"-{duration(-seconds)}"
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (60.0, 1.0, "s")):
        if seconds < limit * 0.9995:
            amount = seconds * factor
            return f"{amount:.0f} {unit}" if amount >= 99.5 else f"{amount:.1f} {unit}"
    minutes, hours, days = seconds / 60, seconds / 3600, seconds / 86400
    if minutes < 60:
        return f"{int(minutes)} m {int(seconds % 60):02d} s"
    if hours < 24:
        return f"{int(hours)} h {int(minutes % 60):02d} m"
    return f"{int(days)} d {int(hours % 24)} h"
