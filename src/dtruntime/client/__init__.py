"""A training process's membership in a job, and its datasets. Read ``orchestrator`` first."""

from .datasets import DatasetRegistry
from .observer import Observer
from .orchestrator import TrainingOrchestrator
from .worker_config import WorkerConfig

__all__ = ["DatasetRegistry", "Observer", "TrainingOrchestrator", "WorkerConfig"]
