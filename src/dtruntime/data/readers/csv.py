"""CSV: rows by blocks of bytes, with types that hold for all of a dataset's files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
from numpy.typing import NDArray

from ...errors import ShardError
from ...storage import ByteSource, FileStat, data_files
from ...storage.backend import changed
from .compression import InflatedFiles, compression_of, inflate
from .format_reader import (
    BATCH_BYTES,
    Advance,
    CsvOptions,
    FileIndex,
    IndexedFile,
    Reader,
    RowBlocks,
    SchemaConflict,
    block_ends,
    check_names,
    describe_difference,
    format_of,
    head_of,
    wrong_format,
)

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


BOM = b"\xef\xbb\xbf"
_PARSER_BLOCK = 2**20


class CsvParser:
    """Parses records of one file."""

    def __init__(self, file: FileStat, delimiter: str, names: Sequence[str]) -> None:
        self.url = file.url
        self._delimiter = delimiter
        self.names = list(names)

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
        if data.startswith(BOM):  # only at a file's start is it a mark, and there it is removed
            data = b"\n" + data
        return arrow_csv.read_csv(
            pa.BufferReader(data),
            read_options=arrow_csv.ReadOptions(
                column_names=self.names,
                block_size=max(_PARSER_BLOCK, longest + 1),
                use_threads=threads,
            ),
            parse_options=arrow_csv.ParseOptions(
                delimiter=self._delimiter, newlines_in_values=b'"' in data
            ),
            convert_options=arrow_csv.ConvertOptions(
                column_types=dict(types), include_columns=columns
            ),
        )

    def error(
        self, segment: CsvSegment, reason: Exception, types: Mapping[str, pa.DataType]
    ) -> ShardError:
        """What is wrong with a segment that could not be parsed, and where."""
        try:
            self.parse(segment.data, types, threads=False, longest=len(segment.data))
        except pa.ArrowInvalid as exc:
            reason = exc  # of a single thread it knows the row
        text = " ".join(str(reason).split())
        row = re.search(r"Row #(\d+): ", text)
        place = (
            f"row {segment.first + int(row[1]) - 1}"
            if row
            else (f"between rows {segment.first} and {segment.first + segment.records}")
        )
        detail = text[row.end() :] if row else text.removeprefix("In ")
        return ShardError(
            f"{self.url}: {place} (from byte {segment.offset}) does not fit the others: "
            f"{detail[:300]}; correct it, or choose another delimiter or type"
        )


class TypeLearner:
    """Infers types that fit each segment of a file."""

    def __init__(self, parser: CsvParser, given: Mapping[str, pa.DataType]) -> None:
        self._parser = parser
        self._given = {name: kind for name, kind in given.items() if name in parser.names}
        self._schema: pa.Schema | None = None
        self.doubtful: set[str] = set()
        """Columns whose type was changed after it had been found to fit."""

    @property
    def schema(self) -> pa.Schema:
        """The columns and what their types are so far."""
        if self._schema is None:
            types = {name: self._given.get(name, pa.null()) for name in self._parser.names}
            self._schema = pa.schema(list(types.items()))
        return self._schema

    def learn(self, segment: CsvSegment) -> None:
        """Make the types fit one more segment."""
        if not segment.records:
            return
        longest = int(np.diff(segment.lines.ends, prepend=0).max())
        rows = self._confirm(segment, longest)
        if rows is None:
            rows = self._infer(segment, longest)
        if rows != segment.records:
            raise ShardError(
                f"{self._parser.url}: {segment.records} records from byte {segment.offset} on "
                f"parse as {rows}: quote the fields that have line endings or quotes in them"
            )

    def _confirm(self, segment: CsvSegment, longest: int) -> int | None:
        """Return the number of rows when the segment fits what is known."""
        if self._schema is None:
            return None
        types = {field.name: field.type for field in self._schema}
        trying = [name for name, kind in types.items() if not is_text(kind)]
        try:
            table = self._parser.parse(
                segment.data, types, trying or self._parser.names[:1], longest
            )
        except pa.ArrowInvalid:
            return None
        return int(table.num_rows)

    def _infer(self, segment: CsvSegment, longest: int) -> int:
        try:
            table = self._parser.parse(segment.data, self._given, None, longest)
        except pa.ArrowInvalid as exc:
            raise self._parser.error(segment, exc, self._given) from exc
        found = table.schema
        merged = found if self._schema is None else merge_schemas(self._schema, found)
        for before in (self._schema, found):
            if before is not None:
                self.doubtful.update(widened(before, merged))
        self._schema = merged
        return int(table.num_rows)


def take_header(
    file: FileStat, delimiter: str, header: bool, segment: CsvSegment
) -> tuple[list[str], CsvSegment]:
    """Return the columns' names, and the segment without the record that tells them."""
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
    table = arrow_csv.read_csv(
        pa.BufferReader(record),
        read_options=arrow_csv.ReadOptions(
            autogenerate_column_names=not header, block_size=max(_PARSER_BLOCK, len(record) + 1)
        ),
        parse_options=arrow_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
    )
    names: list[str] = table.column_names
    return names


