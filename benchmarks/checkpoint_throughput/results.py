"""Everything one run measured, and how it compares with the targets."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from ..tables import Target
from .contenders.base import Kind
from .profiles import GIB, MIB

STRATA_BYTES, STRATA_TENSORS, STRATA_ARRAYS = "Strata, bytes", "Strata, tensors", "Strata, arrays"
FIO_DIRECT, FIO_BUFFERED = "fio, direct", "fio, buffered + fsync"
LOOP_DIRECT, MEMCPY = "direct pwrite + fsync", "memcpy"
READ_NEW, RAW_OBSTORE, RAW_AGAIN = "read, new memory", "raw obstore", "raw obstore, again"
BYTES_STALL_MS = 1.0
STALL_OF_MEMCPY = 1.3
DURABLE_OF_DISK = 0.9
S3_OF_RAW = 0.95
PEAK_OF_STATE = 1.1
MOST_STORED = {"LoRA-like: adapters, optimizer": 0.05, "bf16, weights": 0.4}


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of repeated measurements."""

    median: float
    best: float
    worst: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self | None:
        """The median and the extremes, if there is anything."""
        return cls(statistics.median(values), min(values), max(values)) if values else None

    @property
    def spread(self) -> float:
        """How far they lie apart, of the median."""
        return (self.worst - self.best) / self.median


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
    """Bytes."""

    def add(self, answer: Mapping[str, Any]) -> None:
        """Take in one turn; its first save stands for itself."""
        self.first_stalls += answer["stalls"][:1]
        self.first_durables += answer["durables"][:1]
        self.stalls += answer["stalls"][1:]
        self.durables += answer["durables"][1:]
        self.warm_loads += answer["warm_loads"]
        self.cold_loads += answer["cold_loads"]
        self.peaks.append(answer["peak_bytes"])

    def median(self, what: str) -> float | None:
        """Of the times of one sort."""
        times = Times.of(getattr(self, what))
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

    environment: Mapping[str, object]
    runners: Sequence[Runner] = ()
    increments: Sequence[Increment] = ()

    def of(self, part: str) -> list[Runner]:
        """What was measured in a part."""
        return [runner for runner in self.runners if runner.part == part]

    def find(self, part: str, name: str, size: int) -> Runner | None:
        """One contender with one size."""
        found = (r for r in self.of(part) if (r.name, r.size) == (name, size))
        return next((r for r in found if not r.error), None)

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
        if runner.error or len(limits) < 2 or len(times) < 2:
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

    def failures(self) -> list[tuple[str, str]]:
        """Who could not be measured, and why."""
        runners = [(f"{r.part}, {r.size // MIB:,} MiB, {r.name}", r.error) for r in self.runners]
        return [
            (name, error)
            for name, error in [*runners, *((i.name, i.error) for i in self.increments)]
            if error
        ]

    def strata_failed(self) -> bool:
        """Whether Strata itself could not be measured where there was room for it."""
        ours = [r for r in self.runners if r.kind is Kind.STRATA]
        failed = [r for r in ours if r.error and not r.error.startswith("skipped")]
        return bool(failed) or any(i.error for i in self.increments)

    def targets(self) -> list[Target]:
        """Every target whose measurement was made."""
        return [
            *self._stall_targets(),
            *self._durable_targets(),
            *self._s3_targets(),
            *self._increment_targets(),
            *self._memory_targets(),
        ]

    def _stall_targets(self) -> Iterable[Target]:
        plain = self.find("local", STRATA_BYTES, GIB)
        if plain is not None and (stall := plain.median("stalls")) is not None:
            wanted = f"< {BYTES_STALL_MS:g} ms"
            met = stall * 1000 < BYTES_STALL_MS
            yield Target("stall, 1 GiB of bytes", wanted, f"{stall * 1000:.2f} ms", met)
        tensors = self.find("local", STRATA_TENSORS, GIB)
        ratio = self.ratio(tensors, self.find("local", MEMCPY, GIB), "stalls")
        if ratio is not None:
            wanted = f"≤ {STALL_OF_MEMCPY:g}× memcpy"
            met = ratio <= STALL_OF_MEMCPY
            yield Target("stall, 1 GiB of tensors", wanted, f"{ratio:.2f}×", met)

    def _durable_targets(self) -> Iterable[Target]:
        local = [self.find("local", name, GIB) for name in (STRATA_BYTES, STRATA_TENSORS)]
        together = [r for r in self.of("writers") if r.kind is Kind.STRATA]
        for runner in [*(r for r in local if r is not None), *together]:
            limit = self.disk_limit(runner)
            ratio = self.ratio(limit, runner, "durables")
            if limit is not None and ratio is not None:
                what = runner.name if runner.part == "local" else f"writers: {runner.writers}"
                wanted = f"≥ {DURABLE_OF_DISK:.0%} of {limit.name}"
                met = ratio >= DURABLE_OF_DISK
                yield Target(f"durable, {what}", wanted, f"{ratio:.0%}", met)

    def _s3_targets(self) -> Iterable[Target]:
        sizes = {r.size for r in self.of("s3")}
        for size in sorted(sizes)[-1:]:
            for name in (STRATA_BYTES, STRATA_TENSORS):
                runner = self.find("s3", name, size)
                for what, title in (("durables", "save"), ("warm_loads", "load")):
                    share = None if runner is None else self.of_raw(runner, what)
                    if share is not None:
                        wanted = f"≥ {S3_OF_RAW:.0%} of raw obstore"
                        met = share.value >= S3_OF_RAW
                        yield Target(f"S3 {title}, {name}", wanted, str(share), met)

    def _increment_targets(self) -> Iterable[Target]:
        for found in self.increments:
            most = MOST_STORED.get(found.name)
            if most is not None and not found.error:
                wanted = f"≤ {most:.0%} of the state"
                yield Target(found.name, wanted, f"{found.share:.1%}", found.share <= most)

    def _memory_targets(self) -> Iterable[Target]:
        for runner in self.of("memory"):
            if runner.kind is Kind.STRATA and runner.peaks:
                share = statistics.median(runner.peaks) / runner.size
                wanted = f"≤ {PEAK_OF_STATE:g}× the state"
                met = share <= PEAK_OF_STATE
                yield Target(f"peak memory, {runner.name}", wanted, f"{share:.2f}×", met)
