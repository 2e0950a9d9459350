"""How long a run measures."""

from __future__ import annotations

from dataclasses import dataclass

from .servers import Kind


@dataclass(frozen=True, slots=True)
class Profile:
    """Rounds and sizes of one run of the benchmark."""

    rounds: int
    """How often each server is measured in turn; the report has the medians."""
    seconds: float
    """How long one measurement of a repeated call aims to take."""
    registrations: int
    """New workers per measurement."""
    barrier_runs: int
    """How often each server is measured with the small barrier."""
    barrier_seconds: float
    """How long one measurement of a barrier aims to take, once its processes run."""
    large_barrier_kinds: tuple[Kind, ...]
    """Who is measured with the large barrier: its processes start slowly."""
    large_barrier_runs: int
    """How often each of them is."""
    large_barrier_rounds: int
    """Rounds of the large barrier in one measurement."""
    verified_calls: int
    """Replies that k6 checks per operation."""


FULL = Profile(
    rounds=7,
    seconds=0.8,
    registrations=2000,
    barrier_runs=4,
    barrier_seconds=2.0,
    large_barrier_kinds=(Kind.STRATA_NATIVE, Kind.STRATA_AIO),
    large_barrier_runs=1,
    large_barrier_rounds=20,
    verified_calls=4000,
)
QUICK = Profile(
    rounds=2,
    seconds=0.4,
    registrations=1000,
    barrier_runs=2,
    barrier_seconds=1.0,
    large_barrier_kinds=(Kind.STRATA_NATIVE,),
    large_barrier_runs=1,
    large_barrier_rounds=10,
    verified_calls=1000,
)
