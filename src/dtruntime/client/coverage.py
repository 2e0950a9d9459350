"""Proof of what was consumed in each epoch, from the digests that the coordinator keeps."""

from __future__ import annotations

from collections.abc import Iterable

from ..rpc.gen import coordinator_pb2 as pb
from ..sharding.coverage import Counted, Digest, compare, whole
from ..types import EpochCoverage


def coverage_of(
    total: int, epochs: Iterable[pb.Coverage], progress: Counted | None = None
) -> list[EpochCoverage]:
    """Hold each epoch against all samples; takes about a second for a hundred million."""
    found = list(epochs)
    if not found:
        return []
    expected = whole(total, progress)
    return [_verdict(total, epoch, expected) for epoch in found]


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
        ended_incomplete=epoch.ended_incomplete,
    )
