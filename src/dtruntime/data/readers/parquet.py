"""The Parquet reader: row groups, of which only the selected columns are read."""

from __future__ import annotations

import functools
import io
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq

from ...errors import ShardError
from ...storage import ByteSource, FileStat, data_files
from ...storage.data_files import check_unchanged
from .format_reader import (
    Advance,
    IndexedFile,
    Reader,
    RowBlocks,
    SchemaConflict,
    check_names,
    describe_difference,
    wrong_format,
)

FOOTERS_KEPT = 64
FILES_OPEN = 16
"""Per thread."""
GROUPS_KEPT_BYTES = 256 * 2**20
FOOTER_GUESS = 256 * 1024
"""How much of an object's end is fetched, which usually contains the footer."""
NEAR = 1024 * 1024
"""Ranges less than this apart are fetched together."""
READ_AHEAD = 64 * 1024


class ParquetReader(Reader):
    """Indexes files by their footers alone.

    A row group that is read in part is cached for the next read, within a limit, because it can
    only be decoded as a whole.
    """

    suffixes = (".parquet", ".pq", ".parq")

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._groups = _GroupCache(GROUPS_KEPT_BYTES)
        read_footer = functools.partial(_read_footer, source)
        self._footer = functools.lru_cache(FOOTERS_KEPT)(read_footer)
        self._open = _OpenFiles()

    def index_file(self, file: FileStat, advance: Advance) -> IndexedFile:
        """Index a file by its footer."""
        footer = self._footer(file)
        schema = footer.schema.to_arrow_schema().remove_metadata()
        check_names(file, schema.names)
        groups = [footer.row_group(i) for i in range(footer.num_row_groups)]
        offsets = [_chunk_start(g.column(0)) if g.num_columns else 0 for g in groups]
        ends = [*offsets[1:], file.size]
        advance(file.size)
        lengths = [max(0, end - offset) for offset, end in zip(offsets, ends, strict=False)]
        return IndexedFile(
            file, RowBlocks([group.num_rows for group in groups], offsets, lengths), schema
        )

    def merge(self, left: pa.Schema, right: pa.Schema) -> pa.Schema:
        """Columns must be the same; one with only nulls in a file fits every type."""
        fields = []
        for field in left:
            other = right.field(field.name) if field.name in right.names else field
            if pa.types.is_null(field.type):
                field, other = other.with_name(field.name), field
            elif not pa.types.is_null(other.type) and other.type != field.type:
                raise SchemaConflict(describe_difference(left, right))
            fields.append(field.with_nullable(field.nullable or other.nullable))
        if sorted(left.names) != sorted(right.names):
            raise SchemaConflict(describe_difference(left, right))
        return pa.schema(fields)

    def _read(self, file: IndexedFile, start: int, stop: int, schema: pa.Schema) -> pa.Table:
        bounds = file.blocks.bounds
        tables = []
        whole: list[int] = []
        for number in file.blocks.covering(start, stop):
            first, end = int(bounds[number]), int(bounds[number + 1])
            if start <= first and end <= stop:
                whole.append(number)
                continue
            if whole:
                tables.append(self._read_groups(file, whole, schema))
                whole = []
            begin = max(start, first)
            group = self._group(file, number, schema)
            tables.append(group.slice(begin - first, min(stop, end) - begin))
        if whole:
            tables.append(self._read_groups(file, whole, schema))
        return tables[0] if len(tables) == 1 else pa.concat_tables(tables)

    def _group(self, file: IndexedFile, number: int, schema: pa.Schema) -> pa.Table:
        key = file.stat, number, tuple(schema.names)
        table = self._groups.get(key)
        if table is None:
            table = self._read_groups(file, [number], schema)
            self._groups.put(key, table)
        return table

    def _read_groups(self, file: IndexedFile, numbers: list[int], schema: pa.Schema) -> pa.Table:
        with _corruption(file, numbers), self._opened(file, numbers, schema) as parquet:
            # Looking up columns by name takes much of the time of a small row group.
            names = None if parquet.schema_arrow.names == schema.names else schema.names
            table = parquet.read_row_groups(numbers, columns=names, use_threads=False)
            if table.schema.equals(schema):
                return table
            return table.select(schema.names).cast(schema)

    @contextmanager
    def _opened(
        self, file: IndexedFile, numbers: list[int], schema: pa.Schema
    ) -> Iterator[pq.ParquetFile]:
        footer = self._footer(file.stat)
        if file.stat.is_local:
            yield self._open.get(file.stat, footer)
            return
        ranges = _column_ranges(footer, numbers, schema.names)
        with (
            _arrow_source(file.stat, ranges, self._source) as opened,
            pq.ParquetFile(opened, metadata=footer, pre_buffer=False) as parquet,
        ):
            yield parquet


