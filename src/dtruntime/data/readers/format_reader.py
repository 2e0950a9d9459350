"""The base of all file format readers, and what they find out about a file."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np
import pyarrow as pa
from google_crc32c import value as crc32c
from numpy.typing import ArrayLike, NDArray

from ...errors import ShardError
from ...storage import ByteSource, FileStat
from .compression import InflatedFiles, compression_of, inflate

Ints = NDArray[np.int64]

BLOCK_BYTES = 256 * 1024
"""The approximate size of a block in formats without blocks of their own."""
BATCH_BYTES = 64 * 2**20
"""About how much of a file is held as bytes while it is parsed."""

HEAD = 512
"""How much of a file is read to detect its format."""
MASK_OFFSET = 0xA282EAD8
"""Added to TFRecord checksums."""
_TEXT_CONTROLS = b"\t\n\r\f"

Advance = Callable[[int], None]
"""Called with how many more bytes of a file are indexed; raises to stop indexing."""


class RowBlocks:
    """The blocks of a file: rows that are read together."""

    def __init__(self, counts: ArrayLike, offsets: ArrayLike, lengths: ArrayLike) -> None:
        self.counts = np.asarray(counts, dtype=np.int64)
        self.offsets = np.asarray(offsets, dtype=np.int64)
        """Where each block starts: in the file, or in its decompressed content."""
        self.lengths = np.asarray(lengths, dtype=np.int64)

    @staticmethod
    def cut(ends: Ints, rows: Ints, offset: int) -> RowBlocks:
        """Blocks of about `BLOCK_BYTES`, of records that start at ``offset``.

        ``ends`` is where each record ends, relative to that; ``rows`` counts the rows up to there.
        """
        cuts = block_ends(ends)
        stops = ends[cuts]
        starts = np.concatenate(([0], stops[:-1]))
        return RowBlocks(np.diff(rows[cuts], prepend=0), starts + offset, stops - starts)

    @staticmethod
    def concat(parts: Sequence[RowBlocks]) -> RowBlocks:
        """The blocks of consecutive parts of a file."""
        every = [RowBlocks([], [], []), *parts]
        return RowBlocks(
            np.concatenate([part.counts for part in every]),
            np.concatenate([part.offsets for part in every]),
            np.concatenate([part.lengths for part in every]),
        )

    @cached_property
    def bounds(self) -> Ints:
        """The first row of each block, followed by the number of all rows."""
        return np.concatenate(([0], np.cumsum(self.counts)))

    @property
    def rows(self) -> int:
        """The number of rows."""
        return int(self.bounds[-1])

    @property
    def extent(self) -> int:
        """Where the last block ends."""
        return int(self.offsets[-1] + self.lengths[-1]) if len(self) else 0

    def __len__(self) -> int:
        return len(self.counts)

    def covering(self, start: int, stop: int) -> range:
        """The numbers of the blocks that hold rows ``start`` to ``stop``."""
        if start >= stop:
            return range(0)
        first = int(np.searchsorted(self.bounds, start, side="right")) - 1
        return range(first, int(np.searchsorted(self.bounds, stop, side="left")))

    def batches(self, start: int, stop: int, limit: int) -> Iterator[range]:
        """Runs of covering blocks of at most ``limit`` bytes, or of one longer block."""
        numbers = self.covering(start, stop)
        begin, size = numbers.start, 0
        for number in numbers:
            length = int(self.lengths[number])
            if number > begin and size + length > limit:
                yield range(begin, number)
                begin, size = number, 0
            size += length
        if begin < numbers.stop:
            yield range(begin, numbers.stop)


@dataclass(frozen=True, slots=True)
class IndexedFile:
    """A file and where its rows are, as a reader has found out."""

    stat: FileStat
    blocks: RowBlocks
    schema: pa.Schema
    """The columns in this file's own order and types."""
    seekable: bool = True
    """Whether a block can be read without reading what comes before it."""

    @property
    def url(self) -> str:
        """Its path or URL."""
        return self.stat.url

    @property
    def samples(self) -> int:
        """How many rows it has."""
        return self.blocks.rows


