"""The CSV reader: rows by blocks of bytes, with types that fit all files of a dataset.

Record boundaries are those of Arrow's parser: a quote opens a quoted field only at the start of a
field; inside, it is doubled. A line feed, a carriage return or both end a record outside of quoted
fields. Empty lines are not records.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
from numpy.typing import NDArray

from ...errors import ShardError
from ...storage import ByteSource, FileStat
from ...storage.backend import changed
from .compression import compression_of
from .format_reader import (
    BATCH_BYTES,
    Advance,
    CsvOptions,
    IndexedFile,
    Ints,
    RecordReader,
    RowBlocks,
    SchemaConflict,
    check_names,
    describe_difference,
    format_of,
    head_of,
    wrong_format,
)

BOM = b"\xef\xbb\xbf"
TEXT = pa.string()
MAX_RECORD = 64 * 2**20
"""A longer record is treated as one with a quote that is never closed."""
_PARSER_BLOCK = 2**20
_ENDINGS = ("", ".gz", ".bz2", ".zst")
_LF, _CR, _QUOTE = b'\n\r"'


@dataclass(frozen=True, slots=True)
class Lines:
    """The complete lines at the start of some bytes."""

    ends: Ints
    """Where each one ends, line ending included."""
    filled: NDArray[np.bool_]
    """Whether it is a record, not an empty line."""


@dataclass(frozen=True, slots=True)
class CsvSegment:
    """Consecutive whole records."""

    offset: int
    """Where they begin in the file."""
    first: int
    """How many records come before."""
    data: bytes
    lines: Lines

    @property
    def records(self) -> int:
        """The number of records."""
        return int(np.count_nonzero(self.lines.filled))

    def blocks(self) -> RowBlocks:
        """The records in blocks."""
        return RowBlocks.cut(self.lines.ends, np.cumsum(self.lines.filled), self.offset)


def segments(
    chunks: Iterable[bytes], delimiter: str, name: str, offset: int = 0
) -> Iterator[CsvSegment]:
    """Divide a file's bytes from ``offset`` on into segments of whole records.

    Raises ``ShardError`` when a quoted field never ends; ``name`` is the file's.
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


def _plainly_quoted(octets: NDArray[np.uint8], quotes: Ints, delimiter: int) -> bool:
    """Whether each odd quote begins a field or is the second of a doubled one.

    Exactly then a byte is inside a quoted field when an odd number of quotes comes before it.
    """
    opening = quotes[0::2]
    before = octets[opening - 1]
    fits = (before == delimiter) | (before == _LF) | (before == _CR) | (opening == 0)
    fits[1:] |= opening[1:] == quotes[1::2][: len(opening) - 1] + 1
    return bool(fits.all())


def _lines(octets: NDArray[np.uint8], ends: Ints) -> Lines:
    lengths = np.diff(ends, prepend=0)
    filled = lengths > 1
    pairs = np.flatnonzero(lengths == 2)
    pairs = pairs[octets[ends[pairs] - 1] == _LF]
    filled[pairs] = octets[ends[pairs] - 2] != _CR
    return Lines(ends, filled)


def _find_lines_one_by_one(data: bytes, delimiter: str) -> Lines:
    """Find lines that have quotes in the middle of unquoted fields."""
    match = _record_pattern(delimiter).match
    ends: list[int] = []
    record = match(data)
    while record:
        ends.append(record.end())
        record = match(data, record.end())
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


class CsvParser:
    """Parses records of one file."""

    def __init__(self, delimiter: str, names: Sequence[str]) -> None:
        self.names = list(names)
        self._delimiter = delimiter

    def parse(
        self,
        data: bytes,
        types: Mapping[str, pa.DataType],
        columns: Sequence[str] | None = None,
        longest: int = 0,
        threads: bool = True,
    ) -> pa.Table:
        """Return a table of records; ``pa.ArrowInvalid`` when one does not fit.

        Types that are not given are inferred. No record is longer than ``longest``.
        """
        if data.startswith(BOM):  # Arrow would remove it, and the file's own is already removed
            data = b"\n" + data
        quoted = b'"' in data
        block = max(_PARSER_BLOCK, longest + 1)
        return arrow_csv.read_csv(
            pa.BufferReader(data),
            arrow_csv.ReadOptions(column_names=self.names, block_size=block, use_threads=threads),
            arrow_csv.ParseOptions(delimiter=self._delimiter, newlines_in_values=quoted),
            arrow_csv.ConvertOptions(column_types=dict(types), include_columns=columns),
        )


