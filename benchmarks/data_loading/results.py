"""Everything one run measured, and how it compares with the targets and the published claims."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..tables import Target
from .assignment import Assigned
from .contenders import Entry, Kind
from .dataset import ROW_BYTES, Dataset
from .resume import Resumed

MEGABYTE = 1e6
LEAST_OF_LIMIT = 0.9
COLD_MS, WARM_MS, RESUME_MS = 60.0, 3.0, 50.0
TARGET_SHAPE = (1_000, 100_000)
RESUME_SAMPLES = 10**9


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over the data, or the beginning of one."""

    batch_size: int
    samples: int
    first_samples: int
    seconds: float
    cpu_seconds: float
    complete: bool
    peak_bytes: int
    first_batch_seconds: float

    @property
    def rate(self) -> float:
        """Samples per second; of a pass that was cut off, without its start."""
        if self.complete:
            return self.samples / self.seconds
        return (self.samples - self.first_samples) / (self.seconds - self.first_batch_seconds)


@dataclass(frozen=True, slots=True)
class Summary:
    """What the passes of one contender with one batch size come to."""

    rate: float
    """The median."""
    best_rate: float
    lowest_rate: float
    cpu_us: float
    """CPU time per sample, the lowest."""
    peak_bytes: int
    passes: int
    complete: bool

    @property
    def megabytes(self) -> float:
        """Of decoded columns per second."""
        return self.rate * ROW_BYTES / MEGABYTE

    @property
    def spread(self) -> float:
        """How far the passes lie apart, of their median."""
        return (self.best_rate - self.lowest_rate) / self.rate


@dataclass(slots=True)
class Runner:
    """A contender and what was measured of it."""

    entry: Entry
    rows: int = 0
    prepare_seconds: float = 0.0
    version: str | None = None
    error: str = ""
    """Why it could not be measured."""
    passes: list[Pass] = field(default_factory=list)

    def summary(self, batch_size: int) -> Summary | None:
        """Its passes with one batch size."""
        found = [p for p in self.passes if p.batch_size == batch_size]
        if self.error or not found:
            return None
        rates = [p.rate for p in found]
        return Summary(
            rate=statistics.median(rates),
            best_rate=max(rates),
            lowest_rate=min(rates),
            cpu_us=min(p.cpu_seconds / p.samples for p in found) * 1e6,
            peak_bytes=max(p.peak_bytes for p in found),
            passes=len(found),
            complete=all(p.complete for p in found),
        )


@dataclass(frozen=True, slots=True)
class Contest:
    """All contenders over one dataset."""

    data: Dataset
    runners: Sequence[Runner]

    @property
    def batch_sizes(self) -> list[int]:
        """Largest first."""
        return sorted({p.batch_size for r in self.runners for p in r.passes}, reverse=True)

    def fastest(self, kind: Kind, batch_size: int) -> tuple[Runner, Summary] | None:
        """Who of a kind has the highest median."""
        found = [(r, r.summary(batch_size)) for r in self.runners if r.entry.kind is kind]
        measured = [(runner, summary) for runner, summary in found if summary is not None]
        return max(measured, key=lambda pair: pair[1].rate, default=None)

    def ratio(self, summary: Summary, batch_size: int) -> float | None:
        """A rate against the limit's."""
        limit = self.fastest(Kind.LIMIT, batch_size)
        return summary.rate / limit[1].rate if limit else None

    def targets(self) -> list[Target]:
        """At least nine tenths of the limit, and ahead of every peer."""
        return [t for size in self.batch_sizes for t in self._targets_at(size)]

    def _targets_at(self, batch_size: int) -> Iterable[Target]:
        what = f"{self.data.format}, {batch_size}"
        peer = self.fastest(Kind.PEER, batch_size)
        for runner in self.runners:
            ours = runner.summary(batch_size)
            if runner.entry.kind is not Kind.STRATA or ours is None:
                continue
            ratio = self.ratio(ours, batch_size)
            name = f"{what}: {runner.entry.name}"
            if ratio is not None:
                met = ratio >= LEAST_OF_LIMIT
                wanted = f"≥ {LEAST_OF_LIMIT:.0%} of the limit"
                yield Target(name, wanted, f"{ratio:.0%}", met)
            if peer is not None:
                ahead = ours.rate / peer[1].rate
                yield Target(name, "over every peer", f"{ahead:.2f}×", ahead > 1)


@dataclass(frozen=True, slots=True)
class Results:
    """One run of the benchmark."""

    environment: Mapping[str, object]
    assignments: Sequence[Assigned] = ()
    contests: Sequence[Contest] = ()
    resumed: Sequence[Resumed] = ()
    resume_problem: str = ""
    """Why a library's resume could not be measured."""

    def targets(self) -> list[Target]:
        """Every target whose measurement was made."""
        return [
            *self._assignment_targets(),
            *(target for contest in self.contests for target in contest.targets()),
            *self._resume_targets(),
        ]

    def failures(self) -> list[Runner]:
        """Contenders that could not be measured."""
        return [r for contest in self.contests for r in contest.runners if r.error]

    def _assignment_targets(self) -> Iterable[Target]:
        for found in self.assignments:
            if found.algorithm == "slot table" and found.shape == TARGET_SHAPE:
                workers, shards = TARGET_SHAPE
                name = f"{workers:,} workers × {shards:,} shards"
                cold, warm = found.cold_ms.median, max(found.join_ms.median, found.death_ms.median)
                yield Target(f"{name}, cold", f"< {COLD_MS:g} ms", f"{cold:.1f} ms", cold < COLD_MS)
                yield Target(f"{name}, warm", f"< {WARM_MS:g} ms", f"{warm:.2f} ms", warm < WARM_MS)

    def _resume_targets(self) -> Iterable[Target]:
        for found in self.resumed:
            if found.who == "Strata" and found.samples == RESUME_SAMPLES:
                took = found.total_ms.median
                name = f"resume at {found.samples:.0e} samples, {found.order}".replace("e+0", "e")
                yield Target(name, f"< {RESUME_MS:g} ms", f"{took:.0f} ms", took < RESUME_MS)
