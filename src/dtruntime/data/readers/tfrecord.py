"""The TFRecord reader: records as they are, or as the columns of ``tf.train.Example``.

A record's frame is its length, the length's checksum, the data, and the data's checksum. The
checksums are CRC-32C, rotated and offset.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pyarrow as pa
from google_crc32c import value as crc32c
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from ...errors import ShardError
from ...storage import ByteSource, FileStat
from ...storage.backend import changed
from .compression import compression_of, may_be_zlib
from .format_reader import (
    BATCH_BYTES,
    MASK_OFFSET,
    Advance,
    IndexedFile,
    RecordReader,
    RowBlocks,
    SchemaConflict,
    TfrecordOptions,
    block_ends,
    describe_difference,
    head_of,
    starts_record,
    wrong_format,
)
from .tfrecord_examples import (
    PADDING,
    Array,
    Feature,
    MalformedExample,
    Wire,
    count_values,
    parse_examples,
)

HEADER = 12
FRAME = 16
"""What a record takes besides its data."""
PARSED_BYTES = 2**20
PARSED_RECORDS = 1000
"""How much is parsed at once, or how many large records.

The result should fit into the processor's cache, and each call costs a millisecond.
"""
_LENGTH = struct.Struct("<Q")
_RAW = pa.schema([("record", pa.binary())])


def masked_crcs(pieces: list[bytes]) -> NDArray[np.uint32]:
    """The checksum of each of ``pieces``."""
    return _mask(np.fromiter(map(crc32c, pieces), np.uint32, len(pieces)))


def masked_length_crcs(lengths: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """The checksum of each of ``lengths``, written as eight bytes.

    A CRC is affine over single bits, so it is combined from one table per byte.
    """
    tables = _tables()
    octets = lengths.astype("<u8").view(np.uint8).reshape(-1, 8)
    crcs = np.full(len(lengths), crc32c(bytes(8)), np.uint32)
    for position in range(8):
        crcs ^= tables[position][octets[:, position]]
    return _mask(crcs)


@cache
def _tables() -> NDArray[np.uint32]:
    """How each byte value at each of eight positions changes the checksum of zeros."""
    zeros = crc32c(bytes(8))
    rows = [
        [crc32c(bytes(i) + bytes([byte]) + bytes(7 - i)) ^ zeros for byte in range(256)]
        for i in range(8)
    ]
    return np.array(rows, np.uint32)


def _mask(crcs: NDArray[np.uint32]) -> NDArray[np.uint32]:
    return ((crcs >> np.uint32(15)) | (crcs << np.uint32(17))) + np.uint32(MASK_OFFSET)


@dataclass(frozen=True, slots=True)
class Frames:
    """Consecutive complete records."""

    data: bytes
    starts: Array
    """Where the data of each record starts in ``data``."""
    stops: Array
    first: int
    """The number of the first one in the file."""
    offset: int
    """Where ``data`` begins in the file."""

    @classmethod
    def parse(cls, data: bytes, first: int, offset: int) -> Frames:
        """Find the complete records that ``data`` starts with."""
        starts, stops = [], []
        at, size = 0, len(data)
        unpack = _LENGTH.unpack_from
        while at + HEADER <= size:
            stop = at + unpack(data, at)[0] + FRAME
            if stop > size:
                break
            starts.append(at + HEADER)
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
        starts, stops = self.starts[start:stop], self.stops[start:stop]
        return replace(self, starts=starts, stops=stops, first=self.first + start)

    def pieces(self) -> Iterator[Frames]:
        """The records in parts to be parsed at once, each followed by ``PADDING``."""
        begin, origin = 0, int(self.starts[0]) - HEADER
        view = memoryview(self.data)
        size = max(PARSED_BYTES, PARSED_RECORDS * (len(self.data) // len(self)))
        for last in block_ends(self.ends - origin, size).tolist():
            low, high = int(self.starts[begin]) - HEADER, int(self.ends[last])
            data = b"".join((view[low:high], PADDING))
            part = self.part(begin, last + 1)
            yield Frames(data, part.starts - low, part.stops - low, part.first, self.offset + low)
            begin = last + 1

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
            raise ShardError(
                f"{file.url}: record {self.first + number} at byte {self._place(number)} is "
                f"corrupt: the checksum of its {what} does not match; write the file again, or "
                "leave it out"
            )

    def malformed(self, file: FileStat, error: MalformedExample) -> ShardError:
        """The error for a record that is not an Example like the others."""
        return ShardError(
            f"{file.url}: record {self.first + error.record} at byte {self._place(error.record)}: "
            f"{error.reason}. Pass TfrecordOptions(raw=True) to get records as they are"
        )

    def _stored(self, at: Array) -> NDArray[np.uint32]:
        windows = sliding_window_view(np.frombuffer(self.data, np.uint8), 4)
        return np.ascontiguousarray(windows[at]).view("<u4").ravel()

    def _place(self, number: int) -> int:
        return self.offset + int(self.starts[number]) - HEADER


def read_frames(chunks: Iterable[bytes], file: FileStat) -> Iterator[Frames]:
    """Divide a file's bytes into runs of complete records."""
    first = offset = needed = 0
    rest: list[bytes] = []
    for chunk in chunks:
        rest.append(chunk)
        if sum(map(len, rest)) < needed:
            continue
        data = b"".join(rest)
        frames = Frames.parse(data, first, offset)
        used = int(frames.ends[-1]) if len(frames) else 0
        if used:
            yield frames
        first, offset, rest = first + len(frames), offset + used, [data[used:]]
        needed = _size_of_next(rest[0], first, offset, file)
    if rest and rest[0]:
        raise ShardError(
            f"{file.url} ends within record {first}, which starts at byte {offset}: the file was "
            "cut off while being written; write it again, or leave it out"
        )


