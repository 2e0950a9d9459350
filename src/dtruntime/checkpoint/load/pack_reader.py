"""Reads and verifies the chunks of a part, straight into the memory of their destinations."""

from __future__ import annotations

import re
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import msgspec

from ..._background import side_by_side, usable_cores
from ..._buffers import collector_paused, new_bytes
from ...errors import CheckpointDamagedError, StorageError
from ...storage.backend import StorageBackend
from ..file_format.chunks import LONGEST_CHAIN, MOST_BYTES, apply_difference, decode
from ..file_format.manifest import Chunk, Pack, Part, digest_of
from ..store.catalog import is_damage

_DELTA = re.compile(r"delta(\d+)")

R = TypeVar("R")


class PartReader:
    """Reads one part.

    Every chunk is verified by its digest. ``CheckpointDamagedError`` names the checkpoint, the
    chunk and the file when one is damaged or missing; a store that fails raises what it raises.
    """

    def __init__(self, backend: StorageBackend, part: Part, checkpoint: str) -> None:
        self._backend = backend
        self._part = part
        self._checkpoint = checkpoint
        self._starts = [chunk.offset for chunk in part.chunks]
        self._bases = {chunk.digest: chunk for chunk in part.bases}

    def read(self) -> bytes:
        """The whole stream."""
        for chunk in self._part.chunks:
            self._check_place(chunk)
        if self._part.length != sum(chunk.length for chunk in self._part.chunks):
            raise CheckpointDamagedError(f"{self._checkpoint} does not have all of its bytes")
        data, view = new_bytes(self._part.length)
        with view:
            self.read_into([(0, view)])
        return data

    def read_into(self, targets: Iterable[tuple[int, memoryview]]) -> None:
        """Fill each memory with the bytes of the stream from its offset on."""
        with collector_paused():
            reads = self._chunk_reads(targets)
        differences = [one for one in reads if _DELTA.fullmatch(one.chunk.codec)]
        others = [one for one in reads if not _DELTA.fullmatch(one.chunk.codec)]
        jobs = [partial(self._fetch, request) for request in pack_reads(others)]
        jobs += [partial(self._fetch_alone, read) for read in differences]
        again = [read for failed in _results(jobs) for read in failed]
        # No other thread writes into their memory any more.
        for read in dict.fromkeys(again):
            self._fetch_alone(read)

    def verify(self) -> list[CheckpointDamagedError]:
        """Read every chunk; returns what is damaged."""
        chunks = list({chunk.digest: chunk for chunk in self._part.chunks}.values())
        return [damage for damage in self.check(chunks) if damage is not None]

    def check(
        self, chunks: Sequence[Chunk], advance: Callable[[int], None] = lambda size: None
    ) -> list[CheckpointDamagedError | None]:
        """Read chunks; returns the damage of each, or None. ``advance`` gets the bytes read."""

        def look(chunk: Chunk) -> CheckpointDamagedError | None:
            try:
                self._load(chunk)
            except CheckpointDamagedError as exc:
                return exc
            finally:
                advance(chunk.stored)
            return None

        return _results([partial(look, chunk) for chunk in chunks])

    def check_stored(self, chunk: Chunk, stored: bytes | memoryview) -> None:
        """Verify a chunk, other than a difference, by its stored bytes."""
        try:
            self._check(chunk, memoryview(decode(chunk.codec, stored, chunk.length)))
        except CheckpointDamagedError:
            raise
        except StorageError as exc:
            raise self._lost(chunk, str(exc)) from exc

    def _chunk_reads(self, targets: Iterable[tuple[int, memoryview]]) -> list[ChunkRead]:
        """The chunks that are needed, each once, with all memory that gets bytes of it."""
        reads: dict[Chunk, ChunkRead] = {}
        numbered: dict[int, ChunkRead] = {}
        """By the chunk's number: a chunk may have thousands of small buffers."""
        for offset, target in targets:
            at, stop = offset, offset + target.nbytes
            number = bisect_right(self._starts, at) - 1
            while at < stop:
                if not 0 <= number < len(self._starts):
                    raise CheckpointDamagedError(f"{self._checkpoint} has no bytes {at} to {stop}")
                chunk = self._part.chunks[number]
                inside = at - chunk.offset
                count = min(chunk.length - inside, stop - at)
                if count <= 0 or inside < 0:
                    raise CheckpointDamagedError(f"{self._checkpoint} has no bytes {at} to {stop}")
                read = numbered.get(number)
                if read is None:
                    read = numbered[number] = self._chunk_read(chunk, reads)
                whole = count == target.nbytes
                read.add(inside, target if whole else target[at - offset : at - offset + count])
                at += count
                number += 1
        return list(reads.values())

    def _chunk_read(self, chunk: Chunk, reads: dict[Chunk, ChunkRead]) -> ChunkRead:
        """The read of a chunk, shared by all chunks that are stored in the same place."""
        same = msgspec.structs.replace(chunk, offset=0)
        if same not in reads:
            self._check_place(chunk)
            reads[same] = ChunkRead(chunk)
        return reads[same]

    def _check_place(self, chunk: Chunk) -> None:
        """Refuse a chunk that cannot have been written, before memory is allocated for it."""
        size = self._pack(chunk).size
        inside = 0 <= chunk.position <= chunk.position + chunk.stored <= size
        possible = 0 < chunk.stored <= MOST_BYTES and 0 < chunk.length <= MOST_BYTES
        if not inside or not possible or (not chunk.codec and chunk.stored != chunk.length):
            raise self._lost(chunk, f"{chunk.stored} bytes of a pack of {size} cannot be it")

    def _fetch(self, request: PackRead) -> list[ChunkRead]:
        """Read adjacent chunks, and verify those that are complete.

        Returns those that could not be read together with the others, and can be read alone.
        """
        file = self._file(request.pieces[0][0].chunk)
        try:
            self._backend.read_into(file, request.start, request.memory())
        except StorageError as exc:
            if not self._is_damage(exc, file, request.stop):
                raise
            reads = [read for read, _, _ in request.pieces]
            for read in reads:  # which of them is it?
                self._load(read.chunk)
            return reads
        for read in request.complete():
            read.hand_out(self._decoded(read.chunk, read.stored()))
        return []

    def _fetch_alone(self, read: ChunkRead) -> list[ChunkRead]:
        read.hand_out(self._load(read.chunk))
        return []

    def _load(self, chunk: Chunk, depth: int = 0) -> memoryview:
        """Read and verify a single chunk."""
        with self._reading(chunk):
            stored = self._backend.read_range(self._file(chunk), chunk.position, chunk.stored)
        return self._decoded(chunk, stored, depth)

    def _decoded(self, chunk: Chunk, stored: bytes | memoryview, depth: int = 0) -> memoryview:
        """Decode and verify a chunk."""
        difference = _DELTA.fullmatch(chunk.codec)
        base = self._base(chunk, depth) if difference else None
        try:
            whole: bytes | memoryview
            if difference and base is not None:
                whole = apply_difference(stored, base, int(difference[1]), chunk.length)
            else:
                whole = decode(chunk.codec, stored, chunk.length)
        except StorageError as exc:
            raise self._lost(chunk, str(exc)) from exc
        view = whole if isinstance(whole, memoryview) else memoryview(whole)
        self._check(chunk, view)
        return view

    def _base(self, chunk: Chunk, depth: int) -> memoryview:
        base = self._bases.get(chunk.base)
        if base is None:
            raise self._lost(chunk, f"the chunk it differs from ({chunk.base}) is not named")
        if depth > LONGEST_CHAIN:
            raise self._lost(chunk, f"more than {LONGEST_CHAIN} differences lead to it")
        return self._load(base, depth + 1)

    @contextmanager
    def _reading(self, chunk: Chunk) -> Iterator[None]:
        """Distinguish damage from a store that does not answer."""
        try:
            yield
        except StorageError as exc:
            if self._is_damage(exc, self._file(chunk), chunk.position + chunk.stored):
                raise self._lost(chunk, str(exc)) from exc
            raise

    def _is_damage(self, error: StorageError, file: str, stop: int) -> bool:
        """Whether a read failed because a file is gone, unreadable or shorter than it was."""
        if is_damage(error):
            return True
        try:
            return self._backend.size(file) < stop
        except StorageError:
            return False

    def _file(self, chunk: Chunk) -> str:
        return self._pack(chunk).file

    def _pack(self, chunk: Chunk) -> Pack:
        if not 0 <= chunk.pack < len(self._part.packs):
            raise CheckpointDamagedError(
                f"{self._checkpoint} is damaged: it names a pack {chunk.pack} that it does not have"
            )
        return self._part.packs[chunk.pack]

    def _check(self, chunk: Chunk, data: memoryview) -> None:
        if data.nbytes != chunk.length or digest_of(data) != chunk.digest:
            raise self._lost(chunk, "its bytes do not match its digest")

    def _lost(self, chunk: Chunk, why: str) -> CheckpointDamagedError:
        file = self._backend.location(self._file(chunk))
        return CheckpointDamagedError(
            f"{self._checkpoint} is damaged: chunk {chunk.digest} ({chunk.length} bytes at "
            f"{chunk.position} of {file}): {why}",
            file=file,
            detail=why,
        )


