"""One run: a coordinator, its job, and rounds with more and fewer who watch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from dtruntime.testing import LocalCoordinator

from .. import machine
from ..coordinator import load
from ..coordinator.load import Request, Shape
from ..coordinator.operations import SmallJob
from ..coordinator.samples import Sample, Summary, summarize
from ..coordinator.servers import Kind, Server
from ..coordinator.tools import SetupError, Tools, core_numbers

STREAMS = (0, 50, 200)
SHAPES: Mapping[str, Shape] = {"saturating": load.SATURATING, "light": load.LIGHT}
SETTINGS: dict[str, str | int | float] = {
    "worker_rate_limit": 1_000_000,
    "peer_rate_limit": 1_000_000,
    "heartbeat_timeout_ms": 3_600_000,
}
SETTLE_SECONDS = 1.0
"""New streams get their snapshots before anything is measured."""
WARM_UP_CALLS = 2000
ATTEMPTS = 2
DISTURBED = 0.15


@dataclass(frozen=True, slots=True)
class Profile:
    """How long a run measures."""

    rounds: int
    seconds: float


FULL = Profile(rounds=7, seconds=3.0)
QUICK = Profile(rounds=2, seconds=1.5)


@dataclass(frozen=True, slots=True)
class Watched:
    """What was measured with so many streams."""

    sample: Sample
    events_per_second: float
    """Over all streams."""
    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class Results:
    """One run of the benchmark."""

    measured: Mapping[tuple[str, int], Sequence[Watched]]
    """By the shape of the load and the number of streams, one per round."""
    environment: Mapping[str, object]

    def summary(self, shape: str, streams: int) -> Summary:
        """The medians."""
        return summarize([one.sample for one in self.measured[shape, streams]])


def run(tools: Tools, profile: Profile, scratch: Path, announce: Callable[[str], None]) -> Results:
    """Measure; ``announce`` is told what is under way."""
    environment = {
        **machine.describe(("dtruntime", "pygrpc-native", "uvicorn", "uvloop")),
        "server_cores": tools.server_cores,
        "load_cores": tools.load_cores,
    }
    measured: dict[tuple[str, int], list[Watched]] = {
        (shape, streams): [] for shape in SHAPES for streams in STREAMS
    }
    announce("starting the coordinator")
    with _coordinator(tools, scratch) as coordinator:
        server = Server(
            Kind.STRATA_NATIVE,
            coordinator.url.removeprefix("http://"),
            psutil.Process(coordinator.pid),
        )
        request = SmallJob.form(server).heartbeat_load()
        for name, shape in SHAPES.items():
            load.run(tools, server, request, shape, WARM_UP_CALLS, scratch)
            for number in range(1, profile.rounds + 1):
                for streams in _in_turn(number):
                    announce(f"{name}, round {number} of {profile.rounds}: {streams} streams")
                    with _watching(tools, coordinator, streams) as told:
                        sample = _sample(tools, server, request, shape, profile.seconds, scratch)
                    measured[name, streams].append(Watched(sample, told["events"], told["bytes"]))
    return Results(measured, environment)


def _in_turn(number: int) -> Sequence[int]:
    """Every other round backwards, so that a machine that gets slower is nobody's fault."""
    return STREAMS if number % 2 else STREAMS[::-1]


def _sample(
    tools: Tools, server: Server, request: Request, shape: Shape, seconds: float, scratch: Path
) -> Sample:
    """Measure; once more when other processes used the cores meanwhile."""
    rate = load.run(tools, server, request, shape, WARM_UP_CALLS, scratch).rate
    samples: list[Sample] = []
    while len(samples) < ATTEMPTS:
        samples.append(load.run(tools, server, request, shape, int(rate * seconds), scratch))
        if samples[-1].foreign_share < DISTURBED:
            break
    return min(samples, key=lambda sample: sample.foreign_share)


@contextmanager
def _coordinator(tools: Tools, scratch: Path) -> Iterator[LocalCoordinator]:
    """A coordinator on the server's cores: it inherits them."""
    coordinator = LocalCoordinator(
        scratch / "data",
        http=True,
        settings=SETTINGS,
        options=["--transport", "pygrpc-native"],
    )
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, core_numbers(tools.server_cores))
    try:
        coordinator.start()
    finally:
        os.sched_setaffinity(0, own)
    try:
        yield coordinator
    finally:
        coordinator.kill()


@contextmanager
def _watching(
    tools: Tools, coordinator: LocalCoordinator, streams: int
) -> Iterator[dict[str, float]]:
    """Keep streams open during a block; afterwards there is what came through them a second."""
    told: dict[str, float] = {"events": 0.0, "bytes": 0.0}
    if not streams:
        time.sleep(SETTLE_SECONDS)
        yield told
        return
    host, _, port = coordinator.http_url.removeprefix("http://").partition(":")
    command = [sys.executable, "-m", f"{__package__}.watchers"]
    process = subprocess.Popen(
        tools.on_load_cores(*command, host, port, "/api/events?job=small", str(streams)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        if process.stdout.readline().strip() != "ready":
            raise SetupError(f"{streams} streams of events could not be opened")
        began = time.monotonic()
        time.sleep(SETTLE_SECONDS)
        yield told
        seconds = time.monotonic() - began
        process.stdin.close()
        received = process.stdout.readline()
        if not received:
            raise SetupError("a stream of events ended while it was read")
        told |= {name: value / seconds for name, value in json.loads(received).items()}
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
