"""What a benchmark measures: turns and their statistics, in the shape that ``--json`` prints."""

from __future__ import annotations

import math
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, Self, TypeAlias, TypeVar

import msgspec
import psutil

from .._background import usable_cores
from .._version import __version__

SCHEMA = 1
PACKAGES = ("grpcio", "numpy", "obstore", "pyarrow", "pygrpc-native", "uvloop", "xxhash")
BUSY_SHARE = 0.5
"""A load average above this share of all cores means that something else is running."""
Unit = Literal["bytes", "calls", "samples"]
Announce: TypeAlias = Callable[[str], None]
"""Called with what is being measured."""
Fact: TypeAlias = str | int | float
T = TypeVar("T")

_DIGITS = 7
"""Of seconds: clocks are no finer."""


class BenchReport(msgspec.Struct, frozen=True):
    """The machine, and each part that was measured."""

    started_at: float
    """Seconds since 1970."""
    machine: MachineInfo
    sections: list[Section]
    skipped: dict[str, str]
    """Parts that could not be measured here, each with the reason."""
    schema: int = SCHEMA


class Measure(msgspec.Struct, frozen=True):
    """One thing that was measured in every round."""

    name: str
    unit: Unit
    limit: str
    """The measure that it is compared with; empty for a limit, or where there is none."""
    seconds: list[float]
    """Each turn, in the order of the rounds."""
    amounts: list[int]
    """How many units each turn moved; 0: it moves none."""
    bytes_each: float
    """How many bytes one unit has; 0 where it has none."""
    call_seconds: list[float]
    """Each single call, where a turn consists of calls."""
    median_seconds: float
    least_seconds: float
    longest_seconds: float
    per_second: float | None
    """Units per second, by the median time per unit."""
    of_limit: float | None
    """The rate as a fraction of the limit's in the same round, the median of all rounds."""
    call_p50_seconds: float | None
    call_p99_seconds: float | None


class Section(msgspec.Struct, frozen=True):
    """One part: checkpoints, coordinator or data."""

    name: str
    place: str
    """The folder, URL or files that were measured."""
    facts: dict[str, Fact]
    """How it was measured."""
    measures: list[Measure]
    notes: list[str]
    """How to read the numbers."""


class Times(msgspec.Struct, frozen=True):
    """The median and the extremes of repeated measurements."""

    median: float
    best: float
    worst: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """``values`` must not be empty."""
        return cls(statistics.median(values), min(values), max(values))

    @property
    def spread(self) -> float:
        """The difference between worst and best, relative to the median."""
        return (self.worst - self.best) / self.median


class Series:
    """Collects the turns of one measure."""

    def __init__(self, name: str, unit: Unit, limit: str = "", bytes_each: float = 0.0) -> None:
        self.name = name
        self._unit: Unit = unit
        self._limit = limit
        self._bytes_each = bytes_each
        self._seconds: list[float] = []
        self._amounts: list[int] = []
        self._calls: list[float] = []

    def add(self, seconds: float, amount: int = 0, calls: Iterable[float] = ()) -> None:
        """Record a turn."""
        self._seconds.append(round(seconds, _DIGITS))
        self._amounts.append(amount)
        self._calls += (round(call, _DIGITS) for call in calls)

    @property
    def rates(self) -> list[float]:
        """Units per second of each turn."""
        pairs = zip(self._seconds, self._amounts, strict=True)
        return [amount / max(seconds, 10**-_DIGITS) for seconds, amount in pairs if amount]

    def result(self, limits: dict[str, Series]) -> Measure:
        """The statistics of all turns, beside those of the limit."""
        rates = self.rates
        limit = limits[self._limit].rates if self._limit else []
        ratios = [mine / most for mine, most in zip(rates, limit, strict=False)]
        times = Times.of(self._seconds)
        return Measure(
            name=self.name,
            unit=self._unit,
            limit=self._limit,
            seconds=self._seconds,
            amounts=self._amounts,
            bytes_each=self._bytes_each,
            call_seconds=self._calls,
            median_seconds=times.median,
            least_seconds=times.best,
            longest_seconds=times.worst,
            # By the time of a unit: of an even number of turns the median of rates is another one.
            per_second=1 / statistics.median(1 / rate for rate in rates) if rates else None,
            of_limit=statistics.median(ratios) if ratios else None,
            call_p50_seconds=percentile(self._calls, 50),
            call_p99_seconds=percentile(self._calls, 99),
        )


def results(series: Sequence[Series]) -> list[Measure]:
    """All measures, in order."""
    by_name = {one.name: one for one in series}
    return [one.result(by_name) for one in series]


def in_turn(items: Sequence[T], number: int, rounds: int = 0) -> list[T]:
    """The order of round ``number`` (from 0): another item is first in each round."""
    first = number * len(items) // rounds if rounds else number % len(items)
    return [*items[first:], *items[:first]]


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The smallest value that at least ``percent`` of all values do not exceed."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


class MachineInfo(msgspec.Struct, frozen=True):
    """This machine, and how busy it was before anything was measured."""

    system: str
    processor: str
    cores: int
    usable_cores: int
    """Cores that this process may use."""
    memory_bytes: int
    available_bytes: int
    python: str
    strata: str
    packages: dict[str, str]
    load_average: list[float]
    """Of the last 1, 5 and 15 minutes; empty where the system has none."""
    busy: bool


def describe(packages: Iterable[str] = PACKAGES) -> MachineInfo:
    """Describe this machine, and the versions of ``packages`` that are installed."""
    cores = os.cpu_count() or 1
    memory = psutil.virtual_memory()
    load: list[float] = []
    with suppress(OSError):
        load = [round(each, 2) for each in os.getloadavg()]
    return MachineInfo(
        system=f"{platform.system()} {platform.release()}",
        processor=_processor(),
        cores=cores,
        usable_cores=usable_cores(),
        memory_bytes=memory.total,
        available_bytes=memory.available,
        python=platform.python_version(),
        strata=__version__,
        packages={name: number for name in packages if (number := package_version(name))},
        load_average=load,
        busy=is_busy(load, cores),
    )


def is_busy(load_average: list[float], cores: int) -> bool:
    """Whether the load of the last minute shows that others use the machine."""
    return bool(load_average) and load_average[0] > cores * BUSY_SHARE


def package_version(package: str) -> str:
    """The version that is installed; empty when none is."""
    with suppress(PackageNotFoundError):
        return version(package)
    return ""


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
