"""Retention: which checkpoints are kept."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Self

from .types import check_whole

RETENTION_KEY = "strata.retention"
PLACE_KEY = "strata.place"
WRITTEN_KEY = "strata.written_bytes"
IDENTITY_KEY = "strata.place_id"
SECONDS_KEY = "strata.seconds"
"""Metadata that a commit carries to the coordinator beside the user's: the retention policy, the
location, the bytes written, the identity of a run's location, and the duration of the save."""
FINISHED_KEY = "finished"
"""Set in the metadata of the last checkpoint of a run."""


@dataclass(frozen=True, slots=True)
class RetentionCandidate:
    """What retention needs to know about a checkpoint."""

    sequence: int
    step: int
    metrics: Mapping[str, float]

    @property
    def place(self) -> tuple[int, int]:
        """Its place in commit order; concurrent writers may use a sequence number twice."""
        return self.sequence, self.step


@dataclass(frozen=True, slots=True)
class Retention:
    """Which committed checkpoints to keep; the newest is always among them."""

    keep_count: int | None = 5
    """How many of the newest; ``None``: all."""
    keep_every: int | None = None
    """Also every checkpoint whose step is a multiple of this."""
    keep_best: int = 0
    """Also this many with the best ``metric``."""
    metric: str = "loss"
    higher_is_better: bool = False

    def __post_init__(self) -> None:
        for name, least in (("keep_count", 1), ("keep_every", 1), ("keep_best", 0)):
            value = getattr(self, name)
            if value is not None or name == "keep_best":
                object.__setattr__(self, name, check_whole(name, value, least))
        if not isinstance(self.metric, str):
            raise TypeError(f"metric must be a name, not {type(self.metric).__name__}")

    def to_json(self) -> str:
        """The policy as JSON, for `from_json`."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Self | None:
        """Read what `to_json` wrote; None if the text is something else."""
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError):
            return None

    def dropped(self, checkpoints: Sequence[RetentionCandidate]) -> list[RetentionCandidate]:
        """The checkpoints that are not kept, oldest first."""
        ordered = sorted(checkpoints, key=lambda one: one.place)
        if self.keep_count is None or not ordered:
            return []
        kept = {one.place for one in ordered[-self.keep_count :]}
        newest_of_step = {one.step: one.place for one in ordered}
        if self.keep_every is not None:
            for step, place in newest_of_step.items():
                if step % self.keep_every == 0:
                    kept.add(place)
        kept |= {one.place for one in self._best(ordered)}
        return [one for one in ordered if one.place not in kept]

    def _best(self, checkpoints: Sequence[RetentionCandidate]) -> list[RetentionCandidate]:
        measured = [c for c in checkpoints if not math.isnan(c.metrics.get(self.metric, math.nan))]
        sign = -1 if self.higher_is_better else 1
        return sorted(measured, key=lambda c: sign * c.metrics[self.metric])[: self.keep_best]
