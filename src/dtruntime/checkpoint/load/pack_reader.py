"""Reads parts of a checkpoint straight into the memory where they are wanted, and checks them."""

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

    Every chunk is checked against its digest. ``CheckpointDamagedError`` names the checkpoint, the
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

    def read_into(self, wanted: Iterable[tuple[int, memoryview]]) -> None:
        """Fill each memory with the bytes of the stream from its offset on."""
        with collector_paused():
            arrivals = self._arrivals(wanted)
        differences = [one for one in arrivals if _DELTA.fullmatch(one.chunk.codec)]
        others = [one for one in arrivals if not _DELTA.fullmatch(one.chunk.codec)]
        jobs = [partial(self._fetch, request) for request in pack_reads(others)]
        jobs += [partial(self._fetch_alone, arrival) for arrival in differences]
        again = [arrival for some in _results(jobs) for arrival in some]
        # Nobody else writes into their memory any more.
        for arrival in dict.fromkeys(again):
            self._fetch_alone(arrival)

    def verify(
        self, advance: Callable[[int], None] = lambda size: None
    ) -> list[CheckpointDamagedError]:
        """Read every chunk and return what is wrong; ``advance`` is told how much was read."""
        chunks = list({chunk.digest: chunk for chunk in self._part.chunks}.values())
        return [damage for damage in self.check(chunks, advance) if damage is not None]

    def check(
        self, chunks: Sequence[Chunk], advance: Callable[[int], None] = lambda size: None
    ) -> list[CheckpointDamagedError | None]:
        """Read chunks; what is wrong with each, or None."""

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
        """Check a chunk, other than a difference, by the bytes that its pack has of it."""
        try:
            self._check(chunk, memoryview(decode(chunk.codec, stored, chunk.length)))
        except CheckpointDamagedError:
            raise
        except StorageError as exc:
            raise self._lost(chunk, str(exc)) from exc

    def _arrivals(self, wanted: Iterable[tuple[int, memoryview]]) -> list[ChunkRead]:
        """The chunks that are needed, each once, with all memory that wants bytes of it."""
        found: dict[Chunk, ChunkRead] = {}
        numbered: dict[int, ChunkRead] = {}
        """Small buffers by the thousand lie in one chunk."""
        for offset, target in wanted:
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
                arrival = numbered.get(number)
                if arrival is None:
                    arrival = numbered[number] = self._arrival(chunk, found)
                whole = count == target.nbytes
                arrival.add(inside, target if whole else target[at - offset : at - offset + count])
                at += count
                number += 1
        return list(found.values())

    def _arrival(self, chunk: Chunk, found: dict[Chunk, ChunkRead]) -> ChunkRead:
        """That of a chunk; the same for one that is stored in the same place."""
        same = msgspec.structs.replace(chunk, offset=0)
        if same not in found:
            self._check_place(chunk)
            found[same] = ChunkRead(chunk)
        return found[same]

    def _check_place(self, chunk: Chunk) -> None:
        """Make sure that a chunk can have been written, before memory is made for it."""
        size = self._pack(chunk).size
        inside = 0 <= chunk.position <= chunk.position + chunk.stored <= size
        possible = 0 < chunk.stored <= MOST_BYTES and 0 < chunk.length <= MOST_BYTES
        if not inside or not possible or (not chunk.codec and chunk.stored != chunk.length):
            raise self._lost(chunk, f"{chunk.stored} bytes of a pack of {size} cannot be it")

    def _fetch(self, request: PackRead) -> list[ChunkRead]:
        """Read chunks that lie one after the other, and check those that are complete.

        Returns those that could not be read with the others, and can be read alone.
        """
        file = self._file(request.pieces[0][0].chunk)
        try:
            self._backend.read_into(file, request.start, request.memory())
        except StorageError as exc:
            if not self._is_damage(exc, file, request.stop):
                raise
            arrivals = [arrival for arrival, _, _ in request.pieces]
            for arrival in arrivals:  # which of them is it?
                self._load(arrival.chunk)
            return arrivals
        for arrival in request.complete():
            arrival.hand_out(self._decoded(arrival.chunk, arrival.stored()))
        return []

    def _fetch_alone(self, arrival: ChunkRead) -> list[ChunkRead]:
        arrival.hand_out(self._load(arrival.chunk))
        return []

    def _load(self, chunk: Chunk, depth: int = 0) -> memoryview:
        """Read a chunk by itself, and check it."""
        with self._reading(chunk):
            stored = self._backend.read_range(self._file(chunk), chunk.position, chunk.stored)
        return self._decoded(chunk, stored, depth)

    def _decoded(self, chunk: Chunk, stored: bytes | memoryview, depth: int = 0) -> memoryview:
        """A chunk's bytes, checked, from what is stored of it."""
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
        """Tell damage from a store that does not answer."""
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
    """How many requests are under way at a time, or being checked: more of them only wait."""
    return max(6, min(16, 3 * usable_cores()))


