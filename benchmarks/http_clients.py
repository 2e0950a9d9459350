"""How much people who watch a coordinator over HTTP slow down its workers' heartbeats.

`python -m benchmarks.http_clients` measures heartbeats with 0, 50 and 200 streams of events open.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dtruntime.bench.report import Announce, in_turn
from dtruntime.bench.tables import table

from .coordinator.load import (
    LIGHT,
    SATURATING,
    Generator,
    Request,
    Sample,
    Shape,
    Summary,
    least_disturbed,
    summarize,
)
from .coordinator.operations import SmallJob
from .coordinator.servers import Kind, Server, Tools, add_cores, find_tools, on_cores, start
from .harness import MEGABYTE, Benchmark, BenchmarkError, Outcome, Target, environment
from .plots import LIMIT, STRATA, STRATA_SECOND, Bar, Panel
from .processes import Process, ProcessFailed

STREAMS = (0, 50, 200)
COLOURS = (LIMIT, STRATA_SECOND, STRATA)
SHAPES: dict[str, Shape] = {"saturating": SATURATING, "light": LIGHT}
SETTLE_SECONDS = 1.0
"""New streams get their snapshots before anything is measured."""
WARM_UP_CALLS = 2000
LEAST = 0.95
"""Of the rate without anybody who watches: what counts as not slowed down."""
PACKAGES = ("dtruntime", "pygrpc-native", "uvicorn", "uvloop")
COLUMNS = {
    "load": "{0.shape}",
    "streams": "{0.streams}",
    "heartbeats/s": "{1.rate:,.0f}",
    "ratio": "{0.rate_ratio:.3f}",
    "p50 ms": "{1.p50_ms:.2f}",
    "p99 ms": "{1.p99_ms:.2f}",
    "p99 ratio": "{0.p99_ratio:.2f}",
    "CPU µs/call": "{1.server_cpu_us:.1f}",
    "events/s": "{0.events_per_second:,.0f}",
    "MB/s": "{0.megabytes_per_second:.2f}",
    "runs": "{1.runs}",
}


@dataclass(frozen=True, slots=True)
class Watched:
    """What was measured with so many streams."""

    sample: Sample
    events_per_second: float
    """Over all streams."""
    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class Case:
    """A load and a number of streams, one measurement per round."""

    shape: str
    streams: int
    rounds: list[Watched]
    alone: list[Watched]
    """The same rounds without streams."""

    @property
    def summary(self) -> Summary:
        """The medians."""
        return summarize([one.sample for one in self.rounds])

    @property
    def rate_ratio(self) -> float:
        """The rate against the one without streams: the median over rounds."""
        return self._ratio("rate")

    @property
    def p99_ratio(self) -> float:
        """The 99th percentile against the one without streams."""
        return self._ratio("p99_ms")

    @property
    def events_per_second(self) -> float:
        """Over all streams."""
        return statistics.median(one.events_per_second for one in self.rounds)

    @property
    def megabytes_per_second(self) -> float:
        """Over all streams."""
        return statistics.median(one.bytes_per_second for one in self.rounds) / MEGABYTE

    def _ratio(self, figure: str) -> float:
        pairs = zip(self.rounds, self.alone, strict=True)
        return statistics.median(
            getattr(one.sample, figure) / getattr(none.sample, figure) for one, none in pairs
        )

    def bar(self) -> Bar:
        """Its bar in the picture."""
        summary, ratio = self.summary, self.rate_ratio
        label = f"{summary.rate:,.0f}/s  {ratio:.1%}  p99 {summary.p99_ms:.1f} ms"
        colour = COLOURS[STREAMS.index(self.streams)]
        return Bar(f"{self.streams} streams", summary.rate, label, colour)

    def document(self) -> dict[str, Any]:
        """Everything, for programs."""
        return {
            "load": self.shape,
            "streams": self.streams,
            "rate_ratio": self.rate_ratio,
            "p99_ratio": self.p99_ratio,
            "summary": asdict(self.summary),
            "rounds": self.rounds,
        }


def measure(options: argparse.Namespace, scratch: Path, announce: Announce) -> Outcome:
    """Measure heartbeats with more and fewer who watch, in turns."""
    rounds, seconds = (2, 1.5) if options.quick else (7, 3.0)
    tools = find_tools(options.server_cores, options.load_cores, ("h2load", "taskset"))
    cores = {"server_cores": tools.server_cores, "load_cores": tools.load_cores}
    here = environment(PACKAGES, **cores)
    announce("starting the coordinator")
    cases: list[Case] = []
    with start(Kind.STRATA_NATIVE, tools, scratch) as server:
        load = Generator(tools, server, scratch)
        request = SmallJob.form(server).heartbeat_load()
        for name, shape in SHAPES.items():
            watched: dict[int, list[Watched]] = {streams: [] for streams in STREAMS}
            load.repeat(request, shape, WARM_UP_CALLS)
            for number in range(rounds):
                for streams in in_turn(STREAMS, number):
                    announce(f"{name}, round {number + 1} of {rounds}: {streams} streams")
                    with _watching(tools, server, streams) as received:
                        sample = _sample(load, request, shape, seconds)
                    watched[streams].append(Watched(sample, received["events"], received["bytes"]))
            cases += [Case(name, streams, of, watched[0]) for streams, of in watched.items()]
    return _outcome(cases, here)


def _sample(load: Generator, request: Request, shape: Shape, seconds: float) -> Sample:
    count = int(load.repeat(request, shape, WARM_UP_CALLS).rate * seconds)
    return least_disturbed(lambda: load.repeat(request, shape, count))


@contextmanager
def _watching(tools: Tools, server: Server, streams: int) -> Iterator[dict[str, float]]:
    """Keep streams open during a block; afterwards there is what came through them a second."""
    received = {"events": 0.0, "bytes": 0.0}
    if not streams:
        time.sleep(SETTLE_SECONDS)
        yield received
        return
    order = {"url": server.http_url, "path": "/api/events?job=small", "streams": streams}
    with on_cores(tools.load_cores):
        readers = Process("benchmarks.event_readers", order)
    try:
        with readers:
            before = readers.ask({})
            began = time.monotonic()
            time.sleep(SETTLE_SECONDS)
            yield received
            seconds, after = time.monotonic() - began, readers.ask({})
    except ProcessFailed as exc:
        raise BenchmarkError(f"{streams} streams of events could not be read: {exc}") from exc
    received |= {name: (after[name] - before[name]) / seconds for name in received}


def _outcome(cases: Sequence[Case], here: dict[str, object]) -> Outcome:
    most = [case for case in cases if case.streams == STREAMS[-1]]
    targets = [
        Target(
            f"heartbeats with {case.streams} streams, {case.shape}",
            f"≥ {LEAST:.0%}",
            f"{case.rate_ratio:.1%}",
            case.rate_ratio >= LEAST,
        )
        for case in most
    ]
    rows = [[text.format(c, c.summary) for text in COLUMNS.values()] for c in cases]
    panels = [
        Panel(f"heartbeats per second, {shape}", [c.bar() for c in cases if c.shape == shape])
        for shape in SHAPES
    ]
    return Outcome(
        tables=[table([*COLUMNS], rows, "Heartbeats while streams of events are read")],
        document={"environment": here, "measured": [case.document() for case in cases]},
        targets=targets,
        panels=panels,
        failed=any(one.sample.failed for case in cases for one in case.rounds),
    )


BENCHMARK = Benchmark(
    name="http_clients",
    description="heartbeats while streams of events are read",
    quick="about a minute",
    measure=measure,
    options=add_cores,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
