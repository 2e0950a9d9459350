"""Copies a committed checkpoint to another store, and commits it there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import groupby

import msgspec

from ..._background import Ahead
from ..._shutdown import shutdown
from ...errors import CheckpointDamagedError, StorageError, StorageNotFoundError
from ..file_format.manifest import PACKS, Chunk, Manifest, Part, PartFile
from ..load.checkpoint_loader import CheckpointCopy
from ..load.pack_reader import PartReader
from ..store.catalog import CatalogEntry, is_damage
from ..store.checkpoint_store import CheckpointStore

BLOCK = 16 * 2**20
"""How many bytes of a pack are read and written at a time."""


@dataclass(slots=True)
class _Pack:
    """A pack to copy, with the chunks in it that the checkpoint needs."""

    file: str
    size: int
    chunks: dict[int, tuple[PartReader, Chunk]] = field(default_factory=dict)
    """By their positions."""


def copy_checkpoint(
    source: CheckpointStore, target: CheckpointStore, entry: CatalogEntry, *, late: bool
) -> Manifest:
    """Copy what the target lacks of a checkpoint, the manifest last, which commits it.

    Chunks are verified on the way. The copy has the same sequence; if the target has one as high,
    the copy gets the next one and is the newest there, unless it comes ``late``, after newer ones.
    ``CheckpointDamagedError`` when the source is damaged; nothing is committed then.
    """
    manifest = source.catalog.manifest(entry)
    same = target.catalog.with_id(manifest.checkpoint_id)
    if same is not None:
        return same
    copy = CheckpointCopy(source, manifest)
    packs = _packs_of(copy)
    there = _sizes(target)
    for pack in packs:
        if there.get(pack.file) != pack.size:
            _copy_pack(source, target, pack)
    for part in manifest.parts:
        if isinstance(part, PartFile):
            target.backend.write(part.file, source.backend.read(part.file))
    _check_there(target, packs)
    if late:
        return target.catalog.insert(manifest)
    return target.catalog.commit(
        lambda sequence: msgspec.structs.replace(
            manifest, sequence=max(sequence, manifest.sequence)
        )
    )


def _sizes(place: CheckpointStore) -> dict[str, int]:
    return {file.name: file.size for file in place.backend.list(PACKS)}


def _check_there(target: CheckpointStore, packs: Iterable[_Pack]) -> None:
    """Make sure that no pack was removed meanwhile."""
    there = _sizes(target)
    for pack in packs:
        if there.get(pack.file) != pack.size:
            raise StorageError(
                f"{target.backend.location(pack.file)} is not there, or not as it was copied: let "
                "one manager at a time save to a place"
            )


def _packs_of(copy: CheckpointCopy) -> list[_Pack]:
    """All packs of a checkpoint; chunks that are differences are verified here."""
    found: dict[str, _Pack] = {}
    for part in copy.parts():
        reader = copy.reader(part)
        packs = [found.setdefault(p.file, _Pack(p.file, p.size)) for p in part.packs]
        for chunk in _chunks_of(part):
            if not chunk.codec.startswith("delta"):
                packs[chunk.pack].chunks[chunk.position] = reader, chunk
        differences = [c for c in _chunks_of(part) if c.codec.startswith("delta")]
        for damage in reader.check(differences) if differences else []:
            if damage is not None:
                raise damage
    return list(found.values())


def _chunks_of(part: Part) -> tuple[Chunk, ...]:
    return (*part.chunks, *part.bases)


def _copy_pack(source: CheckpointStore, target: CheckpointStore, pack: _Pack) -> None:
    ahead = Ahead(_checked_blocks(source, pack), 2, "strata-copy")
    with closing(ahead) as blocks, target.backend.writer(pack.file) as writer:
        for block in blocks:
            writer.write(block)
            shutdown.moved()


def _checked_blocks(source: CheckpointStore, pack: _Pack) -> Iterator[bytes]:
    """The pack's bytes, with every chunk verified."""
    with _reading(source, pack):
        size = source.backend.size(pack.file)
    if size != pack.size:
        raise _damaged(source, pack, "it does not have the length that it had when it was written")
    for start, stop, chunks in blocks_of(pack.size, [chunk for _, chunk in pack.chunks.values()]):
        with _reading(source, pack):
            block = source.backend.read_range(pack.file, start, stop - start)
        for chunk in chunks:
            first = chunk.position - start
            reader = pack.chunks[chunk.position][0]
            reader.check_stored(chunk, memoryview(block)[first : first + chunk.stored])
        yield block


def blocks_of(size: int, chunks: Iterable[Chunk]) -> Iterator[tuple[int, int, list[Chunk]]]:
    """Cut a pack into blocks, none of which ends within a chunk; each with its chunks."""
    start, held, at = 0, list[Chunk](), 0
    for begin, stop, chunk in _segments(size, chunks):
        if at > start and stop - start > BLOCK:
            yield start, begin, held
            start, held = begin, []
        at = stop
        held += [chunk] if chunk is not None else []
    if at > start:
        yield start, at, held


def _segments(size: int, chunks: Iterable[Chunk]) -> Iterator[tuple[int, int, Chunk | None]]:
    """Chunks and the gaps between them, in order; gaps in pieces."""
    at = 0
    for position, same in groupby(sorted(chunks, key=_position), key=_position):
        chunk = next(same)
        if position < at or position + chunk.stored > size:
            raise CheckpointDamagedError(f"chunk {chunk.digest} does not lie where it can be")
        yield from _gap(at, position)
        at = position + chunk.stored
        yield position, at, chunk
    yield from _gap(at, size)


def _position(chunk: Chunk) -> int:
    return chunk.position


def _gap(start: int, stop: int) -> Iterator[tuple[int, int, None]]:
    for at in range(start, stop, BLOCK):
        yield at, min(at + BLOCK, stop), None


@contextmanager
def _reading(source: CheckpointStore, pack: _Pack) -> Iterator[None]:
    try:
        yield
    except StorageError as exc:
        if not is_damage(exc):
            raise
        is_gone = isinstance(exc, StorageNotFoundError)
        raise _damaged(source, pack, "it is gone" if is_gone else str(exc)) from exc


def _damaged(source: CheckpointStore, pack: _Pack, why: str) -> CheckpointDamagedError:
    where = source.backend.location(pack.file)
    return CheckpointDamagedError(f"{where} is damaged: {why}", file=where, detail=why)
