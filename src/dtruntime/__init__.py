"""Strata: data loading, checkpointing and recovery for distributed training.

Names are imported when they are first used, so ``import dtruntime`` costs next to nothing.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from . import _lazy

# gRPC's own fork handlers, on by default, can hang a process that forks (as a DataLoader does)
# and crash the child. A forked child never gets to use gRPC here, so it can do without them.
# gRPC reads this when it is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

if TYPE_CHECKING:
    from ._version import __version__ as __version__
    from .checkpoint import CheckpointManager as CheckpointManager
    from .client import DatasetRegistry as DatasetRegistry
    from .client import TrainingOrchestrator as TrainingOrchestrator
    from .client import WorkerConfig as WorkerConfig
    from .config import Config as Config
    from .errors import CheckpointNotFoundError as CheckpointNotFoundError
    from .errors import ConfigError as ConfigError
    from .errors import ConnectionError as ConnectionError
    from .errors import ShardError as ShardError
    from .errors import ShardNotFoundError as ShardNotFoundError
    from .errors import ShardValueError as ShardValueError
    from .errors import StorageError as StorageError
    from .errors import StrataError as StrataError
    from .errors import SyncError as SyncError
    from .run import Recovery as Recovery
    from .run import Run as Run
    from .run import load_tracked as load_tracked
    from .runtime import Runtime as Runtime
    from .sharding import MovePlan as MovePlan
    from .types import BarrierStatus as BarrierStatus
    from .types import CheckpointInfo as CheckpointInfo
    from .types import DatasetSummary as DatasetSummary
    from .types import EpochCoverage as EpochCoverage
    from .types import GpuUsage as GpuUsage
    from .types import JobStatus as JobStatus
    from .types import Membership as Membership
    from .types import ResourceUsage as ResourceUsage
    from .types import ShardInfo as ShardInfo
    from .types import WorkerState as WorkerState
    from .types import WorkerStatus as WorkerStatus
else:
    __getattr__, __dir__, __all__ = _lazy.exports(
        __name__,
        {
            "._version": "__version__",
            ".checkpoint": "CheckpointManager",
            ".client": "DatasetRegistry TrainingOrchestrator WorkerConfig",
            ".config": "Config",
            ".errors": (
                "CheckpointNotFoundError ConfigError ConnectionError ShardError "
                "ShardNotFoundError ShardValueError StorageError StrataError SyncError"
            ),
            ".run": "Recovery Run load_tracked",
            ".runtime": "Runtime",
            ".sharding": "MovePlan",
            ".types": (
                "BarrierStatus CheckpointInfo DatasetSummary EpochCoverage GpuUsage "
                "JobStatus Membership ResourceUsage ShardInfo WorkerState WorkerStatus"
            ),
        },
    )
