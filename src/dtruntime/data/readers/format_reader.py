"""What every format's reader does, and what it tells about a file."""

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
from ...storage import ByteSource, FileStat, data_files
from .compression import compression_of

BLOCK_BYTES = 256 * 1024
"""About how much of a file without structure of its own makes a block."""
BATCH_BYTES = 64 * 2**20
"""At most about this much of a file is held as bytes while rows are made of it."""

Advance = Callable[[int], None]
"""Is told how many more bytes of a file have been indexed; raises when that is to end."""


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Rows of a file that are read together."""

    first: int
    """The number of its first row in the file."""
    count: int
    offset: int
    """Where it starts: in the file, or in what the file inflates to."""
    length: int


class RowBlocks(Sequence[RowBlock]):
    """The blocks of a file, in order, as arrays."""

    def __init__(self, counts: ArrayLike, offsets: ArrayLike, lengths: ArrayLike) -> None:
        self.counts = np.asarray(counts, dtype=np.int64)
        self.offsets = np.asarray(offsets, dtype=np.int64)
        self.lengths = np.asarray(lengths, dtype=np.int64)

    @cached_property
    def bounds(self) -> NDArray[np.int64]:
        """The first row of each block, and behind the last the number of all rows."""
        return np.concatenate(([0], np.cumsum(self.counts)))

    @property
    def rows(self) -> int:
        """How many rows there are in all."""
        return int(self.bounds[-1])

    @property
    def extent(self) -> int:
        """Where the last block ends."""
        return int(self.offsets[-1] + self.lengths[-1]) if len(self) else 0

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, number: int) -> RowBlock:  # type: ignore[override]
        return RowBlock(
            int(self.bounds[:-1][number]),
            int(self.counts[number]),
            int(self.offsets[number]),
            int(self.lengths[number]),
        )

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
class FileIndex:
    """What a reader finds out about one file."""

    blocks: RowBlocks
    schema: pa.Schema
    seekable: bool = True
    """Whether a block can be read without reading what lies before it."""


@dataclass(frozen=True, slots=True)
class IndexedFile:
    """A file and where its rows are."""

    stat: FileStat
    blocks: RowBlocks
    schema: pa.Schema
    """The columns in this file's own order and types."""
    seekable: bool = True

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
    """Reads files of one format.

    A reader may be shared by threads. What it keeps between calls is bounded.
    """

    format: str
    suffixes: tuple[str, ...]
    """How names of such files end."""

    @abstractmethod
    def index_file(self, file: FileStat, advance: Advance) -> FileIndex:
        """Find out how many rows a file has, where they are, and of which columns.

        ``ShardError`` when the file is corrupt or of another format.
        """

    @abstractmethod
    def merge(self, left: pa.Schema, right: pa.Schema) -> pa.Schema:
        """Return the schema that fits files of both; ``SchemaConflict`` when none does."""

    def settle(self, file: IndexedFile, schema: pa.Schema) -> pa.Schema:
        """Return ``schema``, changed where this file's values do not fit what was merged."""
        return schema

    def read(
        self,
        file: IndexedFile,
        start: int,
        stop: int,
        columns: Sequence[str] | None = None,
        *,
        schema: pa.Schema | None = None,
    ) -> pa.Table:
        """Return rows ``start`` to ``stop`` (excluded) of a file.

        ``columns`` chooses among those of ``schema``, which is the dataset's (by default the
        file's own). ``ShardError`` when the file has changed, is corrupt, or lacks a column.
        """
        wanted = select(file.schema if schema is None else schema, columns)
        if not 0 <= start <= stop <= file.samples:
            raise ValueError(f"rows {start} to {stop} are outside {file.url} of {file.samples}")
        if start == stop:
            return wanted.empty_table()
        return self._read(file, start, stop, wanted)

    @abstractmethod
    def _read(self, file: IndexedFile, start: int, stop: int, schema: pa.Schema) -> pa.Table:
        """Return at least one row, with exactly the columns of ``schema``."""


