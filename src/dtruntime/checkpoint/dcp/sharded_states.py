"""Saves and loads of sharded states (FSDP, DTensor) in the background, planned by DCP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from ...errors import StorageError
from ..manager import CheckpointManager
from ..save.handle import SaveHandle
from ..save.staging import Memory
from ..state_dict import Buffer
from .metadata import Location, encode
from .reader import StrataReader
from .writer import KIND, buffer_of, check_item


@dataclass(frozen=True, slots=True)
class _RankPlan:
    """The local plan of a rank."""

    rank: int
    """The rank that its part is stored under."""
    plan: Any = None
    """None: unchanged since the last save."""
    error: str = ""


@dataclass(frozen=True, slots=True)
class _FinalPlan:
    """What a rank has to save."""

    plan: Any = None
    """None: unchanged since the last save."""
    error: str = ""


class Planning:
    """Plans saves, one after the other, together with all processes of the process group.

    Ranks send their local plans to the first one, which answers with what each has to save: two
    small collectives in the caller's thread. Unchanged plans are not sent again. A plan fixes the
    location of every item, so that writing needs no further collectives.
    """

    def __init__(self) -> None:
        self._shape: Any = None
        """The shape of the state that was planned last."""
        self._local_plan: Any = None
        self._final: Any = None
        self._ranks: list[int] = []
        self._local_plans: list[Any] = []
        """On the first process: the local plans of all ranks at the last save."""
        self._skeleton: Any = None
        """On the first process: the description of what was planned last."""

    def plan(self, state: dict[str, Any], rank: int) -> tuple[Any, list[Buffer]]:
        """The skeleton of this rank's part, and the memory that it has to store.

        Its part is stored under ``rank``. ``StorageError`` on all ranks when one cannot save.
        """
        planner = DefaultSavePlanner()
        local, failure = self._plan_locally(planner, state, rank)
        plans_of_ranks = _gathered(local)
        answers = None if plans_of_ranks is None else self._answers(planner, plans_of_ranks)
        answer = _scattered(answers)
        if answer.error:
            self.forget()
            raise StorageError(f"the state cannot be saved: {answer.error}") from failure
        if answer.plan is not None:
            self._final = answer.plan
        planner.finish_plan(self._final)
        return self._skeleton, [buffer_of(item, planner) for item in self._final.items]

    def forget(self) -> None:
        """Plan the next save from scratch."""
        self._shape = self._local_plan = self._final = self._skeleton = None
        self._ranks, self._local_plans = [], []

    def _plan_locally(
        self, planner: Any, state: dict[str, Any], rank: int
    ) -> tuple[_RankPlan, Exception | None]:
        try:
            planner.set_up_planner(state, is_coordinator=_is_first())
            shape = _shape(planner.state_dict)
            if shape is not None and shape == self._shape:
                return _RankPlan(rank), None  # which also saves making the plan
            plan = planner.create_local_plan()
            for item in plan.items:
                check_item(item)
        except Exception as exc:
            return _RankPlan(rank, error=f"rank {rank}: {type(exc).__name__}: {exc}"), exc
        self._shape = shape
        if plan == self._local_plan:
            return _RankPlan(rank), None
        self._local_plan = plan
        return _RankPlan(rank, plan), None

    def _answers(self, planner: Any, plans_of_ranks: Sequence[_RankPlan]) -> list[_FinalPlan]:
        """On the first process: what each rank has to save."""
        errors = [local.error for local in plans_of_ranks if local.error]
        if errors:
            return [_FinalPlan(error="; ".join(errors))] * len(plans_of_ranks)
        ranks = [local.rank for local in plans_of_ranks]
        if ranks == self._ranks and not any(local.plan for local in plans_of_ranks):
            return [_FinalPlan()] * len(plans_of_ranks)
        before = self._local_plans or [None] * len(plans_of_ranks)
        local_plans = [
            local.plan or last for local, last in zip(plans_of_ranks, before, strict=True)
        ]
        try:
            plans, metadata = planner.create_global_plan(local_plans)
            self._skeleton = encode(metadata, _placed(plans, ranks))
        except Exception as exc:
            return [_FinalPlan(error=f"{type(exc).__name__}: {exc}")] * len(plans_of_ranks)
        self._ranks, self._local_plans = ranks, local_plans
        return [_FinalPlan(plan) for plan in plans]


def _shape(state: dict[str, Any]) -> list[Any] | None:
    """What a plan depends on; None if that is unknown."""
    found: list[Any] = []
    for name, value in state.items():
        if isinstance(value, DTensor):
            found.append((name, value.shape, value.dtype, value.placements, value.device_mesh))
        elif type(value) in (Tensor, Parameter):
            found.append((name, value.shape, value.dtype))
        else:
            return None
    return found


def _placed(plans: Sequence[Any], ranks: Sequence[int]) -> Iterator[tuple[Any, Location]]:
    """The location of each item: the items of a plan are the extents of a part, in order."""
    for plan, rank in zip(plans, ranks, strict=True):
        for number, item in enumerate(plan.items):
            yield item.index, (rank, number)


def world_size() -> int:
    """The size of the process group; 1 without one."""
    return int(dist.get_world_size()) if _is_together() else 1


def _is_together() -> bool:
    return bool(dist.is_available() and dist.is_initialized())


def _is_first() -> bool:
    return not _is_together() or bool(dist.get_rank() == 0)


def _gathered(local: _RankPlan) -> list[_RankPlan] | None:
    """The local plans of all ranks, on the first process."""
    if world_size() == 1:
        return [local]
    plans_of_ranks: list[Any] | None = [None] * world_size() if _is_first() else None
    dist.gather_object(local, plans_of_ranks, dst=0)
    return plans_of_ranks


def _scattered(answers: list[_FinalPlan] | None) -> _FinalPlan:
    """This process's answer from the first one."""
    if world_size() == 1:
        assert answers is not None
        return answers[0]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, answers, src=0)
    answer: _FinalPlan = mine[0]
    return answer


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
    engine = manager.engine
    if world_size() > 1 and not engine.options.sharded:
        raise ValueError(
            f"the process group has {world_size()} processes, and each has to save its shards: use "
            "CheckpointManager(..., sharded=True)"
        )
    request = engine.request(step, epoch, is_full, metrics, metadata)
    rank = engine.committer.rank_of(request)
    plans = planning or Planning()
    handle = engine.save(request, lambda: Memory(KIND, *plans.plan(state, rank)))
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
        """The sizes of all its tensors, by their paths in the nested state."""
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
