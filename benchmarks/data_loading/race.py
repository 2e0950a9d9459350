"""Contenders measured in turns, round after round, each in a process of its own."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from dtruntime.bench.loader_throughput import ROW_BYTES
from dtruntime.bench.report import Announce

from ..harness import MEGABYTE, Entry, Kind, Target
from ..processes import Process, ProcessFailed
from .contenders import ENTRIES
from .dataset import Dataset

GRACE_SECONDS = 120.0
"""How much longer than asked a pass may take before its contender is given up."""
LEAST_OF_LIMIT = 0.9


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
    """The passes of one contender with one batch size."""

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
        """The difference between best and lowest, relative to the median."""
        return (self.best_rate - self.lowest_rate) / self.rate


@dataclass(slots=True)
class Runner:
    """A contender and what was measured of it."""

    entry: Entry
    rows: int = 0
    prepare_seconds: float = 0.0
    version: str = ""
    error: str = ""
    """Why it could not be measured."""
    passes: list[Pass] = field(default_factory=list)

    def summary(self, batch_size: int) -> Summary | None:
        """Its passes with one batch size."""
        passes = [each for each in self.passes if each.batch_size == batch_size]
        if self.error or not passes:
            return None
        rates = [each.rate for each in passes]
        return Summary(
            rate=statistics.median(rates),
            best_rate=max(rates),
            lowest_rate=min(rates),
            cpu_us=min(each.cpu_seconds / each.samples for each in passes) * 1e6,
            peak_bytes=max(each.peak_bytes for each in passes),
            passes=len(passes),
            complete=all(each.complete for each in passes),
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

    def measured(self, batch_size: int) -> list[tuple[Runner, Summary]]:
        """All that could be measured."""
        pairs = [(runner, runner.summary(batch_size)) for runner in self.runners]
        return [(runner, summary) for runner, summary in pairs if summary is not None]

    def fastest(self, kind: Kind, batch_size: int) -> float | None:
        """The highest median rate of a kind."""
        measured = self.measured(batch_size)
        rates = [summary.rate for runner, summary in measured if runner.entry.kind is kind]
        return max(rates, default=None)

    def ratio(self, summary: Summary, batch_size: int) -> float | None:
        """A rate against the limit's."""
        limit = self.fastest(Kind.LIMIT, batch_size)
        return summary.rate / limit if limit else None

    def targets(self) -> Iterable[Target]:
        """At least nine tenths of the limit, and ahead of every peer."""
        for size in self.batch_sizes:
            peer = self.fastest(Kind.PEER, size)
            for runner, ours in self.measured(size):
                if runner.entry.kind is not Kind.STRATA:
                    continue
                name = f"{self.data.format}, {size}: {runner.entry.name}"
                ratio = self.ratio(ours, size)
                if ratio is not None:
                    wanted, met = f"≥ {LEAST_OF_LIMIT:.0%} of the limit", ratio >= LEAST_OF_LIMIT
                    yield Target(name, wanted, f"{ratio:.0%}", met)
                if peer is not None:
                    ahead = ours.rate / peer
                    yield Target(name, "over every peer", f"{ahead:.2f}×", ahead > 1)


@dataclass(frozen=True, slots=True)
class Race:
    """Measures all contenders that read one dataset."""

    python: Path
    data: Dataset
    converted_rows: int
    scratch: Path
    announce: Announce

    def run(self, batch_sizes: Sequence[int], rounds: int, seconds: float) -> Contest:
        """Rounds for each batch size."""
        format = self.data.format
        with ExitStack() as stack:
            runners = [
                self._enter(stack, number)
                for number, entry in enumerate(ENTRIES)
                if format in entry.parts
            ]
            for size in batch_sizes:
                for turn in range(rounds + 1):
                    for runner, process in runners:
                        where = f"{format}, batches of {size}, round {turn} of {rounds}"
                        self.announce(f"{where}: {runner.entry.name}")
                        # The first is a short one that does not count, to warm up.
                        limit = seconds if turn else min(1.0, seconds)
                        result = _measure(process, runner, size, limit)
                        if result is not None and turn:
                            runner.passes.append(result)
        return Contest(self.data, [runner for runner, _ in runners])

    def _enter(self, stack: ExitStack, number: int) -> tuple[Runner, Process]:
        entry = ENTRIES[number]
        self.announce(f"{self.data.format}: preparing {entry.name}")
        order = {
            "entry": number,
            "data": {**asdict(self.data), "folder": str(self.data.folder)},
            "converted_rows": self.converted_rows,
            "scratch": str(self.scratch / f"contender-{number}"),
        }
        process = Process("benchmarks.data_loading.worker", order, self.python)
        stack.enter_context(process)
        runner = Runner(entry)
        try:
            ready = process.ask({})
            runner.rows, runner.version = ready["rows"], ready["version"]
            runner.prepare_seconds = ready["prepare_seconds"]
        except ProcessFailed as exc:
            runner.error = str(exc)
        return runner, process


def _measure(process: Process, runner: Runner, batch_size: int, seconds: float) -> Pass | None:
    if runner.error:
        return None
    question = {"batch_size": batch_size, "seconds": seconds}
    try:
        return Pass(**process.ask(question, seconds + GRACE_SECONDS))
    except ProcessFailed as exc:
        runner.error = str(exc)
        return None
