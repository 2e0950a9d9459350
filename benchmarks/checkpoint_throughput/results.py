"""Everything one run measured, and how contenders compare."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from dtruntime.bench.report import Times

from ..harness import Kind

MIB, GIB = 2**20, 2**30
STRATA_BYTES, STRATA_TENSORS, STRATA_ARRAYS = "Strata, bytes", "Strata, tensors", "Strata, arrays"
FIO_DIRECT, FIO_BUFFERED = "fio, direct", "fio, buffered + fsync"
LOOP_DIRECT, MEMCPY = "direct pwrite + fsync", "memcpy"
READ_NEW, RAW_OBSTORE, RAW_AGAIN = "read, new memory", "raw obstore", "raw obstore, again"


def title_of(size: int) -> str:
    """A size in words."""
    return f"{size // GIB} GiB" if size >= GIB else f"{size // MIB} MiB"


@dataclass(frozen=True, slots=True)
class Share:
    """How fast something is, of the speed of something else that was measured beside it."""

    value: float
    error: float
    """The standard error of its mean over the rounds."""

    def __str__(self) -> str:
        return f"{100 * self.value:.0f} ±{100 * self.error:.0f}%"


@dataclass(slots=True)
class Runner:
    """A contender with one size, and what was measured of it, in seconds."""

    part: str
    name: str
    kind: Kind
    size: int
    writers: int = 1
    error: str = ""
    """Why it could not be measured."""
    first_stalls: list[float] = field(default_factory=list)
    first_durables: list[float] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    durables: list[float] = field(default_factory=list)
    warm_loads: list[float] = field(default_factory=list)
    cold_loads: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    """Bytes by which memory grew during a first save."""

    def saved(self, answer: Sequence[float], *, is_first: bool) -> None:
        """Take in a save; the first one of a process stands for itself."""
        stall, durable, growth = answer
        if is_first:
            self.first_stalls.append(stall)
            self.first_durables.append(durable)
            self.peaks.append(int(growth))
        else:
            self.stalls.append(stall)
            self.durables.append(durable)

    def times(self, what: str) -> Times | None:
        """The statistics of the times of one sort, if there are any."""
        times = getattr(self, what)
        return Times.of(times) if times else None

    def median(self, what: str) -> float | None:
        """Of the times of one sort."""
        times = self.times(what)
        return None if times is None else times.median

    def mean(self, what: str) -> float | None:
        """Of the times of one sort."""
        times = getattr(self, what)
        return statistics.fmean(times) if times else None

    def rate(self, what: str) -> float | None:
        """Bytes per second."""
        median = self.median(what)
        return None if median is None else self.size / median


@dataclass(frozen=True, slots=True)
class Increment:
    """What saves stored while a model was trained in one way."""

    name: str
    full_bytes: int = 0
    full_seconds: float = 0.0
    written: Sequence[int] = ()
    seconds: Sequence[float] = ()
    stalls: Sequence[float] = ()
    loss: float = 0.0
    error: str = ""

    @property
    def share(self) -> float:
        """Of the whole state, the median."""
        return statistics.median(self.written) / self.full_bytes


@dataclass(frozen=True, slots=True)
class Results:
    """One run of the benchmark."""

    runners: Sequence[Runner] = ()
    increments: Sequence[Increment] = ()

    def of(self, part: str) -> list[Runner]:
        """What was measured in a part."""
        return [runner for runner in self.runners if runner.part == part]

    def sizes(self, part: str) -> list[int]:
        """Those of a part, smallest first."""
        return sorted({runner.size for runner in self.of(part)})

    def find(self, part: str, name: str, size: int) -> Runner | None:
        """One contender with one size."""
        same = (r for r in self.of(part) if (r.name, r.size) == (name, size) and not r.error)
        return next(same, None)

    def ratio(self, one: Runner | None, other: Runner | None, what: str) -> float | None:
        """How many times as long one takes as another, by their medians."""
        if one is None or other is None or one.size != other.size:
            return None
        times = one.median(what), other.median(what)
        return times[0] / times[1] if times[0] and times[1] else None

    def of_raw(self, runner: Runner, what: str) -> Share | None:
        """How fast it was of raw obstore, which took part twice, by all rounds together."""
        raw = [self.find("s3", name, runner.size) for name in (RAW_OBSTORE, RAW_AGAIN)]
        limits = [getattr(limit, what) for limit in raw if limit is not None]
        times: Sequence[float] = getattr(runner, what)
        if runner.part != "s3" or runner.error or len(limits) < 2 or len(times) < 2:
            return None
        between = [statistics.fmean(pair) for pair in zip(*limits, strict=True)]
        ratios = [limit / time for limit, time in zip(between, times, strict=True)]
        error = statistics.stdev(ratios) / math.sqrt(len(ratios))
        return Share(sum(between) / sum(times), error)

    def disk_limit(self, runner: Runner) -> Runner | None:
        """fio, or where there is none the loop of the benchmark's own."""
        for name in (FIO_DIRECT, LOOP_DIRECT):
            for limit in self.of(runner.part):
                same = (limit.name, limit.size, limit.writers)
                if same == (name, runner.size, runner.writers) and limit.durables:
                    return limit
        return None

    def of_disk(self, runner: Runner) -> float | None:
        """How fast it was durable, of what the disk can do."""
        return self.ratio(self.disk_limit(runner), runner, "durables")

    def failures(self) -> list[str]:
        """Who could not be measured, and why."""
        runners = [(f"{r.part}, {r.size // MIB:,} MiB, {r.name}", r.error) for r in self.runners]
        increments = [(each.name, each.error) for each in self.increments]
        return [f"{name}: {error}" for name, error in [*runners, *increments] if error]

    def strata_failed(self) -> bool:
        """Whether Strata itself could not be measured where there was room for it."""
        errors = [r.error for r in self.runners if r.kind is Kind.STRATA]
        errors += [each.error for each in self.increments]
        return any(error and not error.startswith("skipped") for error in errors)
