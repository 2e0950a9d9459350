"""Proof of what was consumed in each epoch, from the digests that the coordinator keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from ..rpc.gen import coordinator_pb2 as pb
from ..sharding.coverage import Digest, compare
from ..types import EpochCoverage

CHUNK = 1 << 22

CoverageProgress = Callable[[int, int], None]
"""Is told how many samples have been counted, and of how many."""


def coverage_of(
    total: int, epochs: Iterable[pb.Coverage], progress: CoverageProgress | None = None
) -> list[EpochCoverage]:
    """Hold each epoch against all samples; takes about a second for a hundred million."""
    found = list(epochs)
    if not found:
        return []
    expected = whole(total, progress)
    return [_verdict(total, epoch, expected) for epoch in found]


def whole(total: int, progress: CoverageProgress | None = None) -> Digest:
    """The digest of all samples, each once."""
    digest = Digest(total)
    for start in range(0, total, CHUNK):
        stop = min(start + CHUNK, total)
        digest.add(np.arange(start, stop, dtype=np.int64))
        if progress is not None:
            progress(stop, total)
    return digest


def _verdict(total: int, epoch: pb.Coverage, expected: Digest) -> EpochCoverage:
    verdict = compare(Digest(total, epoch.digest), expected)
    elsewhere = total - epoch.expected if epoch.expected else 0
    excused = epoch.assumed + epoch.dropped + elsewhere
    missing = max(0, verdict.missing - excused)
    clean = not (missing or verdict.repeated)
    return EpochCoverage(
        epoch=epoch.epoch,
        total=total,
        covered=verdict.covered,
        missing=missing,
        repeated=verdict.repeated,
        assumed=epoch.assumed,
        dropped=epoch.dropped,
        complete=epoch.complete,
        workers=epoch.workers,
        segments=epoch.segments,
        suspect=() if clean else verdict.suspect,
    )
