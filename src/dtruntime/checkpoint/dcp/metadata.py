"""DCP's metadata as JSON with a fixed schema, and back; never by pickle."""

from __future__ import annotations

import os
from collections.abc import Iterable
from math import prod
from typing import Annotated, Any, Literal

import msgspec
import torch
from msgspec import Meta, Struct
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ...errors import CheckpointDamagedError, StorageError
from ..state_dict.torch_tensors import DTYPES

FORMAT = 1
VERSION: str | None = getattr(filesystem, "CURRENT_DCP_VERSION", None)
"""What torch's own writer puts into DCP's metadata."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MEMORY_FORMATS = {
    "contiguous": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "preserve": torch.preserve_format,
}

Count = Annotated[int, Meta(ge=0, le=1 << 53)]
Counts = Annotated[tuple[Count, ...], Meta(max_length=64)]


class Box(Struct, frozen=True, array_like=True):
    """What DCP calls a chunk: a box of a tensor that one rank saved."""

    offsets: Counts
    sizes: Counts


class TensorEntry(Struct, frozen=True, forbid_unknown_fields=True, tag="tensor"):
    """A tensor of the state."""

    name: str
    dtype: str
    size: Counts
    boxes: tuple[Box, ...]
    requires_grad: bool = False
    pin_memory: bool = False
    memory_format: Literal["contiguous", "channels_last", "preserve"] = "contiguous"


class BytesEntry(Struct, frozen=True, forbid_unknown_fields=True, tag="bytes"):
    """Another value of the state, as torch serialised it."""

    name: str


class Placed(Struct, frozen=True, array_like=True):
    """The location of an item's bytes: an extent of a rank's part."""

    name: str
    offsets: Counts | None
    rank: Count
    extent: Count


class StorageEntry(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """DCP's ``StorageMeta`` of a save."""

    checkpoint_id: str | None = None
    save_id: str | None = None
    modules: tuple[str, ...] = ()


class DcpIndex(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The description of a distributed checkpoint."""

    entries: tuple[TensorEntry | BytesEntry, ...]
    placed: tuple[Placed, ...]
    paths: dict[str, tuple[str | int, ...]] | None
    """The planner's data: the path of each flat name in the nested state."""
    format: int
    version: str | None = None
    """The version of DCP's own format."""
    storage_meta: StorageEntry | None = None


Location = tuple[int, int]
"""A rank, and the number of an extent of its part."""


def encode(metadata: Any, placed: Iterable[tuple[Any, Location]]) -> Any:
    """Describe a checkpoint whose items, by their index, are at these locations.

    ``TypeError`` when a planner added data that the schema does not have.
    """
    entries = metadata.state_dict_metadata.items()
    index = DcpIndex(
        tuple(_encode_entry(name, entry) for name, entry in entries),
        tuple(
            Placed(item.fqn, None if item.offset is None else tuple(item.offset), *location)
            for item, location in placed
        ),
        _encode_paths(metadata.planner_data),
        FORMAT,
        getattr(metadata, "version", None) or VERSION,
        _encode_storage(getattr(metadata, "storage_meta", None)),
    )
    return msgspec.to_builtins(index)


def _encode_storage(storage: Any) -> StorageEntry | None:
    if storage is None:
        return None
    named = storage.checkpoint_id
    return StorageEntry(
        None if named is None else os.fspath(named),
        storage.save_id,
        tuple(getattr(storage, "modules", ())),
    )


def _encode_entry(name: str, entry: Any) -> TensorEntry | BytesEntry:
    if isinstance(entry, BytesStorageMetadata):
        return BytesEntry(name)
    properties = entry.properties
    if properties.layout is not torch.strided:
        raise TypeError(f"{name} is a tensor of layout {properties.layout}: save it .to_dense()")
    formats = [key for key, value in _MEMORY_FORMATS.items() if value == properties.memory_format]
    return TensorEntry(
        name,
        name_of_dtype(properties.dtype, name),
        tuple(entry.size),
        tuple(Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks),
        bool(properties.requires_grad),
        bool(properties.pin_memory),
        formats[0] if formats else "contiguous",  # type: ignore[arg-type]
    )


def name_of_dtype(dtype: Any, tensor: str) -> str:
    """The name of a dtype; ``TypeError`` for one that cannot be stored."""
    name = _NAMES.get(dtype)
    if name is None:
        raise TypeError(f"{tensor} is a tensor of {dtype}, which cannot be stored: convert it")
    return name


def _encode_paths(data: Any) -> dict[str, tuple[str | int, ...]] | None:
    if data is None:
        return None
    if not isinstance(data, dict) or not all(
        type(name) is str and isinstance(path, tuple) and all(type(p) in (str, int) for p in path)
        for name, path in data.items()
    ):
        raise TypeError(
            f"the save planner added data of its own ({type(data).__name__}), which Strata does "
            "not store: only the paths of DefaultSavePlanner are"
        )
    return data


def decode(skeleton: Any, where: str) -> Any:
    """DCP's ``Metadata``, with the `Location` of each item.

    ``CheckpointDamagedError`` when it is not what `encode` wrote.
    """
    if not isinstance(skeleton, dict) or skeleton.get("format") != FORMAT:
        raise StorageError(f"{where} has a description that this version of Strata cannot read")
    try:
        index = msgspec.convert(skeleton, DcpIndex)
        entries = {entry.name: _decode_entry(entry) for entry in index.entries}
    except (msgspec.ValidationError, ValueError) as exc:
        raise CheckpointDamagedError(
            f"{where} is damaged: its description is not one: {exc}"
        ) from exc
    stored = {
        MetadataIndex(item.name, item.offsets): (item.rank, item.extent) for item in index.placed
    }
    found = Metadata(state_dict_metadata=entries, planner_data=index.paths, storage_data=stored)
    found.version = index.version
    found.storage_meta = _decode_storage(index.storage_meta)
    return found


def _decode_storage(entry: StorageEntry | None) -> Any:
    if entry is None:
        return StorageMeta()
    found = StorageMeta(checkpoint_id=entry.checkpoint_id, save_id=entry.save_id)
    found.modules = list(entry.modules)
    return found


def _decode_entry(entry: TensorEntry | BytesEntry) -> Any:
    if isinstance(entry, BytesEntry):
        return BytesStorageMetadata()
    if entry.dtype not in DTYPES:
        raise ValueError(f"this version of torch has no dtype {entry.dtype!r:.80}")
    for box in (*entry.boxes, Box((0,) * len(entry.size), entry.size)):
        if not _fits(box, entry.size):
            raise ValueError(f"{entry.name!r:.80} of size {entry.size} has the chunk {box}")
    return TensorStorageMetadata(
        TensorProperties(
            dtype=DTYPES[entry.dtype],
            requires_grad=entry.requires_grad,
            memory_format=_MEMORY_FORMATS[entry.memory_format],
            pin_memory=entry.pin_memory,
        ),
        torch.Size(entry.size),
        [ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.sizes)) for b in entry.boxes],
    )


def _fits(box: Box, size: tuple[int, ...]) -> bool:
    if not len(box.offsets) == len(box.sizes) == len(size) or prod(size) > 1 << 53:
        return False
    sides = zip(box.offsets, box.sizes, size, strict=True)
    return all(offset + length <= whole for offset, length, whole in sides)
