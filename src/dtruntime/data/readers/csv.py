"""CSV: rows by blocks of bytes, with types that hold for all of a dataset's files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ...errors import ShardError
from ...storage import ByteSource, FileStat, data_files
from ...storage.backend import changed
from .compression import InflatedFiles, compression_of, inflate
from .csv_parsing import BOM, CsvParser, TypeLearner, merge_schemas, take_header, widened, with_text
from .csv_records import CsvSegment, segments
from .format_reader import (
    BATCH_BYTES,
    Advance,
    CsvOptions,
    FileIndex,
    IndexedFile,
    Reader,
    RowBlocks,
)
from .sniffing import format_of, head_of, wrong_format

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
