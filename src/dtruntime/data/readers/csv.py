"""CSV: rows by blocks of bytes, with types that hold for all of a dataset's files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv

from ...errors import ShardError
from ...storage import FileStat, read_range, stream
from .base import (
    BATCH_BYTES,
    Advance,
    Blocks,
    FileIndex,
    IndexedFile,
    Reader,
    check_names,
)
from .csv_records import Segment, find_lines, segments
from .csv_types import is_text, merge_schemas, merge_types, widened, with_text
from .inflating import InflatedFiles, compression_of, inflate
from .options import CsvOptions
from .sniffing import format_of, head_of, wrong_format

_BOM = b"\xef\xbb\xbf"
_PARSER_BLOCK = 2**20


class CsvReader(Reader):
    """Indexing reads every byte once: to find the records, and to infer types that fit them all."""

    format = "csv"
    suffixes = tuple(f".{kind}{end}" for kind in ("csv", "tsv") for end in ("", ".gz", ".bz2", ".zst"))

    def __init__(self, options: CsvOptions | None = None) -> None:
        self._options = options or CsvOptions()
        self._inflated = InflatedFiles()
        self._given = {name: _type_named(text) for name, text in self._options.types.items()}

    def index_file(self, file: FileStat, advance: Advance) -> FileIndex:
        """Find the records and infer the types of a file."""
        compression = _compression(file)
        parser = self._parser(file)
        counts, offsets, lengths = [], [], []
        for segment in parser.records(_told(self._chunks(file, compression), file, advance)):
            parser.learn(segment)
            for known, more in zip((counts, offsets, lengths), segment.blocks(), strict=True):
                known.append(more)
        blocks = Blocks(*(np.concatenate([*part, np.zeros(0, np.int64)]) for part in (counts, offsets, lengths)))
        advance(file.size)
        found = IndexedFile(file, blocks, parser.schema, not compression)
        if parser.doubtful:
            found = IndexedFile(file, blocks, self._try(found, parser.schema, parser.doubtful), not compression)
        return FileIndex(blocks, found.schema, found.seekable)

    def merge(self, left: pa.Schema, right: pa.Schema) -> pa.Schema:
        """Names must agree; types become what may fit both."""
        if not left.names or not right.names:
            return left if left.names else right
        return merge_schemas(left, right)

    def settle(self, file: IndexedFile, schema: pa.Schema) -> pa.Schema:
        """Columns whose values in this file do not fit the merged type become text."""
        doubtful = widened(file.schema, schema) if file.schema.names else []
        return self._try(file, schema, doubtful) if doubtful else schema
