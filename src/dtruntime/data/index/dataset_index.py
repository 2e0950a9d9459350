"""The index of a dataset: its files, where their samples are, and its division into shards."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import overload

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ...storage import FileStat
from ...types import check_flag, check_whole
from ..readers import CsvOptions, IndexedFile, Options, ParquetOptions, RowBlocks, TfrecordOptions

VERSION = 1
"""The version of the stored form."""
ENOUGH_SHARDS = 512
"""Row groups and compressed files are kept whole while there are at least this many shards."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column and its Arrow type."""

    name: str
    type: str


@dataclass(frozen=True, eq=False)
class DatasetIndex:
    """The files of a dataset and where their samples are.

    Samples are numbered through all files in order. Two indexes with the same ``fingerprint`` are
    of the same data.
    """

    path: str
    """The path or URL that was indexed, absolute."""
    options: Options
    files: tuple[IndexedFile, ...]
    schema: pa.Schema = field(repr=False)
    """The columns that every file is read with."""

    @property
    def format(self) -> str:
        """``parquet``, ``csv`` or ``tfrecord``."""
        return str(self.options.__struct_config__.tag)

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns' names and types."""
        return tuple(Column(column.name, str(column.type)) for column in self.schema)

    @cached_property
    def bounds(self) -> NDArray[np.int64]:
        """The number of each file's first sample, followed by the number of samples."""
        return np.cumsum([0, *(file.samples for file in self.files)], dtype=np.int64)

    @property
    def total_samples(self) -> int:
        """The number of samples."""
        return int(self.bounds[-1])

    @property
    def total_bytes(self) -> int:
        """The size of all files."""
        return sum(file.stat.size for file in self.files)

    @cached_property
    def fingerprint(self) -> str:
        """Changes when a file, its content or the options for reading it change.

        The folder that contains all files is not part of it: data mounted elsewhere is the same.
        """
        digest = hashlib.sha256(repr(self.options).encode())
        root = common_root([file.url for file in self.files])
        for file in self.files:
            entry = file.url[len(root) :], file.stat.size, file.stat.fingerprint, file.samples
            digest.update(repr(entry).encode())
        return digest.hexdigest()[:32]

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Samples ``start`` to ``stop`` by file: its number, and the rows from where to where."""
        bounds = self.bounds
        first = int(np.searchsorted(bounds, start, side="right")) - 1
        for number in range(first, int(np.searchsorted(bounds, stop, side="left"))):
            begin, end = int(bounds[number]), int(bounds[number + 1])
            if begin < end:
                yield number, max(start, begin) - begin, min(stop, end) - begin


@dataclass(frozen=True, slots=True)
class Changes:
    """How the files of two indexes differ, by path or URL."""

    changed: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.changed or self.added or self.removed)

    def __str__(self) -> str:
        parts = []
        for what in ("changed", "added", "removed"):
            urls: tuple[str, ...] = getattr(self, what)
            if urls:
                more = f" and {len(urls) - 5} more" if len(urls) > 5 else ""
                parts.append(f"{len(urls)} {what} ({', '.join(urls[:5])}{more})")
        return "; ".join(parts) or "no changes"


def changes_since(old: DatasetIndex, new: DatasetIndex) -> Changes:
    """Return which files were changed, added and removed between two indexes of the same path."""
    before = {file.url: file.stat for file in old.files}
    after = {file.url: file.stat for file in new.files}
    return Changes(
        changed=tuple(url for url, stat in after.items() if before.get(url, stat) != stat),
        added=tuple(url for url in after if url not in before),
        removed=tuple(url for url in before if url not in after),
    )


def common_root(urls: Sequence[str]) -> str:
    """The folder that contains all files, with a trailing slash."""
    folders = [url[: url.rfind("/") + 1] for url in urls]
    shared = os.path.commonprefix(folders)  # noqa: RUF071 - cut back to whole folders below
    return shared[: shared.rfind("/") + 1]


class StoredIndex(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The stored form of an index: one list or packed array per attribute, for all files."""

    version: int
    path: str
    options: ParquetOptions | CsvOptions | TfrecordOptions
    schema: bytes
    file_schemas: list[bytes]
    root: str
    names: list[str]
    sizes: list[int]
    fingerprints: list[str]
    seekable: list[bool]
    schema_numbers: list[int]
    block_numbers: list[int]
    """How many blocks each file has."""
    counts: bytes
    offsets: bytes
    lengths: bytes


