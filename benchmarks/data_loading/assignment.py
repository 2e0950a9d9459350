"""Assigning shards to workers: the slot table beside a plain ring and the published claims.

Each measurement is made in a process of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtruntime.bench.report import Announce, Times
from dtruntime.sharding import ConsistentHash, SlotTable

from ..harness import Target
from ..processes import call, serve, traced_peak

ALGORITHMS = ("slot table", "ring")
COLD_REPEATS = 3
WARM_REPEATS = 5
PUBLISHED = {(10, 1_000): (1.2, 8), (100, 10_000): (8.4, 42), (1_000, 100_000): (92.0, 380)}
"""The reference's claims on 64 cores: milliseconds and megabytes."""

TARGET_SHAPE = (1_000, 100_000)
COLD_MS, WARM_MS = 60.0, 3.0

Owners = NDArray[Any]
Shape = tuple[int, int]
"""Workers and shards."""


@dataclass(frozen=True, slots=True)
class Assigned:
    """One algorithm for one number of workers and shards."""

    algorithm: str
    shape: Shape
    cold_ms: Times
    join_ms: Times
    """A worker joins, with what is remembered from before."""
    death_ms: Times
    peak_bytes: int
    """Memory that a cold assignment takes, at its peak."""
    max_over_mean: float
    min_over_mean: float
    moves_on_join: float
    """Shards that change owner, relative to the newcomer's share."""

    @property
    def published(self) -> tuple[float, int] | None:
        """The reference's milliseconds and megabytes."""
        return PUBLISHED.get(self.shape)


class _Slots:
    def __init__(self, workers: int, shards: int) -> None:
        self._workers = workers
        self._table = SlotTable(shards)

    def first(self) -> Owners:
        return self._table.owners(self._workers)

    def join(self) -> Owners:
        return self._table.owners(self._workers + 1)

    def death(self, worker: int) -> Owners:
        return self._table.owners(self._workers, {worker})


class _Ring:
    def __init__(self, workers: int, shards: int) -> None:
        self._shards = shards
        self._names = [f"worker-{number}" for number in range(workers + 1)]
        self._ring = ConsistentHash()

    def first(self) -> Owners:
        for name in self._names[:-1]:
            self._ring.add_node(name)
        return self._owners()

    def join(self) -> Owners:
        self._ring.add_node(self._names[-1])
        owners = self._owners()
        self._ring.remove_node(self._names[-1])
        return owners

    def death(self, worker: int) -> Owners:
        self._ring.remove_node(self._names[worker])
        owners = self._owners()
        self._ring.add_node(self._names[worker])
        return owners

    def _owners(self) -> Owners:
        owners = np.empty(self._shards, np.int32)
        for name, shards in self._ring.assign("data", self._shards).items():
            owners[shards] = int(name.removeprefix("worker-"))
        return owners


Algorithm = _Slots | _Ring
"""Assigns to all workers, to one more, or to all but one; keeps what helps the next time."""
_MAKE: dict[str, type[Algorithm]] = {"slot table": _Slots, "ring": _Ring}


def compare(
    python: Path, shapes: Sequence[Shape], rounds: int, announce: Announce
) -> list[Assigned]:
    """Every algorithm for every shape, in turn."""
    assigned = []
    for shape in shapes:
        samples: dict[str, list[dict[str, Any]]] = {name: [] for name in ALGORITHMS}
        for turn in range(1, rounds + 1):
            for name in ALGORITHMS:
                announce(f"{shape[0]:,} × {shape[1]:,}, round {turn} of {rounds}: {name}")
                question = {"name": name, "workers": shape[0], "shards": shape[1]}
                samples[name].append(call(__name__, question, python))
        assigned += [_summary(name, shape, of) for name, of in samples.items()]
    return assigned


def targets(assigned: Sequence[Assigned]) -> Iterable[Target]:
    """How fast the slot table should be."""
    for one in assigned:
        if one.algorithm == "slot table" and one.shape == TARGET_SHAPE:
            name = f"{one.shape[0]:,} workers × {one.shape[1]:,} shards"
            cold, warm = one.cold_ms.median, max(one.join_ms.median, one.death_ms.median)
            yield Target(f"{name}, cold", f"< {COLD_MS:g} ms", f"{cold:.1f} ms", cold < COLD_MS)
            yield Target(f"{name}, warm", f"< {WARM_MS:g} ms", f"{warm:.2f} ms", warm < WARM_MS)


def _summary(name: str, shape: Shape, samples: Sequence[dict[str, Any]]) -> Assigned:
    def times(key: str) -> Times:
        return Times.of([value for sample in samples for value in sample[key]])

    first = samples[0]
    return Assigned(
        name,
        shape,
        times("cold_ms"),
        times("join_ms"),
        times("death_ms"),
        max(sample["peak_bytes"] for sample in samples),
        first["max_over_mean"],
        first["min_over_mean"],
        first["moves_on_join"],
    )


def measure(name: str, workers: int, shards: int) -> dict[str, Any]:
    """Time one algorithm in this process."""
    make = _MAKE[name]
    make(4, 64).first()
    with traced_peak() as most:
        make(workers, shards).first()
        peak = most()
    assignment = make(workers, shards)
    owners = assignment.first()
    loads = np.bincount(owners, minlength=workers)
    moved = int((owners != assignment.join()).sum())
    cold, join = [], []
    for _ in range(COLD_REPEATS):
        began = time.perf_counter()
        fresh = make(workers, shards)
        fresh.first()
        cold.append(_since(began))
        began = time.perf_counter()
        fresh.join()
        join.append(_since(began))
    return {
        "cold_ms": cold,
        "join_ms": join,
        "death_ms": list(_deaths(assignment, workers)),
        "peak_bytes": peak,
        "max_over_mean": float(loads.max() / loads.mean()),
        "min_over_mean": float(loads.min() / loads.mean()),
        "moves_on_join": moved / (shards // (workers + 1)),
    }


def _deaths(assignment: Algorithm, workers: int) -> Iterable[float]:
    """How long it takes to reassign a dead worker's shards, for several workers in turn."""
    # Not the last: without it, the others are a membership with no hole.
    for worker in np.linspace(0, workers - 2, WARM_REPEATS).astype(int).tolist():
        assignment.first()
        began = time.perf_counter()
        assignment.death(worker)
        yield _since(began)


def _since(began: float) -> float:
    return 1000 * (time.perf_counter() - began)


if __name__ == "__main__":
    serve(lambda order: lambda question: measure(**question))
