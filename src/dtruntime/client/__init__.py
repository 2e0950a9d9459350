"""What a training process uses: its membership in a job, and the job's datasets."""

from .datasets import DatasetRegistry
from .observer import Observer
from .orchestrator import TrainingOrchestrator
from .worker_config import WorkerConfig

__all__ = ["DatasetRegistry", "Observer", "TrainingOrchestrator", "WorkerConfig"]
