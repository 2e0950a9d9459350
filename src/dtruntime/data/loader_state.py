"""The state of a loader: small JSON, enough to continue with any number of workers."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ..errors import ShardError
from ..sharding.coverage_digest import Digest
from .order import AtLeastOne, Count, OrderPlan

VERSION = 1

Past = tuple[AtLeastOne, list[Count]]
"""A segment: the number of workers, and what each consumed (a single number: every one)."""


class LoaderState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A position between two batches."""

    plan: OrderPlan
    epoch: Count
    position: Count
    """Samples consumed: by the whole job in global order, by each worker in affinity order."""
    world: AtLeastOne
    rank: int = -1
    """-1: the state is valid for all ranks."""
    past: tuple[Past, ...] = ()
    """In affinity order, the segments of this epoch with other numbers of workers."""
    base: str = ""
    """Digest of what this epoch had consumed when it was resumed."""
    seen: str = ""
    """Digest of what this rank has consumed since."""
    assumed: int = 0
    """Samples consumed, by the position, that are in neither digest."""
    positions: tuple[Count, ...] = ()
    """The position of each rank, when they differ."""
    version: int = VERSION

    def __post_init__(self) -> None:
        if not -1 <= self.rank < self.world:
            raise ValueError(f"rank {self.rank} is not one of {self.world} ranks")
        if self.plan.order == "global" and (self.past or self.positions):
            raise ValueError("in global order ranks have no positions of their own")
        if len(self.positions) not in (0, self.world):
            raise ValueError(f"there are {len(self.positions)} positions of {self.world} ranks")
        for world, consumed in self.past:
            if len(consumed) not in (1, world):
                raise ValueError(f"there are {len(consumed)} past positions of {world} ranks")

    def to_dict(self) -> dict[str, Any]:
        """The state as plain JSON types."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain

    @staticmethod
    def of(value: object) -> LoaderState:
        """Restore a state from `to_dict`; ``ValueError`` when it is not one."""
        if isinstance(value, bytes | str):
            return LoaderState.of(msgspec.json.decode(value))
        if not isinstance(value, Mapping):
            raise TypeError(f"a loader's state is a mapping, not {type(value).__name__}")
        version = value.get("version")
        if version != VERSION:
            raise ValueError(f"this loader's state has version {version!r}, not {VERSION}")
        try:
            return msgspec.convert(dict(value), LoaderState)
        except msgspec.ValidationError as exc:
            raise ValueError(f"not a loader's state: {exc}") from exc


def pack(digest: Digest) -> str:
    """A digest as text; empty for an empty one."""
    return base64.b85encode(digest.to_bytes()).decode() if digest.count else ""


def unpack(text: str, total: int) -> Digest:
    """Restore a digest from `pack`; ``ValueError`` when it is not one."""
    if not text:
        return Digest(total)
    try:
        data = base64.b85decode(text)
        if not data:
            raise ValueError("there is nothing in it")
        return Digest(total, data)
    except ValueError as exc:
        raise ValueError(f"not a loader's state: its digest is damaged: {exc}") from exc


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the states of all ranks, taken after the same step, into one that is valid for all.

    Loading it instead of one rank's state proves the coverage of the epoch across the
    interruption. Raises ``ShardError`` when the states do not belong together.
    """
    if not states:
        raise ValueError("there is no state to merge")
    ranks = [LoaderState.of(state) for state in states]
    first = ranks[0]
    _check_together(ranks)
    total = first.plan.samples
    base = unpack(first.base, total)
    for state in ranks:
        base.merge(unpack(state.seen, total))
    positions = tuple(state.position for state in sorted(ranks, key=lambda state: state.rank))
    same = len(set(positions)) == 1
    return msgspec.structs.replace(
        first,
        rank=-1,
        base=pack(base),
        seen="",
        position=max(positions),
        positions=() if same else positions,
    ).to_dict()


def _check_together(ranks: Sequence[LoaderState]) -> None:
    first = ranks[0]
    numbers = sorted(state.rank for state in ranks)
    if numbers != list(range(first.world)):
        raise ShardError(
            f"states of ranks {numbers} are not those of all {first.world} ranks, once each"
        )
    for state in ranks[1:]:
        same = state.plan == first.plan and state.past == first.past and state.base == first.base
        if not same or (state.epoch, state.world) != (first.epoch, first.world):
            raise ShardError(
                f"the states of ranks {first.rank} and {state.rank} are not of the same run: "
                f"{first.plan.difference(state.plan) or 'they were resumed differently'}"
            )
        if first.plan.order == "global" and state.position != first.position:
            raise ShardError(
                f"rank {first.rank} is at sample {first.position} and rank {state.rank} at "
                f"{state.position}: save the states of all ranks after the same step"
            )