class SchemaConflict(Exception):
    """Two files do not have the same columns; the message is the difference."""


class Reader(ABC):
    """Reads files of one format. Thread-safe; what it caches is bounded."""

    suffixes: tuple[str, ...]
    """The file name extensions of the format."""

    @abstractmethod
    def index_file(self, file: FileStat, advance: Advance) -> IndexedFile:
        """Find out how many rows a file has, where they are, and which columns.

        ``ShardError`` when the file is corrupt or of another format.
        """

    @abstractmethod
    def merge(self, left: pa.Schema, right: pa.Schema) -> pa.Schema:
        """Return the schema that fits files of both; ``SchemaConflict`` when none does."""

    def settle(self, file: IndexedFile, schema: pa.Schema) -> pa.Schema:
        """Return the merged ``schema``, changed where this file's values do not fit it."""
        return schema

    def read(self, file: IndexedFile, start: int, stop: int, schema: pa.Schema) -> pa.Table:
        """Return rows ``start`` to ``stop`` (excluded) of a file, with the columns of ``schema``.

        ``ShardError`` when the file has changed, is corrupt, or lacks a column.
        """
        if not 0 <= start <= stop <= file.samples:
            raise ValueError(f"rows {start} to {stop} are outside {file.url} of {file.samples}")
        return schema.empty_table() if start == stop else self._read(file, start, stop, schema)

    @abstractmethod
    def _read(self, file: IndexedFile, start: int, stop: int, schema: pa.Schema) -> pa.Table:
        """The same for at least one row."""


class RecordReader(Reader):
    """Reads files that are a sequence of records, which may be compressed as a whole."""

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._inflated = InflatedFiles(source=source)

    @abstractmethod
    def _compression(self, file: FileStat) -> str:
        """How a file is compressed, if at all; ``ShardError`` when it is of another format."""

    def _stream(self, file: FileStat, compression: str, advance: Advance) -> Iterator[bytes]:
        """The decompressed content of a file; its progress adds up to the size of the file."""
        source = self._source
        left = file.size
        for chunk in inflate(file, compression, source) if compression else source.stream(file):
            yield chunk
            advance(min(len(chunk), left))
            left -= min(len(chunk), left)
        advance(left)

    def _read_blocks(self, file: IndexedFile, numbers: range) -> bytes:
        """The decompressed bytes of consecutive blocks."""
        blocks = file.blocks
        offset = int(blocks.offsets[numbers.start])
        length = int(blocks.offsets[numbers[-1]] + blocks.lengths[numbers[-1]]) - offset
        if file.seekable:
            return self._source.read_range(file.stat, offset, length)
        compression = self._compression(file.stat)
        return self._inflated.read(file.stat, compression, offset, length, blocks.extent)


def block_ends(ends: Ints, size: int | None = None) -> Ints:
    """The numbers of the records that end blocks of about ``size``, or ``BLOCK_BYTES``.

    ``ends`` is where each record ends, relative to the first one's start; there is at least one.
    """
    size = size or BLOCK_BYTES
    marks = np.arange(size, ends[-1], size)
    return np.unique(np.append(np.searchsorted(ends, marks), len(ends) - 1))


def select(schema: pa.Schema, columns: Sequence[str] | None) -> pa.Schema:
    """Return the fields of the named columns, in the order named."""
    if columns is None:
        return schema
    if isinstance(columns, str) or not columns:
        raise ValueError(f"columns must be a list of at least one name, not {columns!r}")
    for name in columns:
        if name not in schema.names:
            raise ShardError(f"the dataset has {no_column(name, schema.names)}")
    return pa.schema([schema.field(name) for name in columns])


def no_column(name: str, names: Sequence[str]) -> str:
    """Say that a column does not exist, which one may be meant, and which there are."""
    close = difflib.get_close_matches(name, names, 1)
    nearest = f"did you mean {close[0]!r}? " if close else ""
    return f"no column {name!r}: {nearest}there are {_listed(names)}"


