"""What the HTTP side uses of the coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from google.protobuf.message import Message

from ...config import CoordinatorConfig
from ...errors import StorageError
from ...telemetry import MethodStats
from ..state import Machine

T = TypeVar("T")


class ObservedService(Protocol):
    """The coordinator's service as the HTTP side sees it, with the whole machine to read."""

    config: CoordinatorConfig
    machine: Machine
    stats: dict[str, MethodStats]
    started_at: float
    transport: str

    @property
    def clock(self) -> Any:
        """Gives the time."""
        ...

    @property
    def closing(self) -> bool:
        """Whether it is shutting down."""
        ...

    @property
    def failure(self) -> StorageError | None:
        """Why the state cannot be stored, if so."""
        ...

    async def settled(self) -> None:
        """Wait until everything visible in the state is stored."""
        ...

    def admit(self, method: str, peer: str) -> None:
        """Refuse a call from an address that makes too many."""
        ...

    def handle(self, method: str, request: Any) -> Message | asyncio.Future[Message]:
        """Answer a call; raises `Refused`."""
        ...


async def in_slices(items: Sequence[T], size: int) -> AsyncIterator[Sequence[T]]:
    """Slices of a long list; between two slices other tasks get their turn."""
    for start in range(0, len(items), size):
        if start:
            await asyncio.sleep(0)
        yield items[start : start + size]


def totals(stats: Mapping[str, MethodStats]) -> tuple[int, int]:
    """How many calls there were, and how many were refused."""
    calls = sum(one.latency.count for one in stats.values())
    return calls, sum(one.errors for one in stats.values())
