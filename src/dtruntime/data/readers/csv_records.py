"""Where CSV records end, seen as Arrow's parser sees it.

A quote opens a quoted field only where a field begins; inside, it is doubled. A line feed, a
carriage return or both end a record outside of quoted fields. Empty lines are no records.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ...errors import ShardError
from .format_reader import block_ends

MAX_RECORD = 64 * 2**20
"""A longer record is taken for one with a quote that never closes."""
_LF, _CR, _QUOTE = b'\n\r"'


@dataclass(frozen=True, slots=True)
class Lines:
    """The complete lines at the start of some bytes."""

    ends: NDArray[np.int64]
    """Behind the line ending of each."""
    filled: NDArray[np.bool_]
    """Whether it is a record, not an empty line."""


@dataclass(frozen=True, slots=True)
class CsvSegment:
    """Whole records in a row."""

    offset: int
    """Where they begin in the file."""
    first: int
    """How many records come before."""
    data: bytes
    lines: Lines

    @property
    def records(self) -> int:
        """How many records it has."""
        return int(np.count_nonzero(self.lines.filled))

    def blocks(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Counts, offsets and lengths of blocks of about ``BLOCK_BYTES``."""
        ends = self.lines.ends
        cuts = block_ends(ends)
        stops = ends[cuts]
        counts = np.diff(np.cumsum(self.lines.filled)[cuts], prepend=0)
        starts = np.concatenate(([0], stops[:-1]))
        return counts, starts + self.offset, stops - starts


def segments(
    chunks: Iterable[bytes], delimiter: str, name: str, offset: int = 0
) -> Iterator[CsvSegment]:
    """Cut a file's bytes from ``offset`` on into segments of whole records.

    Raises ``ShardError`` when a quoted field never ends; ``name`` is the file.
    """
    first = 0
    rest = b""
    for chunk in chunks:
        data = rest + chunk
        lines = find_lines(data, delimiter)
        used = int(lines.ends[-1]) if len(lines.ends) else 0
        if used:
            segment = CsvSegment(offset, first, data[:used], lines)
            yield segment
            first += segment.records
        offset, rest = offset + used, data[used:]
        if len(rest) > MAX_RECORD:
            break
    if rest:
        lines = find_lines(rest + b"\n", delimiter)
        if not len(lines.ends) or lines.ends[-1] < len(rest):
            raise _unterminated(name, first + int(lines.filled.sum()), offset, lines)
        yield CsvSegment(
            offset, first, rest, Lines(np.minimum(lines.ends, len(rest)), lines.filled)
        )


def find_lines(data: bytes, delimiter: str) -> Lines:
    """Return the complete lines that ``data`` starts with; it begins where a record does."""
    octets = np.frombuffer(data, np.uint8)
    stops = np.flatnonzero(octets == _LF)
    returns = np.flatnonzero(octets == _CR)
    if returns.size:
        bare = returns[:-1] if returns[-1] == len(data) - 1 else returns
        bare = bare[octets[bare + 1] != _LF]
        stops = np.sort(np.concatenate((stops, bare))) if bare.size else stops
    quotes = np.flatnonzero(octets == _QUOTE)
    if quotes.size:
        if not _plainly_quoted(octets, quotes, ord(delimiter)):
            return _find_lines_one_by_one(data, delimiter)
        stops = stops[np.searchsorted(quotes, stops) % 2 == 0]
    return _lines(octets, stops + 1)


def _plainly_quoted(octets: NDArray[np.uint8], quotes: NDArray[np.int64], delimiter: int) -> bool:
    """Whether each odd quote begins a field or is the second of a doubled one.

    Then, and only then, a byte is inside of a quoted field when an odd number comes before it.
    """
    opening = quotes[0::2]
    before = octets[opening - 1]
    fits = (before == delimiter) | (before == _LF) | (before == _CR) | (opening == 0)
    fits[1:] |= opening[1:] == quotes[1::2][: len(opening) - 1] + 1
    return bool(fits.all())


def _lines(octets: NDArray[np.uint8], ends: NDArray[np.int64]) -> Lines:
    lengths = np.diff(ends, prepend=0)
    filled = lengths > 1
    pairs = np.flatnonzero(lengths == 2)
    pairs = pairs[octets[ends[pairs] - 1] == _LF]
    filled[pairs] = octets[ends[pairs] - 2] != _CR
    return Lines(ends, filled)


def _find_lines_one_by_one(data: bytes, delimiter: str) -> Lines:
    """Find lines that have quotes in the midst of unquoted fields."""
    match = _record_pattern(delimiter).match
    ends: list[int] = []
    found = match(data)
    while found:
        ends.append(found.end())
        found = match(data, found.end())
    return _lines(np.frombuffer(data, np.uint8), np.array(ends, np.int64))


@lru_cache(maxsize=16)
def _record_pattern(delimiter: str) -> re.Pattern[bytes]:
    plain = rf"[^{re.escape(delimiter)}\r\n]*+"
    field = rf'(?:"(?:[^"]++|"")*+"(?!"){plain}|(?!"){plain})'
    record = rf"{field}(?:{re.escape(delimiter)}{field})*+(?:\r\n|\n|\r(?!\n|\Z))"
    return re.compile(record.encode())


def _unterminated(name: str, record: int, offset: int, lines: Lines) -> ShardError:
    start = offset + (int(lines.ends[-1]) if len(lines.ends) else 0)
    return ShardError(
        f"{name}: the record after {record} others, at byte {start}, has a quoted field that does "
        "not end: close its quote, or leave the file out"
    )
