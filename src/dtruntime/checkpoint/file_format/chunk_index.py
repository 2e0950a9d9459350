"""Chunks that are stored already, so that they need not be stored again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from .manifest import Chunk, Pack, Part

LIVE_SHARE = 0.5
"""A pack of which less than this is still used is not referred to any more, so that it can go."""
LONGEST_CHAIN = 8
"""So many differences may have to be applied to make a chunk."""


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A chunk and the pack that has it."""

    chunk: Chunk
    pack: Pack
    depth: int = 0
    """How many differences make it."""


class ChunkIndex:
    """The chunks of a committed checkpoint, by digest."""

    def __init__(self, parts: Iterable[Part] = ()) -> None:
        self._by_digest: dict[str, StoredChunk] = {}
        parts = list(parts)
        worn = _worn_packs(parts)
        for part in parts:
            bases = {chunk.digest: chunk for chunk in part.bases}
            for chunk in (*part.chunks, *part.bases):
                pack = part.packs[chunk.pack]
                depth = _depth(chunk, bases)
                if pack.file not in worn:
                    self._by_digest.setdefault(chunk.digest, StoredChunk(chunk, pack, depth))

    def __len__(self) -> int:
        return len(self._by_digest)

    def forget_missing(self, there: Mapping[str, int]) -> None:
        """Forget chunks whose pack is not there any more, or not as long as it was."""
        self._by_digest = {
            digest: stored
            for digest, stored in self._by_digest.items()
            if there.get(stored.pack.file) == stored.pack.size
        }

    def forget(self, is_damaged: Callable[[str], bool]) -> None:
        """Forget chunks whose pack was found to be damaged."""
        packs = {stored.pack.file for stored in self._by_digest.values()}
        damaged = {file for file in packs if is_damaged(file)}
        self._by_digest = {
            digest: stored
            for digest, stored in self._by_digest.items()
            if stored.pack.file not in damaged
        }

    def find(self, digest: str, length: int) -> StoredChunk | None:
        """Where a chunk is stored."""
        stored = self._by_digest.get(digest)
        return stored if stored is not None and stored.chunk.length == length else None

    def with_bases(self, stored: StoredChunk) -> list[StoredChunk] | None:
        """A chunk and everything it is a difference from; none when something is missing."""
        found = [stored]
        while found[-1].chunk.base:
            base = self._by_digest.get(found[-1].chunk.base)
            if base is None or len(found) > LONGEST_CHAIN:
                return None
            found.append(base)
        return found


def _depth(chunk: Chunk, bases: Mapping[str, Chunk]) -> int:
    depth = 0
    while chunk.base and chunk.base in bases:
        chunk, depth = bases[chunk.base], depth + 1
    return depth


def _worn_packs(parts: Iterable[Part]) -> set[str]:
    """Packs of which little is used."""
    used: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for part in parts:
        for pack in part.packs:
            sizes[pack.file] = pack.size
        places = {(c.pack, c.position, c.stored) for c in (*part.chunks, *part.bases)}
        for number, _, stored in places:
            file = part.packs[number].file
            used[file] = used.get(file, 0) + stored
    return {file for file, size in sizes.items() if used.get(file, 0) < LIVE_SHARE * size}
