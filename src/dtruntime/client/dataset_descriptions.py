"""What a dataset's description says: its layout, plans of moves, and the coverage of epochs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..rpc.gen import coordinator_pb2 as pb
from ..sharding import Membership, MovePlan, SlotTable, lowest_free_slots, plan_change
from ..sharding.coverage_digest import Counted, Digest, compare, whole
from ..types import EpochCoverage, check_whole


@dataclass(frozen=True, slots=True)
class DatasetLayout:
    """Where a dataset's samples are; without files when nobody has seen them."""

    shard_samples: NDArray[np.int64]
    """How many samples each shard has."""
    shard_bytes: NDArray[np.int64] | None
    """How much has to be read for each shard."""
    files: tuple[str, ...]
    """Paths or URLs."""
    file_samples: NDArray[np.int64]


def layout_of(info: pb.DatasetInfo) -> DatasetLayout:
    """The layout in a full description."""
    if not info.HasField("layout"):
        sizes = np.full(info.shard_count, info.shard_size, dtype=np.int64)
        sizes[-1] = info.total_samples - info.shard_size * (info.shard_count - 1)
        return DatasetLayout(sizes, None, (), np.zeros(0, np.int64))
    layout = info.layout
    return DatasetLayout(
        np.fromiter(layout.shard_samples, np.int64),
        np.fromiter(layout.shard_bytes, np.int64),
        tuple(layout.root + name for name in layout.files),
        np.fromiter(layout.file_samples, np.int64),
    )


def move_plan(
    description: pb.DatasetDescription,
    join: int | Collection[int],
    leave: Collection[int],
    world_size: int | None,
) -> MovePlan:
    """What would move; without members, a world of ``world_size`` (1 by default) is assumed."""
    info = description.dataset
    layout = layout_of(info)
    now = Membership(world_size or 1, frozenset())
    if description.slot_count:
        now = Membership(description.slot_count, frozenset(description.dead_slots))
    if isinstance(join, Collection):
        joining: Collection[int] = [check_whole("join", rank) for rank in join]
    else:
        joining = lowest_free_slots(now, check_whole("join", join))
    return plan_change(
        SlotTable(info.shard_count, seed=info.seed),
        now,
        join=joining,
        leave=[check_whole("leave", rank) for rank in leave],
        samples=layout.shard_samples,
        size_bytes=layout.shard_bytes,
    )


def coverage_of(
    total: int, epochs: Sequence[pb.Coverage], progress: Counted | None = None
) -> list[EpochCoverage]:
    """Compare each epoch with all samples; takes about a second for a hundred million."""
    if not epochs:
        return []
    expected = whole(total, progress)
    return [_coverage(total, epoch, expected) for epoch in epochs]


def _coverage(total: int, epoch: pb.Coverage, expected: Digest) -> EpochCoverage:
    verdict = compare(Digest(total, epoch.digest), expected)
    elsewhere = total - epoch.expected if epoch.expected else 0
    excused = epoch.assumed + epoch.dropped + elsewhere
    missing = max(0, verdict.missing - excused)
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
        suspect=verdict.suspect if missing or verdict.repeated else (),
        ended_incomplete=epoch.ended_incomplete,
    )
