"""What was measured: every single value, and what they come to."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeAlias

import msgspec

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