def block_ends(ends: NDArray[np.int64], size: int | None = None) -> NDArray[np.int64]:
    """The numbers of the records that end blocks of about ``size``, or ``BLOCK_BYTES``.

    ``ends`` are where records end, counted from the first one's start; there is at least one.
    """
    size = size or BLOCK_BYTES
    marks = np.arange(size, ends[-1], size)
    return np.unique(np.append(np.searchsorted(ends, marks), len(ends) - 1))


def select(schema: pa.Schema, columns: Sequence[str] | None) -> pa.Schema:
    """Return the part of a schema that has the named columns, in the order named."""
    if columns is None:
        return schema
    if isinstance(columns, str) or not columns:
        raise ValueError(f"columns must be a list of at least one name, not {columns!r}")
    for name in columns:
        if name not in schema.names:
            raise ShardError(f"the dataset has {no_column(name, schema.names)}")
    return pa.schema([schema.field(name) for name in columns])


def no_column(name: str, names: Sequence[str]) -> str:
    """Say that a column is not there, which one may be meant, and which there are."""
    close = difflib.get_close_matches(name, names, 1)
    nearest = f"did you mean {close[0]!r}? " if close else ""
    return f"no column {name!r}: {nearest}there are {_listed(names)}"


def check_names(file: FileStat, names: Sequence[str]) -> None:
    """Columns are chosen by name: raise ``ShardError`` when two have the same."""
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ShardError(f"{file.url} has two columns named {twice!r}: rename one of them")


def describe_difference(left: pa.Schema, right: pa.Schema) -> str:
    """Say how the columns of two files differ, or nothing when they do not."""
    only_left = [name for name in left.names if name not in right.names]
    only_right = [name for name in right.names if name not in left.names]
    said = []
    if only_left:
        said.append(f"only the first has {_listed(only_left)}")
    if only_right:
        said.append(f"only the second has {_listed(only_right)}")
    for name in left.names:
        if name in right.names and left.field(name).type != right.field(name).type:
            types = f"{left.field(name).type} in the first, {right.field(name).type} in the second"
            said.append(f"{name!r} is {types}")
    return "; ".join(said)


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:8])
    return f"{shown} and {len(names) - 8} more" if len(names) > 8 else shown


class ParquetOptions(msgspec.Struct, frozen=True, tag="parquet"):
    """Parquet describes itself: there is nothing to choose."""


class CsvOptions(msgspec.Struct, frozen=True, tag="csv", forbid_unknown_fields=True):
    """The dialect of CSV files. Fields are quoted by ``"``, which is doubled inside."""

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
    """What TFRecord files hold."""

    raw: bool = False
    """Give each record as it is, in the column ``record``, and do not parse it as an Example."""


Options = ParquetOptions | CsvOptions | TfrecordOptions


HEAD = 512
MASK_OFFSET = 0xA282EAD8
_TEXT_CONTROLS = b"\t\n\r\f"


def head_of(file: FileStat, source: ByteSource = data_files) -> bytes:
    """The first bytes of a file."""
    return source.read_range(file, 0, min(HEAD, file.size))


def format_of(head: bytes) -> str:
    """The format that a file starting with ``head`` seems to have; empty when unknown."""
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


def wrong_format(
    file: FileStat, wanted: str, detail: str, source: ByteSource = data_files
) -> ShardError:
    """The error for a file that cannot be read as ``wanted``."""
    found = format_of(head_of(file, source))
    if found and found != wanted:
        return ShardError(
            f"{file.url} is not a {wanted} file but looks like {found}: register the dataset "
            f"with format={found!r}, or leave this file out"
        )
    if found == wanted:
        return ShardError(
            f"{file.url} is corrupt ({detail}): it may have been cut off while being written; "
            "write it again, or leave it out"
        )
    return ShardError(
        f"{file.url} is not a {wanted} file ({detail}): check the format, or leave this file out"
    )
