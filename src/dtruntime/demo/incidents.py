"""What was killed, and what became of it: times that were measured, not expected."""

from __future__ import annotations

from dataclasses import dataclass

from ..display import count, duration


@dataclass(slots=True)
class WorkerLoss:
    """A worker that was killed. Times are seconds since 1970, 0 before it has happened."""

    worker: str
    pid: int
    rank: int | None
    """Nothing when it had none yet."""
    killed_at: float
    detected_at: float = 0.0
    """When the coordinator took it for dead."""
    replacement: str = ""
    started_at: float = 0.0
    joined_at: float = 0.0
    generation: int = 0
    """The membership with the replacement."""
    resumed_at: float = 0.0
    """When the first step was done again by all of them."""
    resumed_from: int = 0
    """The step of the checkpoint that it went on from."""
    repeated: int = 0
    """Steps after that checkpoint that had been done, and were done again."""

    @property
    def is_over(self) -> bool:
        """Whether everybody trains again."""
        return self.resumed_at > 0

    def facts(self) -> dict[str, str]:
        """What happened, in words."""
        killed = f"{self.worker}, rank {self.rank}, process {self.pid}"
        if not self.is_over:
            return {"killed": f"{killed}; nobody had to train after that"}
        detected = f"{duration(self.detected_at - self.killed_at)} after the kill"
        took = duration(self.joined_at - self.started_at)
        return {
            "killed": killed,
            "detected": detected if self.detected_at else "before it was a member",
            "replaced": f"by {self.replacement}, {took} from its start to rank {self.rank}",
            "rolled back": f"to the checkpoint of step {self.resumed_from:,}; "
            f"{count(self.repeated, 'step')} done again",
            "recovered": f"{duration(self.resumed_at - self.killed_at)} from the kill to the next "
            "step that all did",
        }


@dataclass(slots=True)
class Outage:
    """A coordinator that was killed. Times are seconds since 1970, 0 before it has happened."""

    pid: int
    killed_at: float
    last_step_at: float
    """When the last step was done before it was missed."""
    back_at: float = 0.0
    resumed_at: float = 0.0
    is_rolled_back: bool = False
    """Whether training went on from a checkpoint, since workers were taken for dead."""

    @property
    def is_over(self) -> bool:
        """Whether everybody trains again."""
        return self.resumed_at > 0

    def facts(self) -> dict[str, str]:
        """What happened, in words."""
        killed = f"the coordinator, process {self.pid}"
        if not self.is_over:
            return {"killed": f"{killed}; nobody had to train after that"}
        return {
            "killed": killed,
            "restarted": f"serving again {duration(self.back_at - self.killed_at)} after the kill",
            "carried on": f"{duration(self.resumed_at - self.last_step_at)} passed between two "
            f"steps, {'some were' if self.is_rolled_back else 'none was'} done again",
        }


Incident = WorkerLoss | Outage