def _size_of_next(data: bytes, first: int, offset: int, file: FileStat) -> int:
    """The size of the record that ``data`` starts with, or of its header if that is incomplete."""
    if len(data) < HEADER:
        return HEADER
    if not starts_record(data):
        raise ShardError(
            f"{file.url}: record {first} at byte {offset} is corrupt: the checksum of its length "
            "does not match; write the file again, or leave it out"
        )
    return int(_LENGTH.unpack_from(data)[0]) + FRAME


class TfrecordReader(RecordReader):
    """Verifies the checksum of every record, when indexing and when reading."""

    suffixes = tuple(
        f".{kind}{ending}"
        for kind in ("tfrecord", "tfrecords", "tfrec")
        for ending in ("", ".gz", ".gzip", ".zlib", ".zst", ".bz2")
    )

    def __init__(self, options: TfrecordOptions, source: ByteSource) -> None:
        super().__init__(source)
        self._raw = options.raw

    def index_file(self, file: FileStat, advance: Advance) -> IndexedFile:
        """Find the records, and the features of all of them."""
        compression = self._compression(file)
        parts = []
        schema = _RAW if self._raw else None
        for frames in read_frames(self._stream(file, compression, advance), file):
            frames.verify(file)
            for piece in () if self._raw else frames.pieces():
                schema = self._learn(file, piece, schema)
            rows = np.arange(1, len(frames) + 1)
            parts.append(RowBlocks.cut(frames.ends, rows, frames.offset))
        blocks = RowBlocks.concat(parts)
        if schema is not None and not schema.names:
            raise ShardError(
                f"{file.url}: none of its {blocks.rows} records has features: pass "
                "TfrecordOptions(raw=True) to get records as they are"
            )
        return IndexedFile(file, blocks, schema or pa.schema([]), not compression)

    def merge(self, left: pa.Schema, right: pa.Schema) -> pa.Schema:
        """Types must agree; a feature that some files lack becomes a list that is null there."""
        if not left.names or not right.names:
            return left if left.names else right
        if set(left.names).isdisjoint(right.names):
            raise SchemaConflict(describe_difference(left, right))
        return merge_schemas(left, right)

    def _learn(self, file: FileStat, frames: Frames, earlier: pa.Schema | None) -> pa.Schema:
        """Return a schema that also fits these records: scalars where possible, or lists."""
        try:
            features = count_values(frames.data, frames.starts, frames.stops)
            schema = pa.schema(
                [
                    (name, one.type if one.is_scalar(len(frames)) else pa.list_(one.type))
                    for name, one in sorted(features.items())
                ]
            )
            return schema if earlier is None else merge_schemas(earlier, schema)
        except MalformedExample as exc:
            raise frames.malformed(file, exc) from exc
        except SchemaConflict as exc:
            raise ShardError(
                f"{file.url}: records from {frames.first} on do not match the earlier ones: {exc}"
            ) from exc

    def _read(self, file: IndexedFile, start: int, stop: int, schema: pa.Schema) -> pa.Table:
        tables = []
        for numbers in file.blocks.batches(start, stop, BATCH_BYTES):
            frames = self._read_frames(file, numbers)
            begin = max(start, frames.first)
            end = min(stop, frames.first + len(frames))
            frames = frames.part(begin - frames.first, end - frames.first)
            frames.verify(file.stat)
            tables += [self._table(file.stat, piece, schema) for piece in frames.pieces()]
        return pa.concat_tables(tables)

    def _table(self, file: FileStat, frames: Frames, schema: pa.Schema) -> pa.Table:
        if self._raw:
            records = Wire(frames.data).spans(frames.starts, frames.stops)
            return pa.table([records.cast(pa.binary())], schema=schema)
        try:
            features = parse_examples(frames.data, frames.starts, frames.stops, schema.names)
        except MalformedExample as exc:
            raise frames.malformed(file, exc) from exc
        columns = []
        for field in schema:
            try:
                columns.append(to_column(features.get(field.name), field.type, len(frames)))
            except SchemaConflict as exc:
                raise ShardError(
                    f"{file.url}: feature {field.name!r} of records {frames.first} to "
                    f"{frames.first + len(frames)} has changed since it was indexed ({exc}): "
                    "index the dataset again"
                ) from exc
        return pa.table(columns, schema=schema)

    def _read_frames(self, file: IndexedFile, numbers: range) -> Frames:
        first, end = (int(row) for row in file.blocks.bounds[[numbers.start, numbers.stop]])
        offset = int(file.blocks.offsets[numbers.start])
        frames = Frames.parse(self._read_blocks(file, numbers), first, offset)
        if len(frames) != end - first:
            raise changed(file.url)
        return frames

    def _compression(self, file: FileStat) -> str:
        head = head_of(file, self._source)
        if not head or starts_record(head):
            return ""
        compression = compression_of(head) or ("zlib" if may_be_zlib(head) else "")
        if not compression:
            detail = "it does not start with a record's length and checksum"
            raise wrong_format(file, "tfrecord", detail, self._source)
        return compression


