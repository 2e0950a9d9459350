"""Bytes of CSV records into tables, and the types that fit them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv

from ...errors import ShardError
from ...storage import FileStat
from .csv_records import CsvSegment, Lines
from .format_reader import SchemaConflict, check_names, describe_difference

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
