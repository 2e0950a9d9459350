"""Sharded states in the background: planned by DCP, written and committed as all others are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint import DefaultLoadPlanner

from ..access import access
from ..manager import CheckpointManager
from ..save.handle import SaveHandle
from .reader import StrataReader
from .sharded_states import Planning, world_size
from .writer import KIND

Path = tuple[str | int, ...]
"""The keys that lead to a value of a nested state."""


def save_sharded(
    manager: CheckpointManager,
    state: dict[str, Any],
    step: int,
    epoch: int = 0,
    is_full: bool = True,
    *,
    metrics: Mapping[str, float] | None = None,
    metadata: Mapping[str, str] | None = None,
    planning: Planning | None = None,
) -> SaveHandle:
    """Save a nested dict of tensors, of which every process of the process group has some.

    As `CheckpointManager.save` it returns when the tensors may be changed: who saves what is agreed
    on by collectives in this thread, and what this process has to save is copied. Writing and the
    commit happen in the background, without collectives. With several processes all of them call
    it, with a manager made by ``sharded=True``. ``planning`` remembers plans between saves.
    """
    found = access(manager)
    if world_size() > 1 and not found.shared:
        raise ValueError(
            f"the process group has {world_size()} processes, and each has to save its shards: use "
            "CheckpointManager(..., sharded=True)"
        )
    wanted = found.wanted(step, epoch, is_full, metrics, metadata)
    rank = wanted.coordinator.rank if found.shared and wanted.coordinator is not None else 0
    plans = planning or Planning()
    handle = found.take(KIND, lambda: plans.plan(state, rank), wanted)
    manager.policy.saved(step)
    return handle


def load_sharded(
    manager: CheckpointManager, state: dict[str, Any], step: int | None = None
) -> None:
    """Fill a nested dict of tensors from a sharded checkpoint: the newest, or that of a step.

    Each process reads what its own shards need, whatever the checkpoint's sharding was; there are
    no collectives. ``RuntimeError`` names a tensor that the checkpoint does not have.
    """
    ShardedCheckpoint(manager, step).load_into(state)


class ShardedCheckpoint:
    """A sharded checkpoint that is being loaded."""

    def __init__(self, manager: CheckpointManager, step: int | None = None) -> None:
        self._reader = StrataReader(manager, step)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, True)

    @property
    def sizes(self) -> dict[Path, tuple[int, ...]]:
        """The sizes of all its tensors, by where they are in the nested state."""
        entries = self._metadata.state_dict_metadata
        paths: Mapping[str, Path] = self._metadata.planner_data or {}
        return {
            paths.get(name, (name,)): tuple(entry.size)
            for name, entry in entries.items()
            if hasattr(entry, "size")
        }

    def load_into(self, state: dict[str, Any]) -> None:
        """Fill the tensors of a nested dict."""
        planner = DefaultLoadPlanner()
        planner.set_up_planner(state, self._metadata, True)
        plan = planner.finish_plan(planner.create_local_plan())
        self._reader.read_data(plan, planner)
