"""What a run is asked to do."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..types import CheckpointInfo, check_seconds
from .recovery import Recovery
from .streams.stream import DataOptions

REPORTED = frozenset({"step", "epoch", "state", "step_seconds", "samples_used"})
"""What is reported beside the metrics, which have other names."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The arguments of a run that its parts need."""

    checkpoints: str | os.PathLike[str]
    manager: Mapping[str, Any]
    """Options of `CheckpointManager`."""
    data: DataOptions
    epochs: int
    max_steps: int | None
    seed: int
    save_seconds: float | None
    grace_seconds: float
    recovery: Recovery
    process_group: str | None
    """The backend of the process group that the run makes, or ``auto``."""
    independent: bool
    """Whether gradients are no business of the run."""
    collective_seconds: float

    def __post_init__(self) -> None:
        if self.data.data is None and self.max_steps is None:
            raise ValueError("a run without data has no end: give max_steps")
        if self.save_seconds is not None:
            check_seconds("save_seconds", self.save_seconds)
        check_seconds("grace_seconds", self.grace_seconds, may_be_zero=True)
        check_seconds("collective_seconds", self.collective_seconds)
        if self.process_group is not None and not isinstance(self.process_group, str):
            raise TypeError(
                f"process_group must be 'auto' or a backend of torch, not "
                f"{type(self.process_group).__name__}"
            )
        if not isinstance(self.independent, bool):
            raise TypeError(f"independent must be a bool, not {type(self.independent).__name__}")
        if not isinstance(self.recovery, Recovery):
            raise TypeError(f"recovery must be a Recovery, not {type(self.recovery).__name__}")

    def length(self, steps: int | None) -> dict[str, float]:
        """Tells how much there is to do: in epochs, and the ``steps`` of all of them, if known."""
        found = {} if self.data.data is None else {"epochs": float(self.epochs)}
        known = [count for count in (steps, self.max_steps) if count is not None]
        return {**found, "steps": float(min(known))} if known else found

    def is_over(self, step: int) -> bool:
        """Whether the last step has been done."""
        return self.max_steps is not None and step >= self.max_steps

    def is_reached_by(self, finished: CheckpointInfo) -> bool:
        """Whether a run that had finished ends here too; this one may be longer."""
        if self.is_over(finished.step):
            return True
        return self.data.data is not None and finished.epoch >= self.epochs


def as_mapping(name: str, value: Any) -> Mapping[str, Any]:
    """What was given by name, or nothing; ``TypeError`` when it is no mapping."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a dict with names, not {type(value).__name__}")
    return value
