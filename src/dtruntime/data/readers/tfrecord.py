"""TFRecord: checked records, given as they are or as the columns of ``tf.train.Example``."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from ...errors import ShardError
from ...storage import ByteSource, FileStat, data_files
from ...storage.backend import changed
from .compression import InflatedFiles, compression_of, inflate, may_be_zlib
from .format_reader import (
    BATCH_BYTES,
    Advance,
    FileIndex,
    IndexedFile,
    Reader,
    RowBlocks,
    SchemaConflict,
    TfrecordOptions,
    block_ends,
    describe_difference,
)
from .protobuf_wire import Wire
from .sniffing import head_of, starts_record, wrong_format
from .tfrecord_examples import (
    Feature,
    FeatureCounts,
    MalformedExample,
    count_values,
    parse_examples,
)
from .tfrecord_frames import Frames, read_frames

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
