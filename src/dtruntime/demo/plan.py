"""What one demonstration does, and where its files lie."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ..errors import StrataError

JOB = "demo"
DATASET = "digits"
PLAN_FILE = "plan.json"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The demonstration's size; every worker reads the same one."""

    root: str
    workers: int = 4
    epochs: int = 8
    seed: int = 0
    total_samples: int = 60_000
    shard_size: int = 500
    batch_size: int = 50
    steps_per_round: int = 20
    """How many batches each worker learns from before all average their parameters."""
    hidden: int = 256
    rate: float = 0.3

    def __post_init__(self) -> None:
        if self.workers > self.shard_count:
            raise StrataError(
                f"{self.workers} workers cannot share {self.shard_count} shards: use fewer "
                "workers, or more samples"
            )

    @property
    def shard_count(self) -> int:
        """Files of the dataset."""
        return -(-self.total_samples // self.shard_size)

    @property
    def steps_per_epoch(self) -> int:
        """Batches of each worker in an epoch."""
        return -(-self.total_samples // (self.batch_size * self.workers))

    @property
    def total_steps(self) -> int:
        """Batches of each worker in the whole run."""
        return self.epochs * self.steps_per_epoch

    @property
    def data_folder(self) -> Path:
        """The dataset."""
        return Path(self.root, "data")

    @property
    def coordinator_folder(self) -> Path:
        """The coordinator's state and log."""
        return Path(self.root, "coordinator")

    @property
    def exchange_folder(self) -> Path:
        """Where the workers hand each other their parameters."""
        return Path(self.root, "exchange")

    @property
    def cache_folder(self) -> Path:
        """Where the workers keep the index of the dataset."""
        return Path(self.root, "cache")

    @property
    def checkpoint_folder(self) -> Path:
        """The checkpoints."""
        return Path(self.root, "checkpoints")

    def worker_file(self, rank: int, ending: str) -> Path:
        """A file that one worker leaves: ``log``, ``json``, ``epoch-3.npy``."""
        return Path(self.root, "workers", f"worker-{rank}.{ending}")

    def prepare(self) -> Path:
        """Make the folders and write the plan; returns its path."""
        folders = (self.exchange_folder, self.checkpoint_folder, self.worker_file(0, "log").parent)
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        path = Path(self.root, PLAN_FILE)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self)))
        return path

    @staticmethod
    def read(path: str) -> Plan:
        """The plan that `prepare` wrote."""
        return msgspec.json.decode(Path(path).read_bytes(), type=Plan)


class WorkerResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says when it is done."""

    rank: int
    steps: int
    samples: int
    barriers: int
    loss: float
    """Over the last epoch."""
    accuracy: float
    """On what it read in the last epoch."""
    digest: str
    """Of its final parameters."""
    training_seconds: float
