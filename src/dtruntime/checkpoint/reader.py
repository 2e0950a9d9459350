"""Reads parts of a checkpoint straight into the memory where they are wanted, and checks them."""

from __future__ import annotations

import errno
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from .._memory import new_bytes
from ..errors import CheckpointDamagedError, StorageError, StorageNotFoundError
from ..storage.backend import StorageBackend
from .codecs import apply_difference, decode
from .format import Chunk, Part, digest_of
from .known import LONGEST_CHAIN

THREADS = 8
TOGETHER = 16 * 2**20
"""Chunks that lie one after the other are read together up to this size."""
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
        data, view = new_bytes(self._part.length)
        with view:
            self.read_into([(0, view)])
        return data

    def read_into(self, wanted: Iterable[tuple[int, memoryview]]) -> None:
        """Fill each memory with the bytes of the stream from its offset on."""
        whole, shared = self._split(wanted)
        with ThreadPoolExecutor(THREADS, thread_name_prefix="strata-load") as threads:
            jobs: list[Future[None]] = [
                threads.submit(self._fill, chunks, target) for chunks, target in whole
            ]
            for number, targets in shared.items():
                jobs.append(threads.submit(self._share, number, targets))
            _results(threads, jobs)

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

        with ThreadPoolExecutor(THREADS, thread_name_prefix="strata-verify") as threads:
            return _results(threads, [threads.submit(look, chunk) for chunk in chunks])

    def check_stored(self, chunk: Chunk, stored: bytes | memoryview) -> None:
        """Check a chunk, other than a difference, by the bytes that its pack has of it."""
        try:
            self._check(chunk, memoryview(decode(chunk.codec, stored, chunk.length)))
        except CheckpointDamagedError:
            raise
        except StorageError as exc:
            raise self._lost(chunk, str(exc)) from exc

    def _split(
        self, wanted: Iterable[tuple[int, memoryview]]
    ) -> tuple[list[tuple[list[Chunk], memoryview]], dict[int, list[tuple[int, memoryview]]]]:
        """Chunks that fill memory by themselves, and those of which pieces are wanted.

        Neighbours in memory that are also neighbours in a pack are read together.
        """
        whole: list[tuple[list[Chunk], memoryview]] = []
        shared: dict[int, list[tuple[int, memoryview]]] = {}
        for offset, target in wanted:
            at, stop = offset, offset + target.nbytes
            run: list[Chunk] = []
            run_at = at
            number = bisect_right(self._starts, at) - 1
            while at < stop:
                if not 0 <= number < len(self._starts):
                    raise CheckpointDamagedError(f"{self._checkpoint} has no bytes {at} to {stop}")
                chunk = self._part.chunks[number]
                inside = at - chunk.offset
                count = min(chunk.length - inside, stop - at)
                if count <= 0:
                    raise CheckpointDamagedError(f"{self._checkpoint} has no bytes {at} to {stop}")
                if count < chunk.length:
                    piece = target[at - offset : at - offset + count]
                    shared.setdefault(number, []).append((inside, piece))
                if count < chunk.length or not _follows(run, chunk):
                    if run:
                        whole.append((run, target[run_at - offset : at - offset]))
                    run, run_at = [], at
                if count == chunk.length:
                    run.append(chunk)
                at += count
                number += 1
            if run:
                whole.append((run, target[run_at - offset :]))
        return whole, shared

    def _fill(self, chunks: list[Chunk], target: memoryview) -> None:
        """Fill memory with chunks that lie one after the other."""
        first = chunks[0]
        if first.codec:
            target[:] = self._load(first)
            return
        try:
            with self._reading(first):
                self._backend.read_into(self._file(first), first.position, target)
        except StorageError:
            if len(chunks) == 1:
                raise
            # Which of them is it?
            for chunk, piece in _pieces(chunks, target):
                self._fill([chunk], piece)
            return
        for chunk, piece in _pieces(chunks, target):
            self._check(chunk, piece)

    def _share(self, number: int, targets: list[tuple[int, memoryview]]) -> None:
        data = self._load(self._part.chunks[number])
        for inside, target in targets:
            target[:] = data[inside : inside + target.nbytes]

    def _load(self, chunk: Chunk, depth: int = 0) -> memoryview:
        """A chunk's bytes, checked."""
        with self._reading(chunk):
            stored = self._backend.read_range(self._file(chunk), chunk.position, chunk.stored)
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
        view = memoryview(whole)
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
        """Tell a file that is gone, cut off or unreadable from a store that does not answer."""
        try:
            yield
        except StorageError as exc:
            gone = isinstance(exc, StorageNotFoundError) or exc.errno == errno.EIO
            if gone or self._is_cut_off(chunk):
                raise self._lost(chunk, str(exc)) from exc
            raise

    def _is_cut_off(self, chunk: Chunk) -> bool:
        try:
            return self._backend.size(self._file(chunk)) < chunk.position + chunk.stored
        except StorageError:
            return False

    def _file(self, chunk: Chunk) -> str:
        if not 0 <= chunk.pack < len(self._part.packs):
            raise CheckpointDamagedError(
                f"{self._checkpoint} is damaged: it names a pack {chunk.pack} that it does not have"
            )
        return self._part.packs[chunk.pack].file

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


def _follows(run: list[Chunk], chunk: Chunk) -> bool:
    """Whether a chunk can be read together with those before it."""
    if not run or run[-1].codec or chunk.codec:
        return False
    last = run[-1]
    adjacent = last.pack == chunk.pack and last.position + last.stored == chunk.position
    return adjacent and chunk.position + chunk.stored - run[0].position <= TOGETHER


def _pieces(chunks: list[Chunk], target: memoryview) -> Iterator[tuple[Chunk, memoryview]]:
    at = 0
    for chunk in chunks:
        yield chunk, target[at : at + chunk.length]
        at += chunk.length


def _results(threads: ThreadPoolExecutor, jobs: list[Future[R]]) -> list[R]:
    """What jobs return; when one raises, those that have not begun are not."""
    try:
        return [job.result() for job in jobs]
    except BaseException:
        threads.shutdown(wait=True, cancel_futures=True)
        raise