class _OpenFiles(threading.local):
    """The local files that a thread has open; the least recently used is closed first."""

    def __init__(self) -> None:
        self._files: OrderedDict[FileStat, pq.ParquetFile] = OrderedDict()

    def get(self, file: FileStat, footer: pq.FileMetaData) -> pq.ParquetFile:
        """An open file; ``ShardError`` when it has changed since it was indexed."""
        check_unchanged(file)
        parquet = self._files.pop(file, None)
        if parquet is None:
            parquet = pq.ParquetFile(file.url, metadata=footer, memory_map=True, pre_buffer=False)
        self._files[file] = parquet
        while len(self._files) > FILES_OPEN:
            self._files.popitem(last=False)[1].close()
        return parquet


class _GroupCache:
    """Decoded row groups; the least recently used is dropped first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._tables: OrderedDict[object, pa.Table] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: object) -> pa.Table | None:
        with self._lock:
            if key in self._tables:
                self._tables.move_to_end(key)
            return self._tables.get(key)

    def put(self, key: object, table: pa.Table) -> None:
        if table.nbytes > self._limit:
            return
        with self._lock:
            self._tables[key] = table
            while sum(kept.nbytes for kept in self._tables.values()) > self._limit:
                self._tables.popitem(last=False)


def _read_footer(source: ByteSource, file: FileStat) -> pq.FileMetaData:
    try:
        end = min(FOOTER_GUESS, file.size)
        with _arrow_source(file, [(file.size - end, end)], source) as opened:
            return pq.read_metadata(opened)
    except ShardError:
        raise
    except (pa.ArrowException, OSError) as exc:
        raise wrong_format(file, "parquet", _one_line(exc), source) from exc


def _chunk_start(column: pq.ColumnChunkMetaData) -> int:
    start: int = column.data_page_offset
    dictionary: int | None = column.dictionary_page_offset
    return min(start, dictionary) if dictionary else start


def _column_ranges(
    footer: pq.FileMetaData, numbers: list[int], columns: list[str]
) -> list[tuple[int, int]]:
    """The offset and length of every column chunk to read."""
    paths = [footer.schema.column(i).path for i in range(footer.num_columns)]
    inside = tuple(f"{name}." for name in columns)
    leaves = [i for i, path in enumerate(paths) if f"{path}.".startswith(inside)]
    chunks = (footer.row_group(number).column(i) for number in numbers for i in leaves)
    return [(_chunk_start(chunk), chunk.total_compressed_size) for chunk in chunks]


@contextmanager
def _corruption(file: IndexedFile, numbers: list[int]) -> Iterator[None]:
    try:
        yield
    except ShardError:
        raise
    except (pa.ArrowException, OSError) as exc:
        first, last = numbers[0], numbers[-1]
        blocks = file.blocks
        raise ShardError(
            f"{file.url}: rows {blocks.bounds[first]} to {blocks.bounds[last + 1]} (row groups "
            f"{first} to {last}, from byte {blocks.offsets[first]}) cannot be read "
            f"({_one_line(exc)}): the file is corrupt; write it again, or leave it out"
        ) from exc


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


class _RemoteFile(io.RawIOBase):
    """An object as a seekable file, of which some ranges are fetched in advance."""

    def __init__(
        self, file: FileStat, ranges: Sequence[tuple[int, int]], source: ByteSource
    ) -> None:
        """``ranges`` are offsets and lengths, fetched concurrently."""
        super().__init__()
        self._file = file
        self._source = source
        self._at = 0
        merged = _merged(ranges)
        self._starts = [offset for offset, _ in merged]
        self._loaded = source.read_ranges(file, merged)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence]
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        rest = max(0, self._file.size - self._at)
        size = rest if size < 0 else min(size, rest)
        offset, self._at = self._at, self._at + size
        number = bisect_right(self._starts, offset) - 1
        if number >= 0:
            data = self._loaded[number]
            begin = offset - self._starts[number]
            if begin + size <= len(data):
                return data[begin : begin + size]
        ahead = min(max(size, READ_AHEAD), self._file.size - offset)
        return self._source.read_range(self._file, offset, ahead)[:size]


@contextmanager
def _arrow_source(
    file: FileStat, ranges: Sequence[tuple[int, int]], source: ByteSource
) -> Iterator[pa.NativeFile]:
    """Open a file for Arrow; ``ranges`` of an object are fetched first, concurrently."""
    if not file.is_local:
        yield pa.PythonFile(_RemoteFile(file, ranges, source), mode="r")
        return
    data_files.open_local(file).close()
    if file.size == 0:
        yield pa.BufferReader(b"")
        return
    with pa.memory_map(file.url) as mapped:
        yield mapped


def _merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for offset, length in sorted(ranges):
        if merged and offset - (merged[-1][0] + merged[-1][1]) < NEAR:
            begin, size = merged[-1]
            merged[-1] = begin, max(size, offset + length - begin)
        else:
            merged.append((offset, length))
    return merged