def index_to_json(index: DatasetIndex) -> bytes:
    """Return an index as JSON."""
    files = index.files
    schemas: dict[bytes, int] = {}
    numbers = [schemas.setdefault(_pack_schema(f.schema), len(schemas)) for f in files]
    root = common_root([file.url for file in files])
    return msgspec.json.encode(
        StoredIndex(
            version=VERSION,
            path=index.path,
            options=index.options,
            schema=_pack_schema(index.schema),
            file_schemas=list(schemas),
            root=root,
            names=[file.url[len(root) :] for file in files],
            sizes=[file.stat.size for file in files],
            fingerprints=[file.stat.fingerprint for file in files],
            seekable=[file.seekable for file in files],
            schema_numbers=numbers,
            block_numbers=[len(file.blocks) for file in files],
            counts=_pack([file.blocks.counts for file in files]),
            offsets=_pack([file.blocks.offsets for file in files]),
            lengths=_pack([file.blocks.lengths for file in files]),
        )
    )


def index_from_json(data: bytes) -> DatasetIndex:
    """Return the index that :func:`index_to_json` wrote; ``ValueError`` when it is not one."""
    try:
        stored = msgspec.json.decode(data, type=StoredIndex)
        if stored.version != VERSION:
            raise ValueError(f"version {stored.version} is not {VERSION}")
        return DatasetIndex(
            stored.path, stored.options, tuple(_files(stored)), _unpack_schema(stored.schema)
        )
    except (msgspec.MsgspecError, zlib.error, IndexError, pa.ArrowException) as exc:
        raise ValueError(f"not a stored index: {exc}") from exc


def _files(stored: StoredIndex) -> list[IndexedFile]:
    schemas = [_unpack_schema(data) for data in stored.file_schemas]
    arrays = [_unpack(data) for data in (stored.counts, stored.offsets, stored.lengths)]
    bounds = pairwise(accumulate(stored.block_numbers, initial=0))
    attributes = zip(
        stored.names,
        stored.sizes,
        stored.fingerprints,
        stored.seekable,
        stored.schema_numbers,
        bounds,
        strict=True,
    )
    return [
        IndexedFile(
            FileStat(stored.root + name, size, fingerprint),
            RowBlocks(*(array[first:last] for array in arrays)),
            schemas[number],
            seekable,
        )
        for name, size, fingerprint, seekable, number, (first, last) in attributes
    ]


def _pack(arrays: list[NDArray[np.int64]]) -> bytes:
    """Compressed differences of consecutive numbers."""
    joined = np.concatenate([*arrays, np.zeros(0, np.int64)])
    return zlib.compress(np.diff(joined, prepend=0).astype("<i8").tobytes(), 3)


def _unpack(data: bytes) -> NDArray[np.int64]:
    return np.cumsum(np.frombuffer(zlib.decompress(data), "<i8"), dtype=np.int64)


def _pack_schema(schema: pa.Schema) -> bytes:
    return bytes(schema.serialize())


def _unpack_schema(data: bytes) -> pa.Schema:
    return pa.ipc.read_schema(pa.BufferReader(data))


@dataclass(frozen=True, slots=True)
class ShardPiece:
    """The part of a shard in one file."""

    file: int
    """The file's number in the index."""
    url: str
    start: int
    """The first row in the file."""
    count: int
    bytes: int
    """How much of the file has to be read."""


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """A range of samples and where they are."""

    shard_id: int
    start: int
    end: int
    """Exclusive."""
    pieces: tuple[ShardPiece, ...]

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def urls(self) -> tuple[str, ...]:
        """The files that contain it."""
        return tuple(piece.url for piece in self.pieces)


