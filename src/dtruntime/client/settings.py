"""A worker's settings: arguments first, then what the launcher put into the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ..config import DEFAULT_URL
from ..errors import ConfigError
from ..rpc.channel import target_of
from ..types import DEFAULT_JOB, check_id, check_whole

_ATTEMPTS = ("STRATA_ATTEMPT", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """How a worker joins a job. What is left out comes from the environment."""

    coordinator_url: str | None = None
    """``COORDINATOR_URL``, else ``http://localhost:50051``."""
    gpu_count: int = 0
    heartbeat_interval_ms: int | None = None
    """The coordinator's interval when left out."""
    worker_id: str | None = None
    """``WORKER_ID``, else assigned: ``worker-{rank}``."""
    rank: int | None = None
    """``RANK``, else the lowest free one."""
    world_size: int | None = None
    """``WORLD_SIZE``; without one the job is elastic."""
    job: str | None = None
    """``STRATA_JOB``, else ``default``."""
    attempt: int | None = None
    """How often the launcher has restarted the whole group; torchrun and Slurm say so."""
    memory_bytes: int = 0
    connect_timeout_ms: int = 60_000
    """How long registration waits for the coordinator and for a free rank."""
    outage_timeout_ms: int = 300_000
    """How long later calls ride through a coordinator that is away."""
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.coordinator_url is not None:
            target_of(_text("coordinator_url", self.coordinator_url))
        for name, kind in (("worker_id", "worker id"), ("job", "job")):
            value = getattr(self, name)
            if value is not None:
                check_id(kind, value)
        for name, least in (
            ("gpu_count", 0),
            ("memory_bytes", 0),
            ("rank", 0),
            ("attempt", 0),
            ("world_size", 1),
            ("heartbeat_interval_ms", 1),
            ("connect_timeout_ms", 0),
            ("outage_timeout_ms", 0),
        ):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, check_whole(name, value, least))
        if self.rank is not None and self.world_size is not None and self.rank >= self.world_size:
            raise ValueError(
                f"rank {self.rank} does not exist in a world of {self.world_size} workers "
                f"(ranks are 0 to {self.world_size - 1})"
            )

    def resolved(self, environment: Mapping[str, str] | None = None) -> WorkerConfig:
        """A copy in which the environment fills what was left out."""
        env = os.environ if environment is None else environment
        found: dict[str, Any] = {
            "coordinator_url": env.get("COORDINATOR_URL") or DEFAULT_URL,
            "worker_id": env.get("WORKER_ID") or None,
            "rank": _number(env, "RANK"),
            "world_size": _number(env, "WORLD_SIZE"),
            "job": env.get("STRATA_JOB") or DEFAULT_JOB,
            "attempt": next((n for n in (_number(env, v) for v in _ATTEMPTS) if n is not None), 0),
        }
        known = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{k: v for k, v in found.items() if known[k] is None})


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, not {type(value).__name__}")
    return value


def _number(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"environment variable {name} must be a number, not {text!r}") from None
