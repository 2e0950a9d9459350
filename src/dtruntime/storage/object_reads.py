"""Reading an object in several requests that must all see the same version of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import count
from typing import TYPE_CHECKING, TypeAlias

from .buffers import Views, blocks_of, copy, size_of
from .lanes import side_by_side

if TYPE_CHECKING:
    from obstore import GetResult
    from obstore.store import ObjectStore

NEAR_BYTES = 256 * 2**10
"""Ranges with gaps up to this size are fetched together."""
_VERSION_ATTEMPTS = 5
_CHUNK = 256 * 2**10

_Target: TypeAlias = tuple[int, Views]
"""An offset, and the memory for the bytes from there on."""


class Fetcher:
    """Fetches ranges of one object side by side. Methods raise obstore's errors."""

    def __init__(self, store: ObjectStore, key: str, part_bytes: int, lanes: int) -> None:
        self._store = store
        self._key = key
        self._part_bytes = part_bytes
        self._lanes = lanes

    def ranges(self, spans: Sequence[tuple[int, int]]) -> list[bytes] | None:
        """Return the bytes of each offset and length; None as in :meth:`fill`."""
        wanted = merged((offset, offset + length) for offset, length in spans if length)
        memory = {start: memoryview(bytearray(end - start)) for start, end in wanted}
        if not self._fill_all((start, [view]) for start, view in memory.items()):
            return None
        starts = sorted(memory)
        found = []
        for offset, length in spans:
            start = max((s for s in starts if s <= offset), default=0) if length else 0
            at = offset - start
            found.append(bytes(memory[start][at : at + length]) if length else b"")
        return found

    def fill(self, offset: int, views: Views) -> bool:
        """Fetch bytes into memory; False when the object is too short, or changes all the time."""
        return self._fill_all([(offset, views)])

    def _fill_all(self, targets: Iterable[_Target]) -> bool:
        parts = [part for target in targets for part in self._parts(target)]
        for _ in range(_VERSION_ATTEMPTS):
            versions: set[object] = set()
            short: list[int] = []

            def fetch(part: _Target) -> None:
                result = self._get(part)
                if result is None or not _copy(result, part):
                    short.append(part[0])  # noqa: B023
                else:
                    versions.add((result.meta["e_tag"], result.meta["last_modified"]))  # noqa: B023

            side_by_side(parts, fetch, max(1, min(self._lanes, len(parts))))
            if len(versions) < 2:
                return not short
        return False

    def _parts(self, target: _Target) -> Iterable[_Target]:
        offset, views = target
        blocks = blocks_of(views, self._part_bytes)
        return zip(count(offset, self._part_bytes), blocks, strict=False)

    def _get(self, part: _Target) -> GetResult | None:
        import obstore

        offset, views = part
        try:
            return obstore.get(
                self._store, self._key, options={"range": (offset, offset + size_of(views))}
            )
        except obstore.exceptions.BaseError as exc:
            if "status code: 416" in str(exc):  # the range begins where the object has ended
                return None
            raise


def merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join stretches, given by start and end, that overlap or lie near each other."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if found and start - found[-1][1] <= NEAR_BYTES:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def _copy(result: GetResult, part: _Target) -> bool:
    """Copy what arrives; False when it is less than was asked for."""
    views = part[1]
    if result.range[1] - result.range[0] != size_of(views):
        return False
    left = deque(views)
    for chunk in result.stream(min_chunk_size=_CHUNK):
        data = memoryview(chunk)
        while left and data.nbytes:
            target = left.popleft()
            size = min(target.nbytes, data.nbytes)
            copy(data[:size], target[:size])
            data = data[size:]
            if size < target.nbytes:
                left.appendleft(target[size:])
    return not left