class TypeLearner:
    """Infers types that fit each segment of a file."""

    def __init__(self, url: str, parser: CsvParser, given: Mapping[str, pa.DataType]) -> None:
        self._url = url
        self._parser = parser
        self._given = {name: kind for name, kind in given.items() if name in parser.names}
        self._schema: pa.Schema | None = None
        self.doubtful: set[str] = set()
        """Columns whose type has changed after earlier values fitted it."""

    @property
    def schema(self) -> pa.Schema:
        """The columns and their types so far."""
        if self._schema is None:
            types = [(name, self._given.get(name, pa.null())) for name in self._parser.names]
            self._schema = pa.schema(types)
        return self._schema

    def learn(self, segment: CsvSegment) -> None:
        """Make the types fit one more segment, which has records."""
        longest = int(np.diff(segment.lines.ends, prepend=0).max())
        rows = self._confirm(segment, longest)
        if rows is None:
            rows = self._infer(segment, longest)
        if rows != segment.records:
            raise ShardError(
                f"{self._url}: {segment.records} records from byte {segment.offset} on "
                f"parse as {rows}: quote the fields that have line endings or quotes in them"
            )

    def _confirm(self, segment: CsvSegment, longest: int) -> int | None:
        """Return the number of rows when the segment fits the types so far."""
        if self._schema is None:
            return None
        types = {field.name: field.type for field in self._schema}
        columns = [name for name, kind in types.items() if not is_text(kind)]
        try:
            table = self._parser.parse(
                segment.data, types, columns or self._parser.names[:1], longest
            )
        except pa.ArrowInvalid:
            return None
        return int(table.num_rows)

    def _infer(self, segment: CsvSegment, longest: int) -> int:
        try:
            table = self._parser.parse(segment.data, self._given, None, longest)
        except pa.ArrowInvalid as exc:
            raise self._error(segment, exc) from exc
        earlier, inferred = self._schema or table.schema, table.schema
        self._schema = merge_schemas(earlier, inferred)
        for schema in (earlier, inferred):
            self.doubtful.update(widened(schema, self._schema))
        return int(table.num_rows)

    def _error(self, segment: CsvSegment, reason: Exception) -> ShardError:
        """The error for a segment that could not be parsed: what is wrong, and where."""
        try:
            self._parser.parse(segment.data, self._given, None, len(segment.data), threads=False)
        except pa.ArrowInvalid as exc:
            reason = exc  # a single thread knows the row
        text = " ".join(str(reason).split())
        row = re.search(r"Row #(\d+): ", text)
        if row:
            place, detail = f"row {segment.first + int(row[1]) - 1}", text[row.end() :]
        else:
            place = f"between rows {segment.first} and {segment.first + segment.records}"
            detail = text.removeprefix("In ")
        return ShardError(
            f"{self._url}: {place} (from byte {segment.offset}) does not fit the others: "
            f"{detail[:300]}; correct it, or choose another delimiter or type"
        )


def take_header(
    file: FileStat, delimiter: str, header: bool, segment: CsvSegment
) -> tuple[list[str], CsvSegment]:
    """Return the columns' names, and the segment without its header."""
    filled = np.flatnonzero(segment.lines.filled)
    if not filled.size:
        return [], segment
    ends = segment.lines.ends
    start = int(ends[filled[0] - 1]) if filled[0] else 0
    stop = int(ends[filled[0]])
    try:
        names = _names(segment.data[start:stop], delimiter, header)
    except pa.ArrowInvalid as exc:
        raise ShardError(f"{file.url}: the first record cannot be read: {exc}") from exc
    check_names(file, names)
    if not header:
        return names, segment
    rest = Lines(ends[filled[0] + 1 :] - stop, segment.lines.filled[filled[0] + 1 :])
    return names, CsvSegment(segment.offset + stop, 0, segment.data[stop:], rest)


def _names(record: bytes, delimiter: str, header: bool) -> list[str]:
    block = max(_PARSER_BLOCK, len(record) + 1)
    table = arrow_csv.read_csv(
        pa.BufferReader(record),
        arrow_csv.ReadOptions(autogenerate_column_names=not header, block_size=block),
        arrow_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
    )
    names: list[str] = table.column_names
    return names


def merge_schemas(left: pa.Schema, right: pa.Schema) -> pa.Schema:
    """Return types that may fit both parts, in the order of ``left``."""
    if left.equals(right):
        return left
    if sorted(left.names) != sorted(right.names):
        names_only = (pa.schema([(name, TEXT) for name in part.names]) for part in (left, right))
        raise SchemaConflict(describe_difference(*names_only))
    return pa.schema(
        [pa.field(f.name, merge_types(f.type, right.field(f.name).type)) for f in left]
    )


def merge_types(left: pa.DataType, right: pa.DataType) -> pa.DataType:
    """Return the narrowest type that may fit values of either type.

    It follows Arrow's own inference. Whether it does fit has to be tested: ``0x1F`` is an integer
    but not a float, ``1`` may be a Boolean and ``2`` may not.
    """
    for one, other in ((left, right), (right, left)):
        if one == other or pa.types.is_null(one):
            return other
        if pa.types.is_binary(one):
            return one
        if pa.types.is_int64(one) and (pa.types.is_float64(other) or pa.types.is_boolean(other)):
            return other
        if pa.types.is_date(one) and pa.types.is_timestamp(other) and other.tz is None:
            return other
        if pa.types.is_timestamp(one) and pa.types.is_timestamp(other) and one.tz == other.tz:
            return one if one.unit == "ns" else other
    return TEXT


