"""What a coordinator weighs, idle and with many workers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from . import messages
from .client import connect
from .servers import Kind, start
from .tools import Tools

WORKERS = 10_000
BEATS = 2


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident bytes of a coordinator."""

    idle_bytes: int
    workers: int
    loaded_bytes: int


def measure(tools: Tools, scratch: Path) -> Memory:
    """A coordinator of its own, before and after 10,000 workers register and report."""
    with start(Kind.STRATA_NATIVE, tools, scratch / "memory") as server:
        idle = server.resident_bytes()
        with connect(server.address) as client:
            workers, _ = client.form_job("memory", WORKERS, fixed=False)
            for _ in range(BEATS):
                client.beat("memory", workers, gpus=messages.GPUS_PER_WORKER)
            members = client.live_workers("memory")
        return Memory(idle, members, server.resident_bytes())
