"""Everything that was measured, as ``--json`` prints it."""

from __future__ import annotations

import math
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec
import psutil

from .._background import usable_cores
from .._version import __version__

SCHEMA = 1


class BenchReport(msgspec.Struct, frozen=True):
    """The machine, and each part that was measured."""

    started_at: float
    """Seconds since 1970."""
    machine: MachineInfo
    sections: list[Section]
    skipped: dict[str, str]
    """Parts that could not be measured here, each with the reason."""
    schema: int = SCHEMA


Unit = Literal["bytes", "calls", "samples"]
Tell: TypeAlias = Callable[[str], None]
"""Is told what is being measured."""
Fact: TypeAlias = str | int | float

_DIGITS = 7
"""Of seconds: clocks tell no more."""


class Measure(msgspec.Struct, frozen=True):
    """One thing that was measured in every round."""

    name: str
    unit: Unit
    limit: str
    """The measure that it is compared with; empty when it is none, or a limit itself."""
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
    """Units per second, by the median of the time that each takes."""
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
    """What has to be known to read the numbers."""


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
        """Note a turn."""
        self._seconds.append(round(seconds, _DIGITS))
        self._amounts.append(amount)
        self._calls += (round(call, _DIGITS) for call in calls)

    @property
    def rates(self) -> list[float]:
        """Units per second of each turn."""
        pairs = zip(self._seconds, self._amounts, strict=True)
        return [amount / max(seconds, 10**-_DIGITS) for seconds, amount in pairs if amount]

    def result(self, limits: dict[str, Series]) -> Measure:
        """What the turns come to, beside those of the limit."""
        rates = self.rates
        limit = limits[self._limit].rates if self._limit else []
        ratios = [mine / most for mine, most in zip(rates, limit, strict=False)]
        return Measure(
            name=self.name,
            unit=self._unit,
            limit=self._limit,
            seconds=self._seconds,
            amounts=self._amounts,
            bytes_each=self._bytes_each,
            call_seconds=self._calls,
            median_seconds=statistics.median(self._seconds),
            least_seconds=min(self._seconds),
            longest_seconds=max(self._seconds),
            # By the time of a unit: of an even number of turns the median of rates is another one.
            per_second=1 / statistics.median(1 / rate for rate in rates) if rates else None,
            of_limit=statistics.median(ratios) if ratios else None,
            call_p50_seconds=percentile(self._calls, 50),
            call_p99_seconds=percentile(self._calls, 99),
        )


def in_round(tell: Tell, number: int) -> Tell:
    """Tell also which round it is."""
    return lambda text: tell(f"round {number}: {text}")


def results(records: Sequence[Series]) -> list[Measure]:
    """All measures, in order."""
    limits = {record.name: record for record in records}
    return [record.result(limits) for record in records]


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The least value that so many per cent do not exceed; None when there are none."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


PACKAGES = ("grpcio", "numpy", "obstore", "pyarrow", "pygrpc-native", "uvloop", "xxhash")
BUSY_SHARE = 0.5
"""A load average of more than this share of all cores says that something else is running."""


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


def describe() -> MachineInfo:
    """Look at this machine."""
    cores = os.cpu_count() or 1
    memory = psutil.virtual_memory()
    load = _load_average()
    return MachineInfo(
        system=f"{platform.system()} {platform.release()}",
        processor=_processor(),
        cores=cores,
        usable_cores=usable_cores(),
        memory_bytes=memory.total,
        available_bytes=memory.available,
        python=platform.python_version(),
        strata=__version__,
        packages={name: found for name in PACKAGES if (found := _version(name))},
        load_average=load,
        busy=is_busy(load, cores),
    )


def is_busy(load_average: list[float], cores: int) -> bool:
    """Whether the last minute's load says that others use the machine."""
    return bool(load_average) and load_average[0] > cores * BUSY_SHARE


def _load_average() -> list[float]:
    try:
        return [round(load, 2) for load in os.getloadavg()]
    except OSError:
        return []


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