def widened(before: pa.Schema, after: pa.Schema) -> list[str]:
    """The columns whose values have to be tested against their new type."""
    return [
        field.name
        for field in before
        if not pa.types.is_null(field.type)
        and field.type != after.field(field.name).type
        and not is_text(after.field(field.name).type)
    ]


def is_text(kind: pa.DataType) -> bool:
    """Whether every value fits the type."""
    return bool(kind == TEXT or pa.types.is_binary(kind))


class CsvReader(RecordReader):
    """Indexing reads every byte: to find the records, and to infer types that fit them all."""

    suffixes = tuple(f".{kind}{ending}" for kind in ("csv", "tsv") for ending in _ENDINGS)

    def __init__(self, options: CsvOptions, source: ByteSource) -> None:
        super().__init__(source)
        self._options = options
        self._types = {name: _type_named(text) for name, text in options.types.items()}

    def index_file(self, file: FileStat, advance: Advance) -> IndexedFile:
        """Find the records and infer the types of a file."""
        compression, delimiter = self._compression(file), self._delimiter(file)
        chunks = self._stream(file, compression, advance)
        start = next(chunks, b"")
        text = start.removeprefix(BOM)
        pieces = segments(chain([text], chunks), delimiter, file.url, len(start) - len(text))
        first = next(pieces, None)
        if first is None:
            return IndexedFile(file, RowBlocks([], [], []), pa.schema([]), not compression)
        header = self._options.header
        names, first = take_header(file, delimiter, header, first)
        learner = TypeLearner(file.url, CsvParser(delimiter, names), self._types)
        parts = []
        for piece in chain([first], (replace(p, first=p.first - header) for p in pieces)):
            if piece.records:
                learner.learn(piece)
                parts.append(piece.blocks())
        indexed = IndexedFile(file, RowBlocks.concat(parts), learner.schema, not compression)
        return replace(indexed, schema=self._checked(indexed, learner.schema, learner.doubtful))

    def merge(self, left: pa.Schema, right: pa.Schema) -> pa.Schema:
        """Names must agree; types become ones that may fit both."""
        if not left.names or not right.names:
            return left if left.names else right
        return merge_schemas(left, right)

    def settle(self, file: IndexedFile, schema: pa.Schema) -> pa.Schema:
        """Columns with values in this file that do not fit the merged type become text."""
        return self._checked(file, schema, widened(file.schema, schema))

    def _checked(self, file: IndexedFile, schema: pa.Schema, doubtful: Iterable[str]) -> pa.Schema:
        """Parse the doubtful columns; those that do not have their type become text."""
        untested = sorted(doubtful)
        failed: set[str] = set()
        for numbers in file.blocks.batches(0, file.samples, BATCH_BYTES) if untested else ():
            for name in set(untested) - failed:
                try:
                    self._parse(file, numbers, {name: schema.field(name).type}, [name])
                except pa.ArrowInvalid:
                    failed.add(name)
        return pa.schema([pa.field(f.name, TEXT) if f.name in failed else f for f in schema])

    def _read(self, file: IndexedFile, start: int, stop: int, schema: pa.Schema) -> pa.Table:
        types = {field.name: field.type for field in schema}
        tables = []
        for numbers in file.blocks.batches(start, stop, BATCH_BYTES):
            first, end = (int(row) for row in file.blocks.bounds[[numbers.start, numbers.stop]])
            try:
                table = self._parse(file, numbers, types, schema.names)
            except pa.ArrowInvalid as exc:
                raise ShardError(
                    f"{file.url}: rows {first} to {end} cannot be read ({exc}): index the "
                    "dataset again"
                ) from exc
            if table.num_rows != end - first:
                raise changed(file.url)
            begin = max(start, first)
            tables.append(table.slice(begin - first, min(stop, end) - begin))
        return pa.concat_tables(tables).cast(schema)

    def _parse(
        self, file: IndexedFile, numbers: range, types: dict[str, pa.DataType], columns: list[str]
    ) -> pa.Table:
        longest = int(file.blocks.lengths[numbers.start : numbers.stop].max())
        parser = CsvParser(self._delimiter(file.stat), file.schema.names)
        return parser.parse(self._read_blocks(file, numbers), types, columns, longest)

    def _delimiter(self, file: FileStat) -> str:
        tabs = any(file.url.lower().endswith(f".tsv{ending}") for ending in _ENDINGS)
        return self._options.delimiter or ("\t" if tabs else ",")

    def _compression(self, file: FileStat) -> str:
        head = head_of(file, self._source)
        compression = compression_of(head)
        if not compression and (b"\0" in head or format_of(head) in ("parquet", "tfrecord")):
            raise wrong_format(file, "csv", "it has bytes that are not UTF-8 text", self._source)
        return compression


def _type_named(text: str) -> pa.DataType:
    try:
        return pa.type_for_alias(text)
    except ValueError as exc:
        raise ValueError(
            f"{text!r} is not the name of an Arrow type: use one such as int64, double, string, "
            "bool, date32 or timestamp[ms]"
        ) from exc
