"""Resuming in the middle of an epoch, at sizes where a table of samples would hurt.

Each measurement is made in a process of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtruntime.bench.report import Announce, Times

from ..harness import Target
from ..processes import ProcessFailed, call, serve, traced_peak

RANKS = 1024
RANK = 517
BATCH = 32
REPEATS = 3
ORDERS = ("global", "affinity")
STREAMING_SAMPLES = 10**7
TARGET_SAMPLES = 10**9
TARGET_MS = 50.0
PUBLISHED = (
    ("Streaming", 10**7, "py1e", 2700.0, None),
    ("LitData", 5 * 10**6, "shuffled", 3800.0, 660e6),
)
"""Measured before, elsewhere: who, samples, order, milliseconds, bytes."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """How long it takes from a state to the numbers of the first batch."""

    who: str
    samples: int
    order: str
    load_ms: Times
    """Until the state is loaded."""
    total_ms: Times
    """Until the numbers of the first batch are known."""
    peak_bytes: float | None
    """Memory added meanwhile, at its peak."""
    live: bool = True
    """Measured in this run."""


def compare(
    python: Path, sizes: Sequence[int], rounds: int, announce: Announce
) -> tuple[list[Resumed], str]:
    """Every order and size in turn, and Streaming where it is installed, else why not."""
    cases = [("Strata", size, order) for size in sizes for order in ORDERS]
    problem = ""
    cases.append(("Streaming", STREAMING_SAMPLES, "py1e"))
    samples: dict[tuple[str, int, str], list[dict[str, Any]]] = {case: [] for case in cases}
    for turn in range(1, rounds + 1):
        for case in cases:
            announce(f"resume, round {turn} of {rounds}: {case[0]}, {case[1]:,} samples, {case[2]}")
            try:
                question = dict(zip(("who", "samples", "order"), case, strict=True))
                samples[case].append(call(__name__, question, python))
            except ProcessFailed as exc:
                if case[0] == "Strata":
                    raise
                problem = str(exc)
    resumed = [_summary(case, of) for case, of in samples.items() if of]
    return resumed + _published(), problem


def targets(resumed: Sequence[Resumed]) -> Iterable[Target]:
    """How fast Strata should be."""
    for one in resumed:
        if one.who == "Strata" and one.samples == TARGET_SAMPLES:
            took = one.total_ms.median
            name = f"resume at {one.samples:.0e} samples, {one.order}".replace("e+0", "e")
            yield Target(name, f"< {TARGET_MS:g} ms", f"{took:.0f} ms", took < TARGET_MS)


def _summary(case: tuple[str, int, str], samples: Sequence[dict[str, Any]]) -> Resumed:
    return Resumed(
        *case,
        load_ms=Times.of([ms for sample in samples for ms in sample["load_ms"]]),
        total_ms=Times.of([ms for sample in samples for ms in sample["total_ms"]]),
        peak_bytes=max(sample["peak_bytes"] for sample in samples),
    )


def _published() -> list[Resumed]:
    return [
        Resumed(who, samples, order, Times.of([ms]), Times.of([ms]), size, live=False)
        for who, samples, order, ms, size in PUBLISHED
    ]


def measure_strata(samples: int, order: str) -> dict[str, Any]:
    """Load a state of another process's loader, and ask for the first batch.

    The samples are their own numbers, so that nothing is read from anywhere; making up those of
    the shuffle window is part of the time.
    """
    from dtruntime.data.loader import Loader
    from dtruntime.data.source import NumberSource

    source = NumberSource(samples)

    def make() -> Loader:
        return Loader(source, BATCH, rank=RANK, world_size=RANKS, order=order)

    steps = samples // (BATCH * RANKS) // 2
    state = make().state_dict()
    state |= {"epoch": 3, "position": steps * BATCH * (RANKS if order == "global" else 1)}

    def resume(loader: Loader) -> tuple[float, float]:
        began = time.perf_counter()
        loader.load_state_dict(state)
        loaded = time.perf_counter()
        with closing(loader.deliveries()) as steps:  # type: ignore[type-var]
            numbers = next(iter(steps)).numbers
            known = time.perf_counter()
        assert len(numbers) == BATCH
        return 1000 * (loaded - began), 1000 * (known - began)

    _warm_up(order)
    times = [resume(make()) for _ in range(REPEATS)]
    loader = make()
    with traced_peak() as most:
        resume(loader)
        peak = most()
    load, total = zip(*times, strict=True)
    return {"load_ms": load, "total_ms": total, "peak_bytes": peak}


def _warm_up(order: str) -> None:
    """What libraries import when they are first used belongs to the start of a process."""
    from dtruntime.data.loader import Loader
    from dtruntime.data.source import NumberSource

    with Loader(NumberSource(100, 10), 10, order=order) as loader:
        next(iter(loader))


def measure_streaming(samples: int) -> dict[str, Any]:
    """What Streaming computes for the whole job when it resumes, by its own functions."""
    from .contenders.mosaic import plan_resume

    consumed = samples // (BATCH * RANKS) // 2 * BATCH * RANKS
    plan_resume(10**6, RANKS, BATCH, 0)
    began = time.perf_counter()
    plan_resume(samples, RANKS, BATCH, consumed)
    took = 1000 * (time.perf_counter() - began)
    with traced_peak() as most:
        plan_resume(samples, RANKS, BATCH, consumed)
        peak = most()
    return {"load_ms": [took], "total_ms": [took], "peak_bytes": peak}


def measure(who: str, samples: int, order: str) -> dict[str, Any]:
    """Measure one library once in this process."""
    return measure_strata(samples, order) if who == "Strata" else measure_streaming(samples)


if __name__ == "__main__":
    serve(lambda order: lambda question: measure(**question))
