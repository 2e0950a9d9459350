"""Order-independent digests of sample numbers, which prove that each was consumed once.

The samples of a dataset are divided into at most `BUCKETS` ranges. A digest holds, for each
range, how many samples were consumed and the sum of their hashes modulo 2**64. Digests of
disjoint parts add up to the digest of the whole, in any order. If a digest equals that of the
whole dataset, every sample was consumed exactly once, up to a chance of 2**-64; otherwise the
ranges that differ say where to look.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .hashing import mix_array

BUCKETS = 32
SIZE = BUCKETS * 16
_CHUNK = 1 << 14
"""This many hashes stay in the processor's cache."""
_STRETCH = 1 << 22
_KEY = np.uint64(0x5EED_C0DE_5A3B_1E55)

Counts = NDArray[np.uint64]


def count_of(digests: Iterable[bytes]) -> int:
    """How many samples serialized digests (`Digest.to_bytes`) have counted together."""
    table = np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2 * BUCKETS)
    return int(table[:, :BUCKETS].sum())


def sum_of(digests: Iterable[bytes]) -> bytes:
    """The digest of what several parts consumed together; empty ones count as nothing."""
    table = np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2 * BUCKETS)
    total: Counts = table.sum(axis=0, dtype=np.uint64)
    return total.astype("<u8").tobytes()


class Digest:
    """What was consumed of a dataset of ``total`` samples."""

    __slots__ = ("_counts", "_shift", "_sums", "total")

    def __init__(self, total: int, data: bytes = b"") -> None:
        """Empty, or restored from `to_bytes`; ``ValueError`` when ``data`` is not that."""
        if total < 1:
            raise ValueError(f"a digest is of at least one sample, not {total}")
        if len(data) not in (0, SIZE):
            raise ValueError(f"a digest has {SIZE} bytes, not {len(data)}")
        both = np.frombuffer(data or bytes(SIZE), "<u8").astype(np.uint64)
        self.total = total
        self._shift = max(0, (total - 1).bit_length() - (BUCKETS.bit_length() - 1))
        self._counts, self._sums = both[:BUCKETS], both[BUCKETS:]

    @property
    def width(self) -> int:
        """How many samples a range has; the last may have fewer."""
        return 1 << self._shift

    @property
    def count(self) -> int:
        """How many samples were consumed, counting repetitions."""
        return int(self._counts.sum())

    def add(self, samples: NDArray[np.int64]) -> None:
        """Count samples as consumed."""
        for start in range(0, len(samples), _CHUNK):
            self._add(samples[start : start + _CHUNK])

    def merge(self, other: Digest) -> None:
        """Count what another digest of the same dataset has counted."""
        if other.total != self.total:
            raise ValueError(f"digests of {self.total} and {other.total} samples do not add up")
        self._counts = self._counts + other._counts
        self._sums = self._sums + other._sums

    def to_bytes(self) -> bytes:
        """Serialize to `SIZE` bytes."""
        return np.concatenate((self._counts, self._sums)).astype("<u8").tobytes()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Digest):
            return NotImplemented
        return self.total == other.total and self.to_bytes() == other.to_bytes()

    __hash__ = None  # type: ignore[assignment]

    def _add(self, samples: NDArray[np.int64]) -> None:
        if not len(samples):
            return
        least, most = int(samples.min()), int(samples.max())
        if least < 0 or most >= self.total:
            raise ValueError(f"samples {least} to {most} reach outside the dataset")
        hashes = mix_array(samples.astype(np.uint64) ^ _KEY)
        first = least >> self._shift
        if first == most >> self._shift:
            self._counts[first] += np.uint64(len(samples))
            self._sums[first : first + 1] += hashes.sum()
            return
        bucket = samples >> self._shift
        self._counts += np.bincount(bucket, minlength=BUCKETS).astype(np.uint64)
        np.add.at(self._sums, bucket, hashes)


Counted = Callable[[int, int], None]
"""Called with how many samples have been counted, and of how many."""


def whole(total: int, progress: Counted | None = None) -> Digest:
    """The digest of all samples, each once; takes about a second per hundred million."""
    digest = Digest(total)
    for start in range(0, total, _STRETCH):
        stop = min(start + _STRETCH, total)
        digest.add(np.arange(start, stop, dtype=np.int64))
        if progress is not None:
            progress(stop, total)
    return digest


@dataclass(frozen=True, slots=True)
class CoverageVerdict:
    """How consumed samples compare with the expected ones.

    ``missing`` and ``repeated`` are lower bounds: what a range lacks or exceeds, and one of each
    for a range with the right count and a different hash.
    """

    covered: int
    missing: int
    repeated: int
    suspect: tuple[tuple[int, int], ...] = ()
    """Ranges of samples that are not as expected."""

    @property
    def exact(self) -> bool:
        """Whether every sample was consumed exactly once."""
        return not (self.missing or self.repeated)


def compare(seen: Digest, expected: Digest) -> CoverageVerdict:
    """Compare what was consumed with what was expected."""
    if seen.total != expected.total:
        raise ValueError(f"digests of {seen.total} and {expected.total} samples cannot be compared")
    counts, sums = seen._counts, seen._sums
    due, due_sums = expected._counts, expected._sums
    short = np.where(counts < due, due - counts, np.uint64(0))
    over = np.where(counts > due, counts - due, np.uint64(0))
    wrong = (counts == due) & (sums != due_sums)
    missing = int(short.sum()) + int(wrong.sum())
    repeated = int(over.sum()) + int(wrong.sum())
    places = np.flatnonzero((counts != due) | wrong).tolist()
    width = seen.width
    ranges = tuple((i * width, min((i + 1) * width, seen.total)) for i in places)
    return CoverageVerdict(int(due.sum()) - missing, missing, repeated, ranges)


def judge(
    seen: Digest, everything: Digest, *, expected: int, assumed: int, dropped: int
) -> CoverageVerdict:
    """The verdict on an epoch: samples that it assumes or leaves out on purpose are not missing.

    ``expected`` is how many samples the epoch has; 0: all.
    """
    verdict = compare(seen, everything)
    elsewhere = seen.total - expected if expected else 0
    missing = max(0, verdict.missing - assumed - dropped - elsewhere)
    suspect = verdict.suspect if missing or verdict.repeated else ()
    return replace(verdict, missing=missing, suspect=suspect)
