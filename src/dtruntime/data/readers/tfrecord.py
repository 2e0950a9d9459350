"""TFRecord: checked records, given as they are or as the columns of ``tf.train.Example``."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import pyarrow as pa
from google_crc32c import value as crc32c
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from ...errors import ShardError
from ...storage import ByteSource, FileStat, data_files
from ...storage.backend import changed
from .compression import InflatedFiles, compression_of, inflate, may_be_zlib
from .format_reader import (
    BATCH_BYTES,
    MASK_OFFSET,
    Advance,
    FileIndex,
    IndexedFile,
    Reader,
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
    FeatureCounts,
    MalformedExample,
    Wire,
    count_values,
    parse_examples,
)


def masked_crcs(pieces: list[bytes]) -> NDArray[np.uint32]:
    """The checksum of each of ``pieces``."""
    return _mask(np.fromiter(map(crc32c, pieces), np.uint32, len(pieces)))


def masked_length_crcs(lengths: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """The checksum of each of ``lengths`` written as eight bytes.

    A CRC is affine over single bits, so it is put together from one table for each byte.
    """
    tables = _tables()
    octets = lengths.astype("<u8").view(np.uint8).reshape(-1, 8)
    crcs = np.full(len(lengths), crc32c(bytes(8)), np.uint32)
    for position in range(8):
        crcs ^= tables[position][octets[:, position]]
    return _mask(crcs)


@cache
def _tables() -> NDArray[np.uint32]:
    """What a byte's value at each of eight positions changes in the checksum of zeros."""
    zeros = crc32c(bytes(8))
    rows = [
        [crc32c(bytes(i) + bytes([byte]) + bytes(7 - i)) ^ zeros for byte in range(256)]
        for i in range(8)
    ]
    return np.array(rows, np.uint32)


def _mask(crcs: NDArray[np.uint32]) -> NDArray[np.uint32]:
    return ((crcs >> np.uint32(15)) | (crcs << np.uint32(17))) + np.uint32(MASK_OFFSET)


HEADER = 12
FRAME = 16
"""What a record takes beside its data."""
PARSED_BYTES = 2**20
PARSED_RECORDS = 1000
"""So much, and of large records so many, are parsed at once.

What is made of them should fit into the processor's cache, and each time costs a millisecond.
"""
_LENGTH = struct.Struct("<Q")


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
        return Frames(
            self.data,
            self.starts[start:stop],
            self.stops[start:stop],
            self.first + start,
            self.offset,
        )

    def pieces(self) -> Iterator[Frames]:
        """The same records in runs to be parsed at once, each with ``PADDING`` behind."""
        begin, origin = 0, int(self.starts[0]) - HEADER
        view = memoryview(self.data)
        size = max(PARSED_BYTES, PARSED_RECORDS * (len(self.data) // len(self)))
        for last in block_ends(self.ends - origin, size).tolist():
            low, high = int(self.starts[begin]) - HEADER, int(self.ends[last])
            chosen = slice(begin, last + 1)
            yield Frames(
                b"".join((view[low:high], PADDING)),
                self.starts[chosen] - low,
                self.stops[chosen] - low,
                self.first + begin,
                self.offset + low,
            )
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
        return self.offset + int(self.starts[number]) - HEADER

    def _corrupt(self, file: FileStat, number: int, what: str) -> ShardError:
        return ShardError(
            f"{file.url}: record {self.first + number} at byte {self._place(number)} is corrupt: "
            f"{what}; write the file again, or leave it out"
        )


def read_frames(chunks: Iterable[bytes], file: FileStat) -> Iterator[Frames]:
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
    if len(data) < HEADER:
        return HEADER
    if not starts_record(data):
        raise ShardError(
            f"{file.url}: record {first} at byte {offset} is corrupt: the checksum of its length "
            "does not match; write the file again, or leave it out"
        )
    return int(_LENGTH.unpack_from(data)[0]) + FRAME


_RAW = pa.schema([("record", pa.binary())])


class TfrecordReader(Reader):
    """Checks the checksum of every record, when indexing and when reading."""

    format = "tfrecord"
    suffixes = tuple(
        f".{kind}{ending}"
        for kind in ("tfrecord", "tfrecords", "tfrec")
        for ending in ("", ".gz", ".gzip", ".zlib", ".zst", ".bz2")
    )

    def __init__(
        self, options: TfrecordOptions | None = None, source: ByteSource = data_files
    ) -> None:
        self._source = source
        self._raw = (options or TfrecordOptions()).raw
        self._inflated = InflatedFiles(source=source)

    def index_file(self, file: FileStat, advance: Advance) -> FileIndex:
        """Find the records, and the features of all of them."""
        source = self._source
        compression = _compression(file, source)
        chunks = inflate(file, compression, source) if compression else source.stream(file)
        counts, offsets, lengths = [], [], []
        schema = _RAW if self._raw else None
        for frames in read_frames(chunks, file):
            frames.verify(file)
            for piece in () if self._raw else frames.pieces():
                schema = self._learned(file, piece, schema)
            ends = block_ends(frames.ends)
            counts.append(np.diff(ends, prepend=-1))
            bounds = np.concatenate(([0], frames.ends[ends]))
            offsets.append(bounds[:-1] + frames.offset)
            lengths.append(np.diff(bounds))
            advance(0 if compression else int(frames.ends[-1]))
        if compression:
            advance(file.size)
        none = [np.zeros(0, np.int64)]
        blocks = RowBlocks(*(np.concatenate(part or none) for part in (counts, offsets, lengths)))
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
            features = count_values(frames.data, frames.starts, frames.stops)
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
                    f"{frames.first + len(frames)} is not as it was indexed ({exc}): index the "
                    "dataset again"
                ) from exc
        return pa.table(columns, schema=schema)

    def _read_frames(self, file: IndexedFile, numbers: range) -> Frames:
        blocks = file.blocks
        first, last = blocks[numbers.start], blocks[numbers[-1]]
        length = last.offset + last.length - first.offset
        if file.seekable:
            data = self._source.read_range(file.stat, first.offset, length)
        else:
            compression = _compression(file.stat, self._source)
            data = self._inflated.read(file.stat, compression, first.offset, length, blocks.extent)
        frames = Frames.found(data, first.first, first.offset)
        if len(frames) != last.first + last.count - first.first:
            raise changed(file.url)
        return frames


def _compression(file: FileStat, source: ByteSource) -> str:
    """How a file is compressed; ``ShardError`` when it has no records."""
    head = head_of(file, source)
    if not head or starts_record(head):
        return ""
    compression = compression_of(head) or ("zlib" if may_be_zlib(head) else "")
    if not compression:
        raise wrong_format(
            file, "tfrecord", "it does not start with a record's length and checksum", source
        )
    return compression


def schema_of(features: Mapping[str, FeatureCounts], records: int) -> pa.Schema:
    """The columns of features in ``records`` records, by name: lists unless scalars suffice."""
    return pa.schema(
        [
            (name, feature.type if feature.is_scalar(records) else pa.list_(feature.type))
            for name, feature in sorted(features.items())
        ]
    )


def merge_schemas(left: pa.Schema, right: pa.Schema) -> pa.Schema:
    """Return columns that fit records of both; one that a part lacks is a list in both."""
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
        feature = Feature(item_type(kind), _NONE, _NONE, pa.array([], item_type(kind)))
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


_NONE = np.zeros(0, np.int64)