def lanes() -> int:
    """How many requests are read or verified at a time; more would only wait."""
    return max(6, min(16, 3 * usable_cores()))


def _results(jobs: Sequence[Callable[[], R]]) -> list[R]:
    """Run jobs in parallel; returns their results. When one raises, no more are begun."""
    results: dict[int, R] = {}

    def run(number: int) -> None:
        results[number] = jobs[number]()

    side_by_side(range(len(jobs)), run, max(1, min(lanes(), len(jobs))))
    return [results[number] for number in range(len(jobs))]


TOGETHER = 16 * 2**20
"""Requests have at most this size and end at a multiple of it: uploads have parts of this size, and
object stores are fastest when a request does not span parts."""


class ChunkRead:
    """A chunk to read, and the destinations of its bytes."""

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk
        self._targets: list[tuple[int, memoryview]] = []
        self._whole: memoryview | None = None
        """A destination of all its bytes, which they are read into directly."""
        self._stored: memoryview | None = None
        self._missing = chunk.stored
        self._lock = threading.Lock()

    def add(self, inside: int, target: memoryview) -> None:
        """Add a destination of the bytes from ``inside`` on."""
        chunk = self.chunk
        if self._whole is None and not chunk.codec and target.nbytes == chunk.length:
            self._whole = target
        else:
            self._targets.append((inside, target))

    def stored(self) -> memoryview:
        """The memory for its stored bytes."""
        with self._lock:
            if self._stored is None:
                whole = self._whole
                self._stored = memoryview(bytearray(self.chunk.stored)) if whole is None else whole
            return self._stored

    def has_arrived(self, size: int) -> bool:
        """Count bytes that were read; whether these were the last."""
        with self._lock:
            self._missing -= size
            return not self._missing

    def hand_out(self, data: memoryview) -> None:
        """Copy the verified bytes to all destinations."""
        if self._whole is not None and self._whole is not data:
            self._whole[:] = data
        for inside, target in self._targets:
            target[:] = data[inside : inside + target.nbytes]
        self._stored = None


