"""How large one demonstration is, and where its files lie."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ..errors import StrataError

JOB = "demo"
DATASET = "digits"
PLAN_FILE = "plan.json"
BATCH_MOST = 200
STEPS_LEAST = 200
"""Small datasets get small batches, so that there are steps enough to see something."""
SAVES = 24


class RunFiles:
    """Where the workers of one run leave what they do."""

    def __init__(self, root: Path, job: str) -> None:
        self.root, self.job = root, job
        self.checkpoints = root / "checkpoints"
        self.exchange = root / "exchange"
        """Where workers hand each other their gradients."""
        self.notes = root / "notes"
        """Where workers note which samples each step used."""
        self.logs = root / "logs"


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """The size of the demonstration; every worker reads the same one."""

    root: str
    workers: int = 4
    epochs: int = 3
    seed: int = 0
    total_samples: int = 24_000
    shard_size: int = 500
    hidden: int = 256
    rate: float = 0.1

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
    def batch_size(self) -> int:
        """Samples of one step, of all workers together."""
        fitting = self.total_samples * self.epochs // STEPS_LEAST
        return max(self.workers, min(BATCH_MOST, fitting))

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return self.epochs * -(-self.total_samples // self.batch_size)

    @property
    def save_steps(self) -> int:
        """How often the run is saved."""
        return max(1, self.total_steps // SAVES)

    @property
    def kill_step(self) -> int:
        """The step before the kill: midway, and midway between two checkpoints."""
        saves = self.total_steps * 9 // 20 // self.save_steps
        return saves * self.save_steps + self.save_steps // 2

    @property
    def data_folder(self) -> Path:
        """The dataset."""
        return Path(self.root, "data")

    @property
    def coordinator_folder(self) -> Path:
        """The coordinator's state and log."""
        return Path(self.root, "coordinator")

    @property
    def disturbed(self) -> RunFiles:
        """The run with the kill."""
        return RunFiles(Path(self.root, "disturbed"), JOB)

    @property
    def undisturbed(self) -> RunFiles:
        """The same run again, without it."""
        return RunFiles(Path(self.root, "undisturbed"), f"{JOB}-undisturbed")

    @property
    def path(self) -> Path:
        """Where `prepare` writes this plan."""
        return Path(self.root, PLAN_FILE)

    def prepare(self) -> None:
        """Make the folders, and write the plan."""
        for run in (self.disturbed, self.undisturbed):
            for folder in (run.logs, run.notes, run.exchange):
                folder.mkdir(parents=True, exist_ok=True)
        self.coordinator_folder.mkdir(exist_ok=True)
        self.path.write_bytes(msgspec.json.format(msgspec.json.encode(self)))

    @staticmethod
    def read(path: str | Path) -> Scenario:
        """The plan that `prepare` wrote."""
        return msgspec.json.decode(Path(path).read_bytes(), type=Scenario)
