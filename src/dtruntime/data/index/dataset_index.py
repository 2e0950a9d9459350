"""What is known about a dataset's files."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ...storage import FileStat
from ..readers import CsvOptions, IndexedFile, Options, ParquetOptions, RowBlocks, TfrecordOptions


@dataclass(frozen=True, slots=True)
class Column:
    """A column and its Arrow type."""

    name: str
    type: str


@dataclass(frozen=True, eq=False)
class DatasetIndex:
    """The files of a dataset and where their samples are.

    Samples are numbered through all files in order. Two indexes are of the same data when their
    ``fingerprint`` is the same.
    """

    path: str
    """The place that was indexed, absolute."""
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
        """The number of each file's first sample, and behind the last that of all samples."""
        return np.cumsum([0, *(file.samples for file in self.files)], dtype=np.int64)

    @property
    def total_samples(self) -> int:
        """How many samples there are."""
        return int(self.bounds[-1])

    @property
    def total_bytes(self) -> int:
        """How large the files are."""
        return sum(file.stat.size for file in self.files)

    @cached_property
    def fingerprint(self) -> str:
        """Changes when a file, its content or the way of reading it changes.

        The folder that holds all files is no part of it, so that data mounted elsewhere is the
        same data.
        """
        digest = hashlib.sha256(repr(self.options).encode())
        root = common_root([file.url for file in self.files])
        for file in self.files:
            entry = file.url[len(root) :], file.stat.size, file.stat.fingerprint, file.samples
            digest.update(repr(entry).encode())
        return digest.hexdigest()[:32]


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
    """Say which files changed, came and went between two indexes of the same place."""
    before = {file.url: file.stat for file in old.files}
    after = {file.url: file.stat for file in new.files}
    return Changes(
        changed=tuple(url for url, stat in after.items() if before.get(url, stat) != stat),
        added=tuple(url for url in after if url not in before),
        removed=tuple(url for url in before if url not in after),
    )


def common_root(urls: Sequence[str]) -> str:
    """The folder that all files lie in, with a slash at its end."""
    folders = [url[: url.rfind("/") + 1] for url in urls]
    shared = os.path.commonprefix(folders)  # noqa: RUF071 - cut back to whole folders below
    return shared[: shared.rfind("/") + 1]


VERSION = 1


class StoredIndex(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An index with one list or packed array for each attribute of all files."""

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
    """Differences of neighbours, which compress well."""
    joined = np.concatenate([*arrays, np.zeros(0, np.int64)])
    return zlib.compress(np.diff(joined, prepend=0).astype("<i8").tobytes(), 3)


def _unpack(data: bytes) -> NDArray[np.int64]:
    return np.cumsum(np.frombuffer(zlib.decompress(data), "<i8"), dtype=np.int64)


def _pack_schema(schema: pa.Schema) -> bytes:
    return bytes(schema.serialize())


def _unpack_schema(data: bytes) -> pa.Schema:
    return pa.ipc.read_schema(pa.BufferReader(data))
