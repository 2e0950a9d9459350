"""Chunks on their way from packs into memory, and the requests that bring them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from .file_format.manifest import Chunk

TOGETHER = 16 * 2**20
"""So much is asked for at a time, up to a multiple of this: parts of an upload are as large, and a
store is fastest when it need not put parts together."""


class Arrival:
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
class Request:
    """Bytes of a pack that are asked for together."""

    pack: int
    start: int
    stop: int
    pieces: list[tuple[Arrival, int, int]] = field(default_factory=list)
    """The chunks that they belong to, and from where to where in what is stored of each."""

    def memory(self) -> list[memoryview]:
        """Where they go."""
        return [arrival.stored()[first:last] for arrival, first, last in self.pieces]

    def complete(self) -> Iterator[Arrival]:
        """Count the bytes as arrived; the chunks that are complete now."""
        for arrival, first, last in self.pieces:
            if arrival.has_arrived(last - first):
                yield arrival


def requests_for(arrivals: Iterable[Arrival]) -> Iterator[Request]:
    """What to ask for, in the order in which it lies in the packs."""
    request: Request | None = None
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
                request = Request(pack, at, at)
            request.pieces.append((arrival, first, last))
            request.stop += last - first
            first = last
    if request is not None:
        yield request


def _place(arrival: Arrival) -> tuple[int, int]:
    return arrival.chunk.pack, arrival.chunk.position
