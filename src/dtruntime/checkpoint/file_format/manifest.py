"""The checkpoint format, version 1: what the files of a checkpoint say.

A *part* is what one rank saved: a stream of bytes in which all its buffers lie, cut into *chunks*.
Chunks are stored in *packs*, files of chunks one after the other; a chunk that an earlier
checkpoint has stored is not stored again but named there. The *manifest* names the parts. Whoever
writes it, last of all, commits the checkpoint: what no manifest names does not exist.

``docs/checkpoint-format.md`` describes the files for readers without this code.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
import xxhash

from ...errors import CheckpointDamagedError, StorageError

FORMAT = "strata-checkpoint"
VERSION = 1
MANIFESTS, PARTS, PACKS, LOCKS = "manifests", "parts", "packs", "locks"
POINTER = "latest.json"
IDENTITY = "place.json"
_MANIFEST = re.compile(r"(\d{8,})-(\d{12,})\.json")


class Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A stretch of a part's stream, and where it is stored."""

    offset: int
    """In the stream."""
    length: int
    digest: str
    """XXH3-128 of its bytes, before encoding."""
    pack: int
    """Which of the part's packs has it."""
    position: int
    """Where it begins in the pack."""
    stored: int
    """How many bytes it takes there."""
    codec: str = ""
    """How it is encoded: nothing, ``gzip``, ``zstd``, or ``delta2`` and the like: the difference
    from the chunk ``base``, in elements of so many bytes."""
    base: str = ""
    """With a difference: the digest of the chunk it is from, one of this part's ``bases``."""


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
    """With ``state`` and ``dcp``: the buffers, in the order of the skeleton's numbers."""
    skeleton: Any = None
    """With ``state``: everything but the buffers' bytes. With ``dcp``: which items there are and
    which extents of which ranks have them, in the part of the rank that committed."""
    bases: tuple[Chunk, ...] = ()
    """Chunks of earlier checkpoints that deltas are differences from."""
    written_bytes: int = 0
    """In a file of its own: what had to be stored for it."""
    metrics: dict[str, float] = {}
    """In a file of its own: as in the manifest, which can then be written by anybody."""
    metadata: dict[str, str] = {}

    @property
    def pack_files(self) -> tuple[str, ...]:
        """The packs that have its chunks."""
        return tuple(pack.file for pack in self.packs)


class PartFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="file"):
    """A part that has a file of its own, as in checkpoints of several ranks."""

    rank: int
    file: str
    digest: str
    """Of the file."""
    packs: tuple[str, ...]
    """The packs that have its chunks."""
    size_bytes: int = 0
    kind: str = ""
    """That of the part, where it has to be known without reading it."""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A committed checkpoint."""

    checkpoint_id: str
    sequence: int
    """Counts the commits in this place."""
    step: int
    epoch: int
    is_full: bool
    """Whether every chunk was stored with it."""
    created_at: float
    size_bytes: int
    """Of all streams."""
    written_bytes: int
    """What had to be stored for it."""
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
        """All files that it needs, itself excepted."""
        needed: set[str] = set()
        for part in self.parts:
            if isinstance(part, PartFile):
                needed |= {part.file, *part.packs}
            else:
                needed |= set(part.pack_files)
        return needed


def is_stored_in_full(part: Part, written: int) -> bool:
    """Whether all chunks of a part were stored with it; ``written`` bytes were."""
    own_only = len(part.packs) <= 1 and not part.bases
    return own_only and (written > 0 or not part.chunks)


def digest_of(data: bytes | memoryview) -> str:
    """The digest of some bytes."""
    return xxhash.xxh3_128_hexdigest(data)


def manifest_name(sequence: int, step: int) -> str:
    """The name of a manifest's file; names sort in the order of commits."""
    return f"{MANIFESTS}/{sequence:08d}-{step:012d}.json"


def parse_manifest_name(name: str) -> tuple[int, int] | None:
    """The sequence and step of a manifest's file; none when it is something else."""
    found = _MANIFEST.fullmatch(name.removeprefix(f"{MANIFESTS}/"))
    return (int(found[1]), int(found[2])) if found else None


def seal(value: msgspec.Struct) -> bytes:
    """A manifest or part as the content of its file: JSON, and a line with its digest."""
    body = msgspec.json.encode(value)
    return body + b"\n" + digest_of(body).encode() + b"\n"


def open_manifest(data: bytes, where: str) -> Manifest:
    """Read what `seal` wrote; ``StorageError`` when it is damaged or of another version."""
    manifest: Manifest = _opened(data, where, Manifest)
    return manifest


def open_part(data: bytes, where: str) -> Part:
    """Read what `seal` wrote; ``StorageError`` when it is damaged."""
    part: Part = _opened(data, where, Part)
    return part


def _opened(data: bytes, where: str, kind: type[Any]) -> Any:
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
