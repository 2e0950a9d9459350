"""Where the shards of an indexed dataset lie in its files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

_WIDTHS = (1, 2, 4, 8)


class LayoutRecord(msgspec.Struct, frozen=True):
    """What a client found out about the files of a dataset; the long lists are packed."""

    fingerprint: str
    """Identifies the files and their content."""
    shard_count: int
    shard_samples: bytes
    shard_bytes: bytes
    root: str
    """What all files' names begin with."""
    files: tuple[str, ...]
    file_samples: bytes
    total_bytes: int
    columns: tuple[str, ...] = ()
    options: str = ""

    def __post_init__(self) -> None:
        for name, count in (
            ("shard_samples", self.shard_count),
            ("shard_bytes", self.shard_count),
            ("file_samples", len(self.files)),
        ):
            size = len(getattr(self, name))
            if not count or size not in [count * width for width in _WIDTHS]:
                raise ValueError(f"{name} has {size} bytes for {count} numbers")


class DatasetShard(NamedTuple):
    """A range of samples and the files that hold it."""

    shard_id: int
    start: int
    end: int
    file_paths: tuple[str, ...]
    row_starts: tuple[int, ...] = ()
    """The first row in each file; empty when it is not known."""
    row_counts: tuple[int, ...] = ()


class File(NamedTuple):
    """A whole file."""

    path: str
    rows: int | None
    """None when it is not known."""


class ShardLocator:
    """Finds shards in files."""

    def __init__(self, record: LayoutRecord) -> None:
        self._record = record
        self._shards = _bounds(unpack(record.shard_samples, record.shard_count))
        self._files = _bounds(unpack(record.file_samples, len(record.files)))

    def shards(self, shard_ids: ArrayLike) -> Iterator[DatasetShard]:
        """Where each of some shards lies."""
        ids = np.asarray(shard_ids, dtype=np.int64)
        starts, ends = self._shards[ids], self._shards[ids + 1]
        first = np.searchsorted(self._files, starts, side="right") - 1
        last = np.searchsorted(self._files, ends, side="left")
        rows = (starts - self._files[first]).tolist()
        root, files = self._record.root, self._record.files
        columns = (column.tolist() for column in (ids, starts, ends, first, last))
        for row, shard in zip(rows, zip(*columns, strict=True), strict=True):
            shard_id, start, end, number, behind = shard
            if behind - number == 1:
                yield DatasetShard(
                    shard_id, start, end, (root + files[number],), (row,), (end - start,)
                )
            else:
                yield self._spanning(*shard)

    def files(self, numbers: ArrayLike) -> list[File]:
        """Some files, by their numbers."""
        root, files = self._record.root, self._record.files
        chosen = np.asarray(numbers, dtype=np.int64)
        rows = self._files[chosen + 1] - self._files[chosen]
        pairs = zip(chosen.tolist(), rows.tolist(), strict=True)
        return [File(root + files[number], count) for number, count in pairs]

    def _spanning(self, shard_id: int, start: int, end: int, first: int, last: int) -> DatasetShard:
        """A shard that reaches over several files, some of which may be empty."""
        paths, rows, counts = [], [], []
        bounds = self._files[first : last + 1].tolist()
        for number in range(first, last):
            begin, stop = bounds[number - first], bounds[number - first + 1]
            low, high = max(start, begin), min(end, stop)
            if low < high:
                paths.append(self._record.root + self._record.files[number])
                rows.append(low - begin)
                counts.append(high - low)
        return DatasetShard(shard_id, start, end, tuple(paths), tuple(rows), tuple(counts))


def differences(known: LayoutRecord | None, given: LayoutRecord | None) -> Iterable[str]:
    """How the files that are given differ from those that are registered, for people.

    Who gives none has not seen the files, and contradicts nothing.
    """
    if given is None or known == given:
        return
    if known is None:
        yield (
            f"files: registered without any having been seen, given {_files(given)}, which are "
            "cut into shards differently"
        )
        return
    if known.options != given.options:
        yield f"options: registered {known.options}, given {given.options}"
    if known.fingerprint != given.fingerprint:
        yield (
            f"the files differ: registered {_files(known)} (fingerprint {known.fingerprint}), "
            f"given {_files(given)} (fingerprint {given.fingerprint})"
        )
    elif known.root != given.root:
        yield f"folder of the files: registered {known.root!r}, given {given.root!r}"
    elif known.shard_samples != given.shard_samples:
        yield (
            f"shards: registered {known.shard_count}, given {given.shard_count} that are cut "
            "differently (another version of Strata?)"
        )


def pack(numbers: NDArray[np.uint64]) -> bytes:
    """Whole numbers, each in as few bytes as the largest of them needs."""
    most = int(numbers.max(initial=0))
    width = next(width for width in _WIDTHS if most < 1 << 8 * width)
    return numbers.astype(f"<u{width}").tobytes()


def unpack(data: bytes, count: int) -> NDArray[np.int64]:
    """The ``count`` numbers that :func:`pack` took."""
    return np.frombuffer(data, f"<u{len(data) // count}").astype(np.int64)


def _bounds(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate(([0], np.cumsum(counts)))


def _files(layout: LayoutRecord) -> str:
    return f"{len(layout.files)} files of {layout.total_bytes} bytes"