def check_names(file: FileStat, names: Sequence[str]) -> None:
    """Raise ``ShardError`` when two columns have the same name: columns are selected by name."""
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ShardError(f"{file.url} has two columns named {twice!r}: rename one of them")


def describe_difference(left: pa.Schema, right: pa.Schema) -> str:
    """Say how the columns of two files differ; empty when they do not."""
    differences = []
    for which, one, other in (("first", left, right), ("second", right, left)):
        if only := [name for name in one.names if name not in other.names]:
            differences.append(f"only the {which} has {_listed(only)}")
    for name in left.names:
        if name in right.names and left.field(name).type != right.field(name).type:
            types = f"{left.field(name).type} in the first, {right.field(name).type} in the second"
            differences.append(f"{name!r} is {types}")
    return "; ".join(differences)


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:8])
    return f"{shown} and {len(names) - 8} more" if len(names) > 8 else shown


class ParquetOptions(msgspec.Struct, frozen=True, tag="parquet"):
    """Parquet files describe themselves: there are no options."""


class CsvOptions(msgspec.Struct, frozen=True, tag="csv", forbid_unknown_fields=True):
    """The dialect of CSV files. Fields are quoted with ``"``, which is doubled inside."""

    delimiter: str = ""
    """One character; by default a comma, and a tab in files named ``.tsv``."""
    header: bool = True
    """Whether the first row names the columns; else they are ``f0``, ``f1`` and so on."""
    types: dict[str, str] = {}
    """Arrow type names (``"int32"``, ``"string"``) of columns whose type is not to be inferred."""

    def __post_init__(self) -> None:
        if self.delimiter and (
            len(self.delimiter.encode()) != 1 or self.delimiter in '"\r\n' or self.delimiter > "~"
        ):
            raise ValueError(f"delimiter must be one ASCII character, not {self.delimiter!r}")


class TfrecordOptions(msgspec.Struct, frozen=True, tag="tfrecord", forbid_unknown_fields=True):
    """What TFRecord files contain."""

    raw: bool = False
    """Return each record as it is, in the column ``record``, instead of parsing an Example."""


Options = ParquetOptions | CsvOptions | TfrecordOptions


def head_of(file: FileStat, source: ByteSource) -> bytes:
    """The first bytes of a file."""
    return source.read_range(file, 0, min(HEAD, file.size))


def format_of(head: bytes) -> str:
    """The format that a file starting with ``head`` appears to have; empty when unknown."""
    if head.startswith(b"PAR1"):
        return "parquet"
    if starts_record(head):
        return "tfrecord"
    if compression_of(head):
        return ""
    is_text = not any(byte < 32 and byte not in _TEXT_CONTROLS for byte in head)
    return "csv" if head and is_text else ""


def masked_crc(data: bytes) -> int:
    """The checksum of ``data`` as TFRecord stores it."""
    crc: int = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + MASK_OFFSET) & 0xFFFFFFFF


def starts_record(head: bytes) -> bool:
    """Whether a TFRecord header with a correct checksum comes first."""
    return len(head) >= 12 and head[8:12] == masked_crc(head[:8]).to_bytes(4, "little")


def wrong_format(file: FileStat, format: str, detail: str, source: ByteSource) -> ShardError:
    """The error for a file that cannot be read as ``format``."""
    actual = format_of(head_of(file, source))
    if actual and actual != format:
        return ShardError(
            f"{file.url} is not a {format} file but looks like {actual}: register the dataset "
            f"with format={actual!r}, or leave this file out"
        )
    if actual == format:
        return ShardError(
            f"{file.url} is corrupt ({detail}): it may have been cut off while being written; "
            "write it again, or leave it out"
        )
    return ShardError(
        f"{file.url} is not a {format} file ({detail}): check the format, or leave this file out"
    )
