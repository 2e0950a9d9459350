"""TFRecord: checked records, given as they are or as the columns of ``tf.train.Example``."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from ...errors import ShardError
from ...storage import FileStat, read_range, stream
from ...storage.stores import changed
from .base import (
    BATCH_BYTES,
    Advance,
    Blocks,
    FileIndex,
    IndexedFile,
    Reader,
    SchemaConflict,
    block_ends,
    describe_difference,
)
from .checksums import masked_crcs, masked_length_crcs
from .examples import MalformedExample, merge_schemas, parse_examples, schema_of, to_column
from .inflating import InflatedFiles, compression_of, inflate, may_be_zlib
from .options import TfrecordOptions
from .sniffing import head_of, starts_record, wrong_format
from .wire import PADDING, Array, Wire

_LENGTH = struct.Struct("<Q")
_HEADER = 12
_FRAME = 16
"""What a record takes beside its data: length, its checksum, and the data's checksum."""
_RAW = pa.schema([("record", pa.binary())])


class TfrecordReader(Reader):
    """Checks the checksum of every record, when indexing and when reading."""

    format = "tfrecord"
    suffixes = tuple(
        f".{kind}{ending}"
        for kind in ("tfrecord", "tfrecords", "tfrec")
        for ending in ("", ".gz", ".gzip", ".zlib", ".zst", ".bz2")
    )

    def __init__(self, options: TfrecordOptions | None = None) -> None:
        self._raw = (options or TfrecordOptions()).raw
        self._inflated = InflatedFiles()

    def index_file(self, file: FileStat, advance: Advance) -> FileIndex:
        """Find the records, and the features of all of them."""
        compression = _compression(file)
        chunks = inflate(file, compression) if compression else stream(file)
        counts, offsets, lengths = [], [], []
        schema = _RAW if self._raw else None
        for frames in _frames(chunks, file):
            frames.verify(file)
            if not self._raw:
                schema = self._learned(file, frames, schema)
            ends = block_ends(frames.ends)
            counts.append(np.diff(ends, prepend=-1))
            bounds = np.concatenate(([0], frames.ends[ends]))
            offsets.append(bounds[:-1] + frames.offset)
            lengths.append(np.diff(bounds))
            if not compression:
                advance(int(frames.ends[-1]))
        if compression:
            advance(file.size)
        none = [np.zeros(0, np.int64)]
        blocks = Blocks(*(np.concatenate(part or none) for part in (counts, offsets, lengths)))
        if schema is None:
            return FileIndex(blocks, pa.schema([]), not compression)
        if not schema.names:
            raise ShardError(
                f"{file.url}: none of its {blocks.rows} records has features: pass "
                "TfrecordOptions(raw=True) to get records as they are"
            )
        return FileIndex(blocks, schema, not compression)

    def merge(self, left: pa.Schema, right: pa.Schema) -> pa.Schema:
        """Kinds must agree; a feature that some files lack is a list that is null there."""
        if not left.names or not right.names:
            return left if left.names else right
        if set(left.names).isdisjoint(right.names):
            raise SchemaConflict(describe_difference(left, right))
        return merge_schemas(left, right)

    def _learned(self, file: FileStat, frames: Frames, known: pa.Schema | None) -> pa.Schema:
        try:
            features = parse_examples(frames.data + PADDING, frames.starts, frames.stops)
            found = schema_of(features, len(frames))
            return found if known is None else merge_schemas(known, found)
        except MalformedExample as exc:
            raise frames.malformed(file, exc) from exc
        except SchemaConflict as exc:
            raise ShardError(
                f"{file.url}: records from {frames.first} on contradict those before: {exc}"
            ) from exc

    def _read(self, file: IndexedFile, start: int, stop: int, schema: pa.Schema) -> pa.Table:
        tables = []
        for numbers in file.blocks.batches(start, stop, BATCH_BYTES):
            frames = self._read_frames(file, numbers)
            begin = max(start, frames.first)
            end = min(stop, frames.first + len(frames))
            frames = frames.part(begin - frames.first, end - frames.first)
            frames.verify(file.stat)
            tables.append(self._table(file.stat, frames, schema))
        return pa.concat_tables(tables)

    def _table(self, file: FileStat, frames: Frames, schema: pa.Schema) -> pa.Table:
        if self._raw:
            records = Wire(frames.data).spans(frames.starts, frames.stops)
            return pa.table([records.cast(pa.binary())], schema=schema)
        data = frames.data + PADDING
        try:
            features = parse_examples(data, frames.starts, frames.stops, schema.names)
        except MalformedExample as exc:
            raise frames.malformed(file, exc) from exc
        columns = []
        for field in schema:
            try:
                columns.append(to_column(features.get(field.name), field.type, len(frames)))
            except SchemaConflict as exc:
                raise ShardError(
                    f"{file.url}: feature {field.name!r} of records {frames.first} to "
                    f"{frames.first + len(frames)} is not as it was indexed ({exc}): index the "
                    "dataset again"
                ) from exc
        return pa.table(columns, schema=schema)

    def _read_frames(self, file: IndexedFile, numbers: range) -> Frames:
        blocks = file.blocks
        first, last = blocks[numbers.start], blocks[numbers[-1]]
        length = last.offset + last.length - first.offset
        if file.seekable:
            data = read_range(file.stat, first.offset, length)
        else:
            compression = _compression(file.stat)
            data = self._inflated.read(file.stat, compression, first.offset, length, blocks.extent)
        frames = Frames.found(data, first.first, first.offset)
        if len(frames) != last.first + last.count - first.first:
            raise changed(file.url)
        return frames


