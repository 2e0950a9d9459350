"""Verification of committed checkpoints: every chunk is read once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ...errors import CheckpointDamagedError
from ..file_format.manifest import Chunk, Manifest, Part
from ..load.checkpoint_loader import title
from ..store.catalog import Catalog, CatalogEntry
from .pack_reader import PartReader

_Place = tuple[str, int, str]
"""Where a chunk is stored, and its digest."""


@dataclass(frozen=True, slots=True)
class Damage:
    """A file, or a chunk in it, that is not what was committed."""

    file: str
    detail: str
    chunk: str = ""
    """Its digest; empty for the whole file."""
    position: int = 0
    length: int = 0


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """The result for one checkpoint."""

    entry: CatalogEntry
    manifest: Manifest | None
    """None when it cannot be read."""
    chunks: int
    damages: tuple[Damage, ...]

    @property
    def good(self) -> bool:
        """Whether everything is as it was committed."""
        return not self.damages


class Verifier:
    """Reads the checkpoints of a store; chunks that several of them share are read once."""

    def __init__(self, catalog: Catalog, entries: Iterable[CatalogEntry]) -> None:
        """Read manifests and parts, but no chunks."""
        self._catalog = catalog
        self._opened = [self._open(entry) for entry in entries]
        self._looked_at: dict[_Place, Damage | None] = {}

    @property
    def stored_bytes(self) -> int:
        """How much there is to read."""
        places = {
            _place(part, chunk): chunk.stored
            for opened in self._opened
            for part in opened.parts
            for chunk in part.chunks
        }
        return sum(places.values())

    def run(self, advance: Callable[[int], None] = lambda size: None) -> Iterator[VerifyResult]:
        """Read everything; ``advance`` is called with the number of bytes read."""
        for opened in self._opened:
            damages = list(opened.damages)
            for part in opened.parts:
                damages += self._verify(opened, part, advance)
            chunks = sum(len(part.chunks) for part in opened.parts)
            yield VerifyResult(opened.entry, opened.manifest, chunks, tuple(damages))

    def _open(self, entry: CatalogEntry) -> _Opened:
        try:
            manifest = self._catalog.manifest(entry)
        except CheckpointDamagedError as exc:
            return _Opened(entry, None, (), (Damage(exc.file, exc.detail),))
        parts, damages = [], []
        for part in manifest.parts:
            try:
                parts.append(self._catalog.part(part))
            except CheckpointDamagedError as exc:
                damages.append(Damage(exc.file, exc.detail))
        return _Opened(entry, manifest, tuple(parts), tuple(damages))

    def _verify(
        self, opened: _Opened, part: Part, advance: Callable[[int], None]
    ) -> Iterator[Damage]:
        assert opened.manifest is not None
        reader = PartReader(self._catalog.backend, part, title(opened.manifest))
        places = {_place(part, chunk): chunk for chunk in part.chunks}
        unread = [place for place in places if place not in self._looked_at]
        errors = reader.check([places[place] for place in unread], advance)
        for place, error in zip(unread, errors, strict=True):
            self._looked_at[place] = None if error is None else _damage(error, places[place])
        for place in places:
            if damage := self._looked_at[place]:
                yield damage


@dataclass(frozen=True, slots=True)
class _Opened:
    """A checkpoint whose manifest and parts were read, as far as possible."""

    entry: CatalogEntry
    manifest: Manifest | None
    parts: tuple[Part, ...]
    damages: tuple[Damage, ...]


def looks_whole(catalog: Catalog, entry: CatalogEntry) -> bool:
    """Whether a checkpoint's files are there and as long as they should be; no chunk is read."""
    sizes = {file.name: file.size for file in catalog.backend.list()}
    try:
        parts = catalog.parts(catalog.manifest(entry))
    except CheckpointDamagedError:
        return False
    return all(sizes.get(pack.file) == pack.size for part in parts for pack in part.packs)


def _place(part: Part, chunk: Chunk) -> _Place:
    return part.packs[chunk.pack].file, chunk.position, chunk.digest


def _damage(error: CheckpointDamagedError, chunk: Chunk) -> Damage:
    return Damage(error.file, error.detail, chunk.digest, chunk.position, chunk.length)
