"""What a change of membership would move, before anybody joins or leaves."""

from __future__ import annotations

from collections.abc import Collection

from ..rpc.gen import coordinator_pb2 as pb
from ..sharding import Membership, MovePlan, SlotTable, lowest_free_slots, plan_change
from ..types import check_whole
from .dataset_descriptions import layout_of


def move_plan(
    description: pb.DatasetDescription,
    join: int | Collection[int],
    leave: Collection[int],
    world_size: int | None,
) -> MovePlan:
    """Plan with the present members, or with a world of ``world_size`` while there are none."""
    info = description.dataset
    layout = layout_of(info)
    now = membership(description, world_size)
    return plan_change(
        SlotTable(info.shard_count, seed=info.seed),
        now,
        join=_joining(now, join),
        leave=[check_whole("leave", rank) for rank in leave],
        samples=layout.shard_samples,
        size_bytes=layout.shard_bytes,
    )


def membership(description: pb.DatasetDescription, world_size: int | None) -> Membership:
    """Who shares the dataset now."""
    if not description.slot_count:
        return Membership(world_size or 1, frozenset())
    return Membership(description.slot_count, frozenset(description.dead_slots))


def _joining(now: Membership, join: int | Collection[int]) -> Collection[int]:
    if isinstance(join, Collection):
        return [check_whole("join", rank) for rank in join]
    return lowest_free_slots(now, check_whole("join", join))
