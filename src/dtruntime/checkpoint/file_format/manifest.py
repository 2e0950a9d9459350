"""The checkpoint format, version 1: manifests, parts, packs and chunks.

A *part* is what one rank saved: a stream of bytes that holds all its buffers, cut into *chunks*.
Chunks are stored one after the other in files called *packs*; a chunk that an earlier checkpoint
has stored is referred to, not stored again. The *manifest* names the parts. It is written last, and
writing it commits the checkpoint: what no manifest names does not exist.

``docs/checkpoint-format.md`` describes the files for readers without this code.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
import xxhash

from ...errors import CheckpointDamagedError, StorageError

FORMAT = "strata-checkpoint"
VERSION = 1
MANIFESTS, PARTS, PACKS, LOCKS = "manifests", "parts", "packs", "locks"
POINTER = "latest.json"
IDENTITY = "place.json"
S = TypeVar("S", bound=msgspec.Struct)
_MANIFEST = re.compile(r"(\d{8,})-(\d{12,})\.json")


class Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A section of a part's stream, and where it is stored."""

    offset: int
    """In the stream."""
    length: int
    digest: str
    """XXH3-128 of its bytes, before encoding."""
    pack: int
    """The index of its pack among the part's."""
    position: int
    """Where it begins in the pack."""
    stored: int
    """Its size there."""
    codec: str = ""
    """How it is encoded: empty for not at all, ``gzip``, ``zstd``, or ``delta2`` and the like: the
    difference from the chunk ``base``, in elements of that many bytes."""
    base: str = ""
    """For a difference: the digest of the chunk it is from, one of the part's ``bases``."""


class Pack(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A file of chunks."""

    file: str
    size: int


class Extent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a buffer lies in the stream."""

    offset: int
    length: int
    dtype: str
    key: str


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="part"):
    """What one rank saved."""

    rank: int
    kind: str
    """``bytes``, ``state``, or ``dcp``: items of torch's distributed checkpoint."""
    length: int
    """Of the stream."""
    chunks: tuple[Chunk, ...]
    packs: tuple[Pack, ...]
    extents: tuple[Extent, ...] = ()
    """For ``state`` and ``dcp``: the buffers, as the skeleton numbers them."""
    skeleton: Any = None
    """For ``state``: everything but the buffers' bytes. For ``dcp``, in the part of the rank that
    committed: which items there are, and which extents of which ranks hold them."""
    bases: tuple[Chunk, ...] = ()
    """Chunks of earlier checkpoints that deltas are differences from."""
    written_bytes: int = 0
    """In a file of its own: how many bytes had to be stored for it."""
    metrics: dict[str, float] = {}
    """In a file of its own: as in the manifest, so that any process can write that."""
    metadata: dict[str, str] = {}

    @property
    def pack_files(self) -> tuple[str, ...]:
        """The packs that hold its chunks."""
        return tuple(pack.file for pack in self.packs)


class PartFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="file"):
    """A part that has a file of its own, as in checkpoints of several ranks."""

    rank: int
    file: str
    digest: str
    """Of the file."""
    packs: tuple[str, ...]
    """The packs that hold its chunks."""
    size_bytes: int = 0
    kind: str = ""
    """The kind of the part, if it has to be known without reading that."""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A committed checkpoint."""

    checkpoint_id: str
    sequence: int
    """Counts the commits in this location."""
    step: int
    epoch: int
    is_full: bool
    """Whether every chunk was stored with it."""
    created_at: float
    size_bytes: int
    """The length of all streams."""
    written_bytes: int
    """How many bytes had to be stored for it."""
    parts: tuple[Part | PartFile, ...]
    metrics: dict[str, float] = {}
    metadata: dict[str, str] = {}
    format: str = FORMAT
    version: int = VERSION

    @property
    def name(self) -> str:
        """The name of its file."""
        return manifest_name(self.sequence, self.step)

    @property
    def files(self) -> set[str]:
        """All files that it needs, except itself."""
        files: set[str] = set()
        for part in self.parts:
            files.update(
                (part.file, *part.packs) if isinstance(part, PartFile) else part.pack_files
            )
        return files


def is_stored_in_full(part: Part, written: int) -> bool:
    """Whether all chunks of a part were stored with it; ``written`` bytes were."""
    own_only = len(part.packs) <= 1 and not part.bases
    return own_only and (written > 0 or not part.chunks)


def digest_of(data: bytes | memoryview) -> str:
    """The digest of some bytes."""
    return xxhash.xxh3_128_hexdigest(data)


def manifest_name(sequence: int, step: int) -> str:
    """The name of a manifest's file; names sort in commit order."""
    return f"{MANIFESTS}/{sequence:08d}-{step:012d}.json"


def parse_manifest_name(name: str) -> tuple[int, int] | None:
    """The sequence and step of a manifest's file; None if it is something else."""
    match = _MANIFEST.fullmatch(name.removeprefix(f"{MANIFESTS}/"))
    return (int(match[1]), int(match[2])) if match else None


def seal(value: msgspec.Struct) -> bytes:
    """The content of a manifest's or part's file: JSON, and a line with its digest."""
    body = msgspec.json.encode(value)
    return body + b"\n" + digest_of(body).encode() + b"\n"


def open_manifest(data: bytes, where: str) -> Manifest:
    """Read what `seal` wrote; ``StorageError`` if it is damaged or of another version."""
    return _open(data, where, Manifest)


def open_part(data: bytes, where: str) -> Part:
    """Read what `seal` wrote; ``StorageError`` if it is damaged or of another version."""
    return _open(data, where, Part)


def _open(data: bytes, where: str, kind: type[S]) -> S:
    body, _, rest = bytes(data).partition(b"\n")
    if rest.strip().decode(errors="replace") != digest_of(body):
        detail = "its content does not match its digest"
        raise CheckpointDamagedError(f"{where} is damaged: {detail}", file=where, detail=detail)
    try:
        version = msgspec.json.decode(body, type=_Version).version
        if version != VERSION:
            raise StorageError(
                f"{where} has version {version}, and this is version {VERSION} of the format: use "
                "a newer Strata to read it"
            )
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as exc:
        raise CheckpointDamagedError(
            f"{where} is damaged: it is not what its name says: {exc}", file=where
        ) from exc


class _Version(msgspec.Struct):
    version: int = VERSION
