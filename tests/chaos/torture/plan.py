"""What happens in a round: everything is drawn from the seed before it begins."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Place = Literal["folder", "disk", "s3", "tiers"]
"""``disk`` is a folder on a small disk; ``tiers`` a small disk in front of S3."""

WEIGHTS = {
    "kill one": 5,
    "kill some": 2,
    "kill all": 1,
    "kill in forming": 4,
    "pause": 2,
    "ghost": 3,
    "preempt": 2,
    "preempt all": 1,
    "kill coordinator": 3,
    "kill coordinator and one": 2,
    "pause coordinator": 2,
    "cut": 2,
    "refuse": 1,
    "delay": 1,
    "silence": 1,
    "request checkpoint": 2,
    "fill disk": 4,
    "break s3": 4,
}
DISK_ONLY, S3_ONLY = "fill disk", "break s3"


@dataclass(frozen=True, slots=True)
class Fault:
    """Something to be done to the run."""

    kind: str
    after_steps: int
    """So many steps after the fault before it."""
    draw: float
    """Chooses the victim."""
    seconds: float
    """How long it lasts."""
    restart_seconds: float
    """After how long a victim is replaced."""


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """A run, and what is done to it."""

    seed: int
    number: int
    world: int
    place: Place
    wait_seconds: float
    """How long the others wait for a replacement before they go on smaller."""
    incremental: bool
    save_steps: int
    samples: int
    batch: int
    epochs: int
    reading: dict[str, Any]
    pause: float
    direct: bool
    """Whether workers add up over connections of their own, not through the coordinator."""
    faults: tuple[Fault, ...]

    @property
    def steps(self) -> int:
        return -(-self.samples // self.batch) * self.epochs

    @property
    def title(self) -> str:
        going_on = "waits" if self.wait_seconds > 1 else "shrinks"
        stored = "incremental" if self.incremental else "full"
        each = f"{self.steps} steps, saves every {self.save_steps} {stored}"
        how = f"{self.world} workers{', direct' if self.direct else ''}"
        return f"{how}, {self.place}, {going_on}, {each}"


def plan_round(
    seed: int,
    number: int,
    places: Sequence[Place],
    timeout: float,
    kinds: Sequence[str] | None = None,
) -> RoundPlan:
    """The round of this seed and number; ``timeout`` is that of heartbeats."""
    rng = random.Random(f"{seed}/{number}")
    place = places[number % len(places)]
    shrinks = rng.random() < 0.4
    if kinds is None:
        kinds = _draw_kinds(rng, place)
    faults = tuple(_draw_fault(rng, kind, timeout, shrinks=shrinks) for kind in kinds)
    world = rng.choice((2, 3, 3, 4))
    batch = rng.choice((24, 36, 40))
    steps_per_epoch = rng.randrange(90, 160)
    # The last batch of an epoch is sometimes smaller than the crew.
    last = rng.choice((0, 1, 2, batch // 2))
    return RoundPlan(
        seed=seed,
        number=number,
        world=world,
        place=place,
        wait_seconds=0.5 if shrinks else 30.0,
        incremental=rng.random() < 0.5,
        save_steps=rng.choice((5, 10, 25)),
        samples=steps_per_epoch * batch + last,
        batch=batch,
        epochs=rng.choice((2, 3)),
        reading={
            "shard_size": rng.choice((100, 250)),
            "streams": rng.choice((1, world, 4)),
            "seed": rng.randrange(1000),
            "shuffle": True,
        },
        pause=rng.choice((0.01, 0.02)),
        direct=rng.random() < 0.5,
        faults=faults,
    )


def _draw_kinds(rng: random.Random, place: Place) -> list[str]:
    weights = dict(WEIGHTS)
    if place not in ("disk", "tiers"):
        del weights[DISK_ONLY]
    if place not in ("s3", "tiers"):
        del weights[S3_ONLY]
    return rng.choices(list(weights), list(weights.values()), k=rng.randrange(5, 9))


def _draw_fault(rng: random.Random, kind: str, timeout: float, *, shrinks: bool) -> Fault:
    lengths = {
        "pause": (0.1, 0.6 * timeout),
        "ghost": (1.3 * timeout, 2.5 * timeout),
        "kill coordinator": (0.0, 2.0),
        "kill coordinator and one": (0.0, 2.0),
        "pause coordinator": (0.2, 2.0 * timeout),
        "refuse": (0.2, 2.0 * timeout),
        "delay": (1.0, 4.0),
        "silence": (0.5, 2.0 * timeout),
        "fill disk": (1.0, 5.0),
        "break s3": (2.0, 6.0),
    }
    # One in six hits in the middle of what the one before has caused.
    after = 0 if rng.random() < 1 / 6 else rng.randrange(6, 40)
    restart = rng.choice((0.0, 0.0, rng.uniform(0.1, 1.5)))
    if shrinks:
        restart = rng.uniform(2.0, 6.0)
    return Fault(kind, after, rng.random(), rng.uniform(*lengths.get(kind, (0, 0))), restart)