@dataclass(slots=True)
class PackRead:
    """Bytes of a pack that are read by one request."""

    pack: int
    start: int
    stop: int
    pieces: list[tuple[ChunkRead, int, int]] = field(default_factory=list)
    """The chunks they belong to, each with the first and last of its stored bytes."""

    def memory(self) -> list[memoryview]:
        """Their destinations."""
        return [read.stored()[first:last] for read, first, last in self.pieces]

    def complete(self) -> Iterator[ChunkRead]:
        """Count the bytes as read; yields the chunks that are complete now."""
        for read, first, last in self.pieces:
            if read.has_arrived(last - first):
                yield read


def pack_reads(reads: Iterable[ChunkRead]) -> Iterator[PackRead]:
    """The requests for chunks, in the order of their positions in the packs."""
    request: PackRead | None = None
    for read in sorted(reads, key=_place):
        pack, position, size = read.chunk.pack, read.chunk.position, read.chunk.stored
        first = 0
        while first < size:
            at = position + first
            last = min(size, first + TOGETHER - at % TOGETHER)
            if request is not None and (
                (request.pack, request.stop) != (pack, at) or not at % TOGETHER
            ):
                yield request
                request = None
            if request is None:
                request = PackRead(pack, at, at)
            request.pieces.append((read, first, last))
            request.stop += last - first
            first = last
    if request is not None:
        yield request


def _place(read: ChunkRead) -> tuple[int, int]:
    return read.chunk.pack, read.chunk.position
