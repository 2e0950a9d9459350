"""Strata: data loading, checkpointing and recovery for distributed training.

Names are imported when they are first used, so ``import dtruntime`` costs next to nothing.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._version import __version__
    from .checkpoint import CheckpointManager
    from .client import DatasetRegistry, TrainingOrchestrator, WorkerConfig
    from .config import Config
    from .errors import (
        CheckpointNotFoundError,
        ConfigError,
        ConnectionError,
        ShardError,
        ShardNotFoundError,
        ShardValueError,
        StorageError,
        StrataError,
        SyncError,
    )
    from .run import Recovery, Run, load_tracked
    from .runtime import Runtime
    from .sharding import MovePlan
    from .types import (
        BarrierStatus,
        CheckpointInfo,
        DatasetSummary,
        EpochCoverage,
        GpuUsage,
        JobStatus,
        Membership,
        ResourceUsage,
        ShardInfo,
        WorkerState,
        WorkerStatus,
    )

# gRPC's own fork handlers, on by default, can hang a process that forks (as a DataLoader does)
# and crash the child. A forked child never gets to use gRPC here, so it can do without them.
# gRPC reads this when it is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

_HOMES = {
    "_version": ("__version__",),
    "checkpoint": ("CheckpointManager",),
    "client": ("DatasetRegistry", "TrainingOrchestrator", "WorkerConfig"),
    "config": ("Config",),
    "errors": (
        "CheckpointNotFoundError",
        "ConfigError",
        "ConnectionError",
        "ShardError",
        "ShardNotFoundError",
        "ShardValueError",
        "StorageError",
        "StrataError",
        "SyncError",
    ),
    "run": ("Recovery", "Run", "load_tracked"),
    "runtime": ("Runtime",),
    "sharding": ("MovePlan",),
    "types": (
        "BarrierStatus",
        "CheckpointInfo",
        "DatasetSummary",
        "EpochCoverage",
        "GpuUsage",
        "JobStatus",
        "Membership",
        "ResourceUsage",
        "ShardInfo",
        "WorkerState",
        "WorkerStatus",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "BarrierStatus",
    "CheckpointInfo",
    "CheckpointManager",
    "CheckpointNotFoundError",
    "Config",
    "ConfigError",
    "ConnectionError",
    "DatasetRegistry",
    "DatasetSummary",
    "EpochCoverage",
    "GpuUsage",
    "JobStatus",
    "Membership",
    "MovePlan",
    "Recovery",
    "ResourceUsage",
    "Run",
    "Runtime",
    "ShardError",
    "ShardInfo",
    "ShardNotFoundError",
    "ShardValueError",
    "StorageError",
    "StrataError",
    "SyncError",
    "TrainingOrchestrator",
    "WorkerConfig",
    "WorkerState",
    "WorkerStatus",
    "__version__",
    "load_tracked",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
