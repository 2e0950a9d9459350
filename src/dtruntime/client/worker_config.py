"""A worker's settings: from arguments, else from the launcher's environment.

Rank and world size come from the first of these that has them:

1. arguments,
2. ``RANK`` and ``WORLD_SIZE``: torchrun, or set by hand; either may be given alone,
3. ``OMPI_COMM_WORLD_RANK`` and ``OMPI_COMM_WORLD_SIZE``: Open MPI,
4. ``PMI_RANK`` and ``PMI_SIZE``: MPICH and its derivatives,
5. ``SLURM_PROCID`` and ``SLURM_NTASKS``, in a job step (``SLURM_STEP_ID``): srun. A batch script
   has them too, but is a single process,
6. ``JOB_COMPLETION_INDEX`` and ``JOB_COMPLETIONS`` or ``STRATA_WORLD_SIZE``: an indexed Job of
   Kubernetes, which sets only the first by itself.

Inner launchers come before outer ones. From the third on they count only as a pair, and only if
they agree with what is already given: with ``WORLD_SIZE=8`` a launcher that started four processes
says nothing about ranks. By default the rank is the lowest free one, and the world is elastic.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..config import DEFAULT_URL, Config
from ..errors import ConfigError
from ..rpc.channel import CONNECT_SECONDS, target_of
from ..telemetry import tracing
from ..types import DEFAULT_JOB, check_id, check_whole

REGISTRATION_SECONDS = 60.0
"""How long registration waits for a free rank, or for a coordinator that has answered before."""
OUTAGE_SECONDS = 300.0
"""How long an absent coordinator is waited for by calls that cannot do without it."""

_LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",), ""),
    ("PMI_RANK", ("PMI_SIZE",), ""),
    ("SLURM_PROCID", ("SLURM_NTASKS",), "SLURM_STEP_ID"),
    ("JOB_COMPLETION_INDEX", ("JOB_COMPLETIONS", "STRATA_WORLD_SIZE"), ""),
)
"""The variables for rank and world size, and one that has to be set as well."""

_ATTEMPTS = ("STRATA_ATTEMPT", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """How a worker joins a job; omitted fields come from the environment."""

    coordinator_url: str | None = None
    """``COORDINATOR_URL``, else ``http://localhost:50051``."""
    gpu_count: int = 0
    heartbeat_interval_ms: int | None = None
    """By default the coordinator's interval."""
    worker_id: str | None = None
    """``WORKER_ID``, else assigned: ``worker-{rank}``."""
    rank: int | None = None
    """``RANK`` or the launcher's, else the lowest free one."""
    world_size: int | None = None
    """``WORLD_SIZE`` or the launcher's; without one the job is elastic."""
    job: str | None = None
    """``STRATA_JOB``, else ``default``."""
    attempt: int | None = None
    """How often the launcher has restarted the whole group; set by torchrun and Slurm."""
    memory_bytes: int = 0
    connect_timeout_ms: int | None = None
    """How long registration waits. ``STRATA_CONNECT_TIMEOUT_MS``, else 10 s for a coordinator that
    has never answered, and 60 s for one that has, or for a free rank."""
    outage_timeout_ms: int = 300_000
    """How long later calls wait for an absent coordinator."""
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
        """A copy with omitted fields filled from the environment."""
        env = os.environ if environment is None else environment
        rank, world_size = self._place(env)
        defaults: dict[str, Any] = {
            "coordinator_url": env.get("COORDINATOR_URL") or DEFAULT_URL,
            "worker_id": env.get("WORKER_ID") or None,
            "rank": rank,
            "world_size": world_size,
            "job": env.get("STRATA_JOB") or DEFAULT_JOB,
            "connect_timeout_ms": _number(env, "STRATA_CONNECT_TIMEOUT_MS"),
            "attempt": next((n for n in (_number(env, v) for v in _ATTEMPTS) if n is not None), 0),
        }
        missing = {k: v for k, v in defaults.items() if getattr(self, k) is None}
        return replace(self, **missing)

    @property
    def connect_seconds(self) -> float:
        """How long to wait for a coordinator that has never answered."""
        limit = self.connect_timeout_ms
        return CONNECT_SECONDS if limit is None else limit / 1000

    @property
    def registration_seconds(self) -> float:
        """How long registration may take in total."""
        limit = self.connect_timeout_ms
        return REGISTRATION_SECONDS if limit is None else limit / 1000

    def _place(self, env: Mapping[str, str]) -> tuple[int | None, int | None]:
        """Rank and world size as given, completed by the first launcher that agrees."""
        rank = _number(env, "RANK") if self.rank is None else self.rank
        size = _number(env, "WORLD_SIZE") if self.world_size is None else self.world_size
        for theirs in _launched(env):
            if rank in (None, theirs[0]) and size in (None, theirs[1]):
                return theirs
        return rank, size


def _launched(env: Mapping[str, str]) -> Iterator[tuple[int, int]]:
    """Ranks and world sizes from launchers other than torchrun."""
    for rank_name, size_names, needed in _LAUNCHERS:
        if needed and not env.get(needed):
            continue
        rank = _number(env, rank_name)
        size = next((n for n in (_number(env, name) for name in size_names) if n), None)
        if rank is not None and size is not None:
            yield rank, size


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


def trace_worker() -> None:
    """Record spans in this process if the environment names a collector."""
    if os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        chosen = Config.load().telemetry
        tracing.turn_on("strata-worker", chosen.otlp_endpoint, chosen.trace_ratio)