@dataclass(frozen=True, slots=True)
class Frames:
    """Complete records in a row."""

    data: bytes
    starts: Array
    """Where the data of each record starts in ``data``."""
    stops: Array
    first: int
    """The number of the first one in the file."""
    offset: int
    """Where ``data`` lies in the file."""

    @classmethod
    def found(cls, data: bytes, first: int, offset: int) -> Frames:
        """Find the complete records that ``data`` starts with."""
        stops = []
        at, size = 0, len(data)
        unpack = _LENGTH.unpack_from
        starts = []
        while at + _HEADER <= size:
            stop = at + unpack(data, at)[0] + _FRAME
            if stop > size:
                break
            starts.append(at + _HEADER)
            stops.append(stop - 4)
            at = stop
        return cls(data, np.array(starts, np.int64), np.array(stops, np.int64), first, offset)

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def ends(self) -> Array:
        """Where each record ends in ``data``, checksum included."""
        return self.stops + 4

    def part(self, start: int, stop: int) -> Frames:
        """Records ``start`` to ``stop``."""
        return Frames(
            self.data,
            self.starts[start:stop],
            self.stops[start:stop],
            self.first + start,
            self.offset,
        )

    def verify(self, file: FileStat) -> None:
        """Raise ``ShardError`` for the first record whose checksums do not match."""
        lengths = (self.stops - self.starts).astype(np.uint64)
        pieces = [
            self.data[a:b] for a, b in zip(self.starts.tolist(), self.stops.tolist(), strict=True)
        ]
        wrong_length = masked_length_crcs(lengths) != self._stored(self.starts - 4)
        wrong_data = masked_crcs(pieces) != self._stored(self.stops)
        wrong = np.flatnonzero(wrong_length | wrong_data)
        if wrong.size:
            number = int(wrong[0])
            what = "length" if wrong_length[number] else "data"
            raise self._corrupt(file, number, f"the checksum of its {what} does not match")

    def malformed(self, file: FileStat, error: MalformedExample) -> ShardError:
        """The error for a record that is no Example like the others."""
        return ShardError(
            f"{file.url}: record {self.first + error.record} at byte {self._place(error.record)}: "
            f"{error.reason}. Pass TfrecordOptions(raw=True) to get records as they are"
        )

    def _stored(self, at: Array) -> NDArray[np.uint32]:
        windows = sliding_window_view(np.frombuffer(self.data, np.uint8), 4)
        return np.ascontiguousarray(windows[at]).view("<u4").ravel()

    def _place(self, number: int) -> int:
        return self.offset + int(self.starts[number]) - _HEADER

    def _corrupt(self, file: FileStat, number: int, what: str) -> ShardError:
        return ShardError(
            f"{file.url}: record {self.first + number} at byte {self._place(number)} is corrupt: "
            f"{what}; write the file again, or leave it out"
        )


def _frames(chunks: Iterable[bytes], file: FileStat) -> Iterator[Frames]:
    """Cut a file's bytes into runs of complete records."""
    first = offset = needed = 0
    held: list[bytes] = []
    for chunk in chunks:
        held.append(chunk)
        if sum(map(len, held)) < needed:
            continue
        data = b"".join(held)
        frames = Frames.found(data, first, offset)
        used = int(frames.ends[-1]) if len(frames) else 0
        if used:
            yield frames
        first, offset, held = first + len(frames), offset + used, [data[used:]]
        needed = _size_of_next(held[0], first, offset, file)
    if held and held[0]:
        raise ShardError(
            f"{file.url} ends within record {first}, which starts at byte {offset}: the file was "
            "cut off while being written; write it again, or leave it out"
        )


def _size_of_next(data: bytes, first: int, offset: int, file: FileStat) -> int:
    """How many bytes the record takes that ``data`` starts with, if its header is there."""
    if len(data) < _HEADER:
        return _HEADER
    if not starts_record(data):
        raise ShardError(
            f"{file.url}: record {first} at byte {offset} is corrupt: the checksum of its length "
            "does not match; write the file again, or leave it out"
        )
    return int(_LENGTH.unpack_from(data)[0]) + _FRAME


def _compression(file: FileStat) -> str:
    """How a file is compressed; ``ShardError`` when it has no records."""
    head = head_of(file)
    if not head or starts_record(head):
        return ""
    compression = compression_of(head) or ("zlib" if may_be_zlib(head) else "")
    if not compression:
        raise wrong_format(
            file, "tfrecord", "it does not start with a record's length and checksum"
        )
    return compression
