"""The one retry policy: exponential back-off with jitter."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

JITTER = random.SystemRandom()
"""Not Python's global generator: the program may have seeded that, and must get the same numbers
from it however often Strata waits."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delays that double from ``first`` to ``longest``, each drawn from its upper half.

    The jitter keeps a thousand workers that lost the same server from returning in step.
    """

    first: float = 0.05
    longest: float = 2.0
    factor: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.first <= self.longest:
            raise ValueError(f"0 < first <= longest must hold, not {self.first}, {self.longest}")
        if self.factor < 1:
            raise ValueError(f"back-off factor must be at least 1, not {self.factor}")

    def delays(self, rng: random.Random | None = None) -> Iterator[float]:
        """Yield delays in seconds, without end."""
        draw = (rng or JITTER).uniform
        ceiling = self.first
        while True:
            yield draw(ceiling / 2, ceiling)
            ceiling = min(ceiling * self.factor, self.longest)