TEXT = pa.string()


def merge_schemas(left: pa.Schema, right: pa.Schema) -> pa.Schema:
    """Return types that both parts may fit, in the order of ``left``."""
    if left.equals(right):
        return left
    if sorted(left.names) != sorted(right.names):
        common = pa.schema([pa.field(name, TEXT) for name in left.names])
        others = pa.schema([pa.field(name, TEXT) for name in right.names])
        raise SchemaConflict(describe_difference(common, others))
    return pa.schema(
        [pa.field(f.name, merge_types(f.type, right.field(f.name).type)) for f in left]
    )


def merge_types(left: pa.DataType, right: pa.DataType) -> pa.DataType:
    """Return the narrowest type that may fit what was inferred as either.

    It follows Arrow's own inference. Whether it does fit is to be tried: ``0x1F`` is an integer
    and no number with a fraction, ``1`` may be a truth value and ``2`` is not.
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
    """The columns whose values are still to be tried against the type they got."""
    return [
        field.name
        for field in before
        if not pa.types.is_null(field.type)
        and field.type != after.field(field.name).type
        and not is_text(after.field(field.name).type)
    ]


def is_text(kind: pa.DataType) -> bool:
    """Whether every field fits."""
    return bool(kind == TEXT or pa.types.is_binary(kind))


def with_text(schema: pa.Schema, names: list[str]) -> pa.Schema:
    """The same schema with the named columns as text."""
    return pa.schema([pa.field(f.name, TEXT) if f.name in names else f for f in schema])


_ENDINGS = ("", ".gz", ".bz2", ".zst")


class CsvReader(Reader):
    """Indexing reads every byte: to find the records, and to infer types that fit them all."""

    format = "csv"
    suffixes = tuple(f".{kind}{ending}" for kind in ("csv", "tsv") for ending in _ENDINGS)

    def __init__(self, options: CsvOptions | None = None, source: ByteSource = data_files) -> None:
        self._source = source
        self._options = options or CsvOptions()
        self._given = {name: _type_named(text) for name, text in self._options.types.items()}
        self._inflated = InflatedFiles(source=source)

    def index_file(self, file: FileStat, advance: Advance) -> FileIndex:
        """Find the records and infer the types of a file."""
        source = self._source
        compression = _compression(file, source)
        content = inflate(file, compression, source) if compression else source.stream(file)
        chunks = _told(content, file, advance)
        pieces = segments(*_after_bom(chunks, self._delimiter(file), file.url))
        first = next(pieces, None)
        if first is None:
            return FileIndex(RowBlocks([], [], []), pa.schema([]), not compression)
        names, first = take_header(file, self._delimiter(file), self._options.header, first)
        learner = TypeLearner(CsvParser(file, self._delimiter(file), names), self._given)
        blocks = RowBlocks(
            *_learn(chain([first], _renumbered(pieces, self._options.header)), learner)
        )
        found = IndexedFile(file, blocks, learner.schema, not compression)
        schema = self._tried(found, learner.schema, sorted(learner.doubtful))
        return FileIndex(blocks, schema, not compression)

    def merge(self, left: pa.Schema, right: pa.Schema) -> pa.Schema:
        """Names must agree; types become what may fit both."""
        if not left.names or not right.names:
            return left if left.names else right
        return merge_schemas(left, right)

    def settle(self, file: IndexedFile, schema: pa.Schema) -> pa.Schema:
        """Columns with values in this file that do not fit the merged type become text."""
        return self._tried(file, schema, widened(file.schema, schema))

    def _tried(self, file: IndexedFile, schema: pa.Schema, doubtful: list[str]) -> pa.Schema:
        types = {field.name: field.type for field in schema}
        failing: list[str] = []
        for numbers in file.blocks.batches(0, file.samples, BATCH_BYTES) if doubtful else ():
            for name in set(doubtful).difference(failing):
                try:
                    self._parse(file, numbers, {name: types[name]}, [name])
                except pa.ArrowInvalid:
                    failing.append(name)
        return with_text(schema, failing)

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
        blocks = file.blocks
        offset = int(blocks.offsets[numbers.start])
        length = int(blocks.offsets[numbers[-1]] + blocks.lengths[numbers[-1]]) - offset
        if file.seekable:
            data = self._source.read_range(file.stat, offset, length)
        else:
            compression = _compression(file.stat, self._source)
            data = self._inflated.read(file.stat, compression, offset, length, blocks.extent)
        longest = int(blocks.lengths[numbers.start : numbers.stop].max())
        parser = CsvParser(file.stat, self._delimiter(file.stat), file.schema.names)
        return parser.parse(data, types, columns, longest)

    def _delimiter(self, file: FileStat) -> str:
        tabs = any(file.url.lower().endswith(f".tsv{ending}") for ending in _ENDINGS)
        return self._options.delimiter or ("\t" if tabs else ",")


def _compression(file: FileStat, source: ByteSource) -> str:
    """How a file is compressed; ``ShardError`` when it is no text."""
    head = head_of(file, source)
    compression = compression_of(head)
    if not compression and (b"\0" in head or format_of(head) in ("parquet", "tfrecord")):
        raise wrong_format(file, "csv", "it has bytes that UTF-8 text has not", source)
    return compression


def _told(chunks: Iterable[bytes], file: FileStat, advance: Advance) -> Iterator[bytes]:
    """Tell of every chunk; what a file inflates to counts up to the size of the file."""
    left = file.size
    for chunk in chunks:
        yield chunk
        advance(min(len(chunk), left))
        left -= min(len(chunk), left)
    advance(left)


def _after_bom(
    chunks: Iterator[bytes], delimiter: str, name: str
) -> tuple[Iterator[bytes], str, str, int]:
    first = next(chunks, b"")
    text = first.removeprefix(BOM)
    return chain([text], chunks), delimiter, name, len(first) - len(text)


def _renumbered(pieces: Iterable[CsvSegment], header: bool) -> Iterator[CsvSegment]:
    """Count the rows without the header."""
    for piece in pieces:
        yield CsvSegment(piece.offset, piece.first - header, piece.data, piece.lines)


def _learn(
    pieces: Iterable[CsvSegment], learner: TypeLearner
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Show each segment to the learner and return counts, offsets and lengths of the blocks."""
    parts = []
    for piece in pieces:
        learner.learn(piece)
        if piece.records:
            parts.append(piece.blocks())
    none = np.zeros(0, np.int64)
    counts, offsets, lengths = zip(*parts, strict=True) if parts else ([none], [none], [none])
    return np.concatenate(counts), np.concatenate(offsets), np.concatenate(lengths)


def _type_named(text: str) -> pa.DataType:
    try:
        return pa.type_for_alias(text)
    except ValueError as exc:
        raise ValueError(
            f"{text!r} is not the name of an Arrow type: use one such as int64, double, string, "
            "bool, date32 or timestamp[ms]"
        ) from exc