class Shards(Sequence[ShardSpec]):
    """The shards of a dataset, stored as their bounds."""

    def __init__(self, dataset: DatasetIndex, bounds: NDArray[np.int64]) -> None:
        self.dataset = dataset
        self.bounds = bounds
        """The first sample of each shard, followed by the number of samples."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @overload
    def __getitem__(self, number: int) -> ShardSpec: ...
    @overload
    def __getitem__(self, number: slice) -> list[ShardSpec]: ...
    def __getitem__(self, number: int | slice) -> ShardSpec | list[ShardSpec]:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        if not -len(self) <= number < len(self):
            raise IndexError(f"shard {number} is not one of {len(self)}")
        shard_id = number % len(self)
        start, end = int(self.bounds[shard_id]), int(self.bounds[shard_id + 1])
        pieces = (self._piece(*part) for part in self.dataset.pieces(start, end))
        return ShardSpec(shard_id, start, end, tuple(pieces))

    @cached_property
    def bytes_read(self) -> NDArray[np.int64]:
        """How much has to be read for each shard; what two shards need counts for both."""
        counts, lengths = _reading_units(self.dataset)
        ends = np.cumsum(counts)
        read = np.concatenate(([0], np.cumsum(lengths)))
        first = np.searchsorted(ends, self.bounds[:-1], side="right")
        last = np.searchsorted(ends - counts, self.bounds[1:], side="left")
        total: NDArray[np.int64] = read[last] - read[first]
        return total

    def _piece(self, number: int, start: int, stop: int) -> ShardPiece:
        file = self.dataset.files[number]
        size = file.stat.size
        if file.seekable:
            blocks = file.blocks.covering(start, stop)
            size = int(file.blocks.lengths[blocks.start : blocks.stop].sum())
        return ShardPiece(number, file.url, start, stop - start, size)


def shards(index: DatasetIndex, shard_size: int, exact: bool = False) -> Shards:
    """Divide a dataset into shards of about ``shard_size`` samples.

    A shard ends where a row group, a block or a file does, so that nothing is read for two
    shards. Row groups and compressed files larger than ``shard_size`` are kept whole as well,
    unless that leaves fewer than ``ENOUGH_SHARDS`` to share among workers: then they are divided
    into equal parts. With ``exact`` every shard but the last has ``shard_size`` samples.
    """
    check_whole("shard_size", shard_size, 1)
    total = index.total_samples
    marks = np.arange(shard_size, total, shard_size, dtype=np.int64)
    if not check_flag("exact", exact):
        ends = _natural_ends(index, max(shard_size, total // ENOUGH_SHARDS))
        marks = _nearest(ends, marks)
    return Shards(index, np.unique(np.concatenate(([0], marks, [total]))))


def _natural_ends(index: DatasetIndex, largest: int) -> NDArray[np.int64]:
    """Where shards may end: after each unit of reading, or within one that is too large."""
    counts, _ = _reading_units(index)
    parts = np.maximum(1, np.rint(counts / largest).astype(np.int64))
    unit = np.repeat(np.arange(len(counts)), parts)
    step = np.arange(len(unit)) - np.repeat(np.cumsum(parts) - parts, parts) + 1
    before = np.cumsum(counts) - counts
    ends: NDArray[np.int64] = before[unit] + counts[unit] * step // parts[unit]
    return ends


def _reading_units(index: DatasetIndex) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The samples and bytes of each unit of reading: a block, or a file that is not seekable."""
    units = [
        (file.blocks.counts, file.blocks.lengths)
        if file.seekable
        else (np.array([file.samples]), np.array([file.stat.size]))
        for file in index.files
    ]
    counts, lengths = (np.concatenate(column) for column in zip(*units, strict=True))
    return counts[counts > 0], lengths[counts > 0]


def _nearest(ends: NDArray[np.int64], marks: NDArray[np.int64]) -> NDArray[np.int64]:
    above = np.minimum(np.searchsorted(ends, marks), len(ends) - 1)
    below = np.maximum(above - 1, 0)
    closer = marks - ends[below] < ends[above] - marks
    return np.where(closer, ends[below], ends[above])
