"""Output of the command line: control characters are escaped, and amounts have units.

Names, paths, metadata and messages come from files and from the network. They must not move the
cursor, change colours or the title, or reorder text: `open_console` and `plain` make sure of it.
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
"""The width of output that does not go to a terminal, unless ``COLUMNS`` is set."""

_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
)
"""Control characters except newlines and tabs, and those that change the direction of text."""


def plain(text: str) -> str:
    """Text with control characters written as escapes: ``\\x1b``."""
    return _CONTROL.sub(_escape, text)


def json_text(value: Any, *, indent: bool = True) -> str:
    """A value as JSON, with control characters escaped."""
    encoded = msgspec.json.encode(value)
    encoded = msgspec.json.format(encoded) if indent else encoded
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", encoded.decode())


def _escape(match: re.Match[str]) -> str:
    number = ord(match[0])
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"


class _PlainConsole(Console):
    """A console that escapes control characters in whatever it prints."""

    def render_str(self, text: str, **options: Any) -> Text:
        """A string as text, escaped before it is laid out."""
        return super().render_str(plain(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Escaped segments; Rich's own control codes are not text."""
        for segment in super().render(renderable, options):
            if segment.control or not _CONTROL.search(segment.text):
                yield segment
            else:
                yield Segment(plain(segment.text), segment.style)


def open_console(*, colour: bool = True, stderr: bool = False) -> Console:
    """The console of a command; characters that its encoding lacks are replaced."""
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
    """A duration in its largest units: ``1.8 ms``, ``4.2 s``, ``2 h 05 m``."""
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
