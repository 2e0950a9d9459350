"""Writes one rank's part of a checkpoint: its chunks, into a pack."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import msgspec

from ..._background import Ahead, Hold
from ...errors import StorageError
from ...storage.backend import StorageBackend, StreamWriter
from ...telemetry import EventLog, tracing
from ..file_format.chunks import LONGEST_CHAIN, ChunkIndex, Compressor, StoredChunk, difference
from ..file_format.manifest import PACKS, Chunk, Pack, Part, digest_of
from .staging import Content, Group, LentGroups

log = EventLog("checkpoint")

HEADER = 4096
MAGIC = b"strata-pack 1\n"


@dataclass(slots=True)
class Encoded:
    """A chunk that is encoded, or stored already."""

    offset: int
    length: int
    digest: str
    codec: str = ""
    data: Any = None
    """``None``: it is stored already."""
    stored: list[StoredChunk] = field(default_factory=list)
    """Of a stored chunk: it and its bases. Of a difference: the bases."""


@dataclass(frozen=True, slots=True)
class Previous:
    """A chunk of the previous save, to compute differences from."""

    digest: str
    data: bytes


class DeltaEncoder:
    """Computes differences from the previous save, whose bytes it keeps in memory."""

    def __init__(self) -> None:
        self._previous: dict[tuple[int, int], Previous] = {}
        self._next: dict[tuple[int, int], Previous] = {}

    def begin(self) -> None:
        """Begin a save."""
        self._next = {}

    def end(self) -> None:
        """End a save; the next one is compared with it."""
        self._previous, self._next = self._next, {}

    def forget(self) -> None:
        """Forget a save that failed; the next one is stored in full."""
        self._previous, self._next = {}, {}

    def encode(
        self, chunk: Encoded, view: memoryview, width: int, known: ChunkIndex
    ) -> Encoded | None:
        """The chunk as a difference; None without a base, or if it does not pay."""
        place = chunk.offset, chunk.length
        self._next[place] = Previous(chunk.digest, bytes(view))
        before = self._previous.get(place)
        stored = known.find(before.digest, chunk.length) if before is not None else None
        if before is None or stored is None or stored.depth >= LONGEST_CHAIN:
            return None
        bases = known.with_bases(stored)
        encoded = difference(view, before.data, width) if bases else None
        if encoded is None or bases is None:
            return None
        return Encoded(
            chunk.offset, chunk.length, chunk.digest, f"delta{width}", encoded, stored=bases
        )


class PartWriter:
    """Writes the chunks of one part."""

    def __init__(
        self,
        backend: StorageBackend,
        pack_name: str,
        content: Content,
        *,
        compressor: Compressor,
        known: ChunkIndex,
        differ: DeltaEncoder | None = None,
    ) -> None:
        """``known`` chunks are not stored again."""
        self._backend = backend
        self._content = content
        self._lent = LentGroups()
        self.file = f"{PACKS}/{pack_name}"
        self._compressor = compressor
        self._known = known
        self._differ = differ
        self._own: dict[str, Chunk] = {}
        self._chunks: list[Chunk] = []
        self._bases: dict[str, Chunk] = {}
        self._packs: dict[str, int] = {self.file: 0}
        self._sizes: dict[str, int] = {}
        self._writer: StreamWriter | None = None
        self.written = 0

    def write(self) -> None:
        """Store all chunks and return their memory; nothing is left behind when it raises."""
        lent = self._lent
        groups = lent.track(self._content.groups)
        ahead = Ahead(self._encoded(groups, tracing.span("save.encode")), 2, "strata-encode")
        try:
            for group, chunks in ahead:
                hold = Hold(partial(lent.done, group))
                self._store(group, chunks, hold)
                hold.drop()
            if self._writer is not None:
                self._writer.finish()
        except BaseException:
            self.abort()
            # The next group may wait for the memory of those that were not written.
            ahead.close(lent.done_with_all)
            lent.done_with_all()
            raise
        ahead.close()

    def abort(self) -> None:
        """Delete the pack; if that fails, a sweep does so later."""
        if self._writer is None:
            return
        self._writer.abort()
        try:
            self._backend.delete(self.file)
        except StorageError as exc:
            log.warning("checkpoint.not_deleted", file=self._writer.location, reason=str(exc))

    def part(self, rank: int) -> Part:
        """Describe what was written."""
        self._sizes[self.file] = self._writer.written if self._writer is not None else 0
        packs = [Pack(file, self._sizes[file]) for file in self._packs]
        if self._writer is None:
            packs = packs[1:]
            self._chunks = [_moved(chunk) for chunk in self._chunks]
            self._bases = {digest: _moved(chunk) for digest, chunk in self._bases.items()}
        length = self._chunks[-1].offset + self._chunks[-1].length if self._chunks else 0
        return Part(
            rank=rank,
            kind=self._content.kind,
            length=length,
            chunks=tuple(self._chunks),
            packs=tuple(packs),
            extents=self._content.extents,
            skeleton=self._content.skeleton,
            bases=tuple(self._bases.values()),
        )

    def _encoded(
        self, groups: Iterator[Group], span: tracing.Span
    ) -> Iterator[tuple[Group, list[Encoded]]]:
        try:
            for group in groups:
                chunks = []
                for start, stop in pairwise(group.bounds):
                    view = group.view[start - group.start : stop - group.start]
                    chunks.append(self._encode(start, view))
                yield group, chunks
        finally:
            span.end()

    def _encode(self, offset: int, view: memoryview) -> Encoded:
        chunk = Encoded(offset, view.nbytes, digest_of(view))
        stored = self._known.find(chunk.digest, chunk.length)
        bases = self._known.with_bases(stored) if stored is not None else None
        if self._differ is not None:
            width = self._content.width_at(offset)
            different = self._differ.encode(chunk, view, width, self._known)
            if bases is None and different is not None:
                return different
        if bases is not None:
            chunk.stored = bases
            return chunk
        chunk.codec, chunk.data = self._compressor.encode(view)
        return chunk

    def _store(self, group: Group, chunks: list[Encoded], hold: Hold) -> None:
        """Append new chunks; those that are adjacent in memory are written together."""
        run: memoryview | None = None
        run_start = run_stop = 0
        for chunk in chunks:
            if chunk.data is None:
                self._refer(chunk)
                continue
            if chunk.digest in self._own and not chunk.codec.startswith("delta"):
                self._repeat(chunk)
                continue
            start = chunk.offset - group.start
            plain = not chunk.codec
            if run is not None and not (plain and start == run_stop):
                self._append_run(run, group, hold)
                run = None
            self._place(chunk, pending=run_stop - run_start if run is not None else 0)
            if plain:
                run_start = start if run is None else run_start
                run_stop = start + chunk.length
                run = group.view[run_start:run_stop]
            else:
                self._append(chunk.data)
        if run is not None:
            self._append_run(run, group, hold)

    def _place(self, chunk: Encoded, pending: int) -> None:
        stored = len(chunk.data)
        position = self._position() + pending
        bases = [self._adopt(base) for base in chunk.stored]
        placed = Chunk(
            chunk.offset,
            chunk.length,
            chunk.digest,
            0,
            position,
            stored,
            chunk.codec,
            bases[0].digest if bases else "",
        )
        self._own[chunk.digest] = placed
        self._chunks.append(placed)

    def _repeat(self, chunk: Encoded) -> None:
        """Refer to the same bytes elsewhere in this part."""
        same = self._own[chunk.digest]
        self._chunks.append(_at(same, chunk.offset, same.pack))

    def _refer(self, chunk: Encoded) -> None:
        known, *bases = chunk.stored
        for base in bases:
            self._adopt(base)
        self._chunks.append(_at(known.chunk, chunk.offset, self._pack_number(known.pack)))

    def _adopt(self, stored: StoredChunk) -> Chunk:
        """Refer to a chunk of an earlier checkpoint that a difference needs."""
        number = self._pack_number(stored.pack)
        chunk = _at(stored.chunk, stored.chunk.offset, number)
        self._bases[chunk.digest] = chunk
        return chunk

    def _pack_number(self, pack: Pack) -> int:
        self._sizes[pack.file] = pack.size
        return self._packs.setdefault(pack.file, len(self._packs))

    def _position(self) -> int:
        if self._writer is None:
            self._writer = self._backend.writer(self.file)
            self._writer.write(MAGIC.ljust(HEADER, b"\0"))
        return self._writer.written

    def _append_run(self, run: memoryview, group: Group, hold: Hold) -> None:
        if not group.steady:
            self._append(run)
            return
        assert self._writer is not None
        hold.take()
        self._writer.lend(run, hold.drop)
        self.written += run.nbytes

    def _append(self, data: Any) -> None:
        assert self._writer is not None
        self._writer.write(data)
        self.written += len(data)


def _at(chunk: Chunk, offset: int, pack: int) -> Chunk:
    return msgspec.structs.replace(chunk, offset=offset, pack=pack)


def _moved(chunk: Chunk) -> Chunk:
    """The same chunk in a part without a pack of its own."""
    return _at(chunk, chunk.offset, chunk.pack - 1)