def _results(jobs: Sequence[Callable[[], R]]) -> list[R]:
    """What jobs return, done side by side; when one raises, those that have not begun are not."""
    found: dict[int, R] = {}

    def run(number: int) -> None:
        found[number] = jobs[number]()

    side_by_side(range(len(jobs)), run, max(1, min(lanes(), len(jobs))))
    return [found[number] for number in range(len(jobs))]


TOGETHER = 16 * 2**20
"""So much is asked for at a time, up to a multiple of this: parts of an upload are as large, and a
store is fastest when it need not put parts together."""


class ChunkRead:
    """A chunk that is wanted, and where its bytes go."""

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk
        self._targets: list[tuple[int, memoryview]] = []
        self._whole: memoryview | None = None
        """Of those who want all of it, the one whose memory the bytes arrive in."""
        self._stored: memoryview | None = None
        self._missing = chunk.stored
        self._lock = threading.Lock()

    def add(self, inside: int, target: memoryview) -> None:
        """Let some memory have the chunk's bytes from ``inside`` on."""
        chunk = self.chunk
        if self._whole is None and not chunk.codec and target.nbytes == chunk.length:
            self._whole = target
        else:
            self._targets.append((inside, target))

    def stored(self) -> memoryview:
        """The memory for what the pack has of it."""
        with self._lock:
            if self._stored is None:
                whole = self._whole
                self._stored = memoryview(bytearray(self.chunk.stored)) if whole is None else whole
            return self._stored

    def has_arrived(self, size: int) -> bool:
        """Count bytes that are there; whether these were the last."""
        with self._lock:
            self._missing -= size
            return not self._missing

    def hand_out(self, data: memoryview) -> None:
        """Give the chunk's bytes, which have been checked, to all who want them."""
        if self._whole is not None and self._whole is not data:
            self._whole[:] = data
        for inside, target in self._targets:
            target[:] = data[inside : inside + target.nbytes]
        self._stored = None


@dataclass(slots=True)
class PackRead:
    """Bytes of a pack that are asked for together."""

    pack: int
    start: int
    stop: int
    pieces: list[tuple[ChunkRead, int, int]] = field(default_factory=list)
    """The chunks that they belong to, and from where to where in what is stored of each."""

    def memory(self) -> list[memoryview]:
        """Where they go."""
        return [arrival.stored()[first:last] for arrival, first, last in self.pieces]

    def complete(self) -> Iterator[ChunkRead]:
        """Count the bytes as arrived; the chunks that are complete now."""
        for arrival, first, last in self.pieces:
            if arrival.has_arrived(last - first):
                yield arrival


def pack_reads(arrivals: Iterable[ChunkRead]) -> Iterator[PackRead]:
    """What to ask for, in the order in which it lies in the packs."""
    request: PackRead | None = None
    for arrival in sorted(arrivals, key=_place):
        pack, position, size = arrival.chunk.pack, arrival.chunk.position, arrival.chunk.stored
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
            request.pieces.append((arrival, first, last))
            request.stop += last - first
            first = last
    if request is not None:
        yield request


def _place(arrival: ChunkRead) -> tuple[int, int]:
    return arrival.chunk.pack, arrival.chunk.position
