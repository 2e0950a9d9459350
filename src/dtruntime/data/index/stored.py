"""The compact JSON form of an index."""

from __future__ import annotations

import zlib
from itertools import accumulate, pairwise

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ...storage import FileStat
from ..readers import Blocks, CsvOptions, IndexedFile, ParquetOptions, TfrecordOptions
from .dataset_index import DatasetIndex, common_root

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
            Blocks(*(array[first:last] for array in arrays)),
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
