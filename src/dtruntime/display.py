"""How the command line writes: what a terminal would obey is shown, and amounts in units.

Names, paths, metadata and messages come from files and from the wire. Nothing of them may move the
cursor, change colours or the title, or reorder what is read: `open_console` and `plain` see to it.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Iterable
from typing import Any

import msgspec
from rich.console import Console, ConsoleOptions, RenderableType
from rich.filesize import decimal
from rich.segment import Segment
from rich.text import Text

PIPE_WIDTH = 160
"""Columns of output that goes to no terminal, unless ``COLUMNS`` says otherwise."""

_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
)
"""Control characters but newlines and tabs, and those that change the direction of text."""


def plain(text: str) -> str:
    """Text in which characters that a terminal obeys are written as escapes: ``\\x1b``."""
    return _OBEYED.sub(_escape, text)


def json_text(value: Any, *, indent: bool = True) -> str:
    """A value as JSON, with escapes for characters that a terminal obeys."""
    encoded = msgspec.json.encode(value)
    encoded = msgspec.json.format(encoded) if indent else encoded
    return _OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", encoded.decode())


def _escape(found: re.Match[str]) -> str:
    number = ord(found[0])
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"


class _PlainConsole(Console):
    """A console that styles what it is given, and lets nothing in it be obeyed."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Text of a string, escaped before it is laid out."""
        return super().render_str(plain(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Segments of anything; what Rich itself tells the terminal is not text."""
        for segment in super().render(renderable, options):
            if segment.control or not _OBEYED.search(segment.text):
                yield segment
            else:
                yield Segment(plain(segment.text), segment.style)


def open_console(*, colour: bool = True, stderr: bool = False) -> Console:
    """The console of a command; what its encoding lacks is replaced, never an error."""
    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")
    width = None if stream.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    return _PlainConsole(
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