def merge_schemas(left: pa.Schema, right: pa.Schema) -> pa.Schema:
    """Return columns that fit both parts; one that a part lacks becomes a list."""
    fields = []
    for name in sorted({*left.names, *right.names}):
        types = [schema.field(name).type for schema in (left, right) if name in schema.names]
        items = {item_type(kind) for kind in types}
        if len(items) > 1:
            raise SchemaConflict(f"{name!r} is {types[0]} in the first, {types[1]} in the second")
        scalar = len(types) == 2 and not any(map(pa.types.is_list, types))
        fields.append((name, types[0] if scalar else pa.list_(items.pop())))
    return pa.schema(fields)


def item_type(kind: pa.DataType) -> pa.DataType:
    """The type of a column's single values."""
    return kind.value_type if pa.types.is_list(kind) else kind


def to_column(feature: Feature | None, kind: pa.DataType, records: int) -> pa.Array:
    """Return a feature as a column of ``records`` rows; ``SchemaConflict`` if it does not fit."""
    if feature is None:
        none = np.zeros(0, np.int64)
        feature = Feature(item_type(kind), none, none, pa.array([], item_type(kind)))
    if feature.type != item_type(kind):
        raise SchemaConflict(f"it is {feature.type}, not {kind}")
    if not pa.types.is_list(kind):
        if not feature.is_scalar(records):
            raise SchemaConflict("a record has none or several of its values")
        return feature.values
    counts = np.zeros(records, np.int64)
    counts[feature.records] = feature.counts
    missing = np.ones(records, np.bool_)
    missing[feature.records] = False
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    mask = pa.array(missing) if missing.any() else None
    return pa.ListArray.from_arrays(offsets, feature.values, type=kind, mask=mask)
