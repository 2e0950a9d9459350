"""h2load: one process that repeats one request, or one for each worker, and what it reports.

h2load has one request body, and workers differ: a crowd of processes shows what the workers of a
job see, each with a connection and one call in flight.
"""

from __future__ import annotations

import re
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dtruntime.rpc.methods import METHODS

from ..harness import BenchmarkError
from .servers import Server, Tools, Usage, metered

HEADERS = ("-H", "content-type: application/grpc", "-H", "te: trailers")
RUN_TIMEOUT = 300.0
WARM_UP_PART = 5
"""One round of barriers in so many is warm-up: processes start one after another. The last round
is left out too: they end one after another."""
START_SECONDS = 0.02
"""What starting one process of a free crowd takes, at most, while the others run."""
STRAGGLERS = 5
"""Per cent of a free crowd that may start late or end early."""
ATTEMPTS = 2
DISTURBED = 0.15

_REQUESTS = re.compile(r"requests: (\d+) total, .* (\d+) succeeded,")
_RATE = re.compile(r"finished in [^,]+, ([\d.]+) req/s")
_DATA = re.compile(r"traffic: .*\((\d+)\) data")

Microseconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sample:
    """One run against one server."""

    rate: float
    """Completed operations per second."""
    p50_ms: float
    p99_ms: float
    server_cpu_us: float
    """CPU time the server spent per call, in microseconds."""
    server_share: float
    """Part of its cores that the server used."""
    load_share: float
    """Part of its cores that the generator used: near 1, it is the limit itself."""
    foreign_share: float
    """Part of the server's cores or of the load's that other processes took meanwhile."""
    calls: int
    """Calls sent; a barrier of n is n of them."""
    failed: int
    """Calls that the generator lost, or that carried no complete reply."""


@dataclass(frozen=True, slots=True)
class Summary(Sample):
    """Medians over the runs against one server; calls and failures add up."""

    lowest_rate: float
    highest_rate: float
    runs: int


def summarize(samples: Sequence[Sample]) -> Summary:
    """The median of each figure."""
    columns = {name: [getattr(s, name) for s in samples] for name in asdict(samples[0])}
    added = {name: sum(columns.pop(name)) for name in ("calls", "failed")}
    medians = {name: statistics.median(values) for name, values in columns.items()}
    rates = columns["rate"]
    extremes = {"lowest_rate": min(rates), "highest_rate": max(rates)}
    return Summary(**medians, **added, **extremes, runs=len(samples))


def _sample(
    rate: float, latencies: Microseconds, usage: Usage, *, calls: int, failed: int
) -> Sample:
    p50, p99 = np.percentile(latencies / 1000.0, [50, 99])
    return Sample(
        rate=float(rate),
        p50_ms=float(p50),
        p99_ms=float(p99),
        server_cpu_us=usage.server_seconds / calls * 1e6,
        server_share=usage.server_share,
        load_share=usage.load_share,
        foreign_share=usage.foreign_share,
        calls=calls,
        failed=failed,
    )


def least_disturbed(measure: Callable[[], Sample]) -> Sample:
    """Measure once more when other processes used the cores meanwhile."""
    samples: list[Sample] = []
    while len(samples) < ATTEMPTS:
        samples.append(measure())
        if samples[-1].foreign_share < DISTURBED:
            break
    return min(samples, key=lambda sample: sample.foreign_share)


@dataclass(frozen=True, slots=True)
class Shape:
    """How many calls are in flight: connections, and calls on each."""

    connections: int
    streams: int

    @property
    def in_flight(self) -> int:
        """Calls that wait for an answer at any time."""
        return self.connections * self.streams


SATURATING = Shape(connections=8, streams=16)
LIGHT = Shape(connections=8, streams=1)
ALONE = Shape(connections=1, streams=1)


@dataclass(frozen=True, slots=True)
class Request:
    """What is sent, and how many data bytes each reply has when it is not an error."""

    method: str
    body: bytes
    reply_bytes: int
    """The least a good reply has; exact for operations whose replies are all alike."""


@dataclass(frozen=True, slots=True)
class Printout:
    """What h2load prints at the end."""

    rate: float
    total: int
    succeeded: int
    data_bytes: int

    @classmethod
    def parse(cls, text: str) -> Printout:
        """Read h2load's output; raises `BenchmarkError` when it is not complete."""
        requests, rate, data = (p.search(text) for p in (_REQUESTS, _RATE, _DATA))
        if not (requests and rate and data):
            raise BenchmarkError(f"h2load gave no result:\n{text[-2000:]}")
        return cls(float(rate[1]), int(requests[1]), int(requests[2]), int(data[1]))


@dataclass(frozen=True, slots=True)
class Generator:
    """h2load against one server."""

    tools: Tools
    server: Server
    scratch: Path

    def repeat(self, request: Request, shape: Shape, count: int) -> Sample:
        """Send a request `count` times from one process."""
        body, log = self.scratch / "body", self.scratch / "requests.log"
        body.write_bytes(request.body)
        log.unlink(missing_ok=True)
        command = self._command(request.method, body, log, ("-n", str(count)), shape)
        with metered(self.server, self.tools) as usage:
            done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT)
        printout = Printout.parse(done.stdout + done.stderr)
        # h2load calls a gRPC error a success, but an error carries no data.
        answered = min(printout.succeeded, printout.data_bytes // request.reply_bytes)
        failed = printout.total - answered
        return _sample(printout.rate, _read_log(log)[1], usage, calls=count, failed=failed)

    def barriers(self, bodies: Sequence[bytes], rounds: int, reply_bytes: int) -> Sample:
        """Barriers per second of workers that meet `rounds` times; a body is a worker's arrival.

        Each worker must receive `reply_bytes` in all; otherwise all its calls count as failed.
        """
        crowd = self._crowd("WaitBarrier", bodies, ("-n", str(rounds)))
        failed = 0
        for printout, calls in zip(crowd.printouts, crowd.calls, strict=True):
            whole = calls == rounds == printout.succeeded and printout.data_bytes == reply_bytes
            failed += 0 if whole else rounds
        starts, durations = np.stack(crowd.starts), np.stack(crowd.durations)
        ends = (starts + durations).max(axis=0)
        first, last = max(1, rounds // WARM_UP_PART), rounds - 1
        rate = (last - first) / (ends[last - 1] - ends[first - 1]) * 1e6
        calls = sum(crowd.calls)
        return _sample(rate, durations[:, first:last], crowd.usage, calls=calls, failed=failed)

    def freely(self, request: Request, size: int, seconds: float) -> Sample:
        """Calls per second of `size` processes that do not wait for each other, once all run."""
        limit = ("-D", f"{seconds + size * START_SECONDS:.0f}")
        crowd = self._crowd(request.method, [request.body] * size, limit)
        failed = 0
        for printout, calls in zip(crowd.printouts, crowd.calls, strict=True):
            failed += max(0, calls - printout.data_bytes // request.reply_bytes)
        begun = [starts[0] for starts in crowd.starts]
        ended = [s[-1] + d[-1] for s, d in zip(crowd.starts, crowd.durations, strict=True)]
        since, until = np.percentile(begun, 100 - STRAGGLERS), np.percentile(ended, STRAGGLERS)
        starts, durations = np.concatenate(crowd.starts), np.concatenate(crowd.durations)
        inside = (starts >= since) & (starts + durations <= until)
        if not inside.any():
            raise BenchmarkError(
                "the processes of a crowd never ran at the same time: is the machine busy?"
            )
        rate = inside.sum() / (until - since) * 1e6
        calls = sum(crowd.calls)
        return _sample(rate, durations[inside], crowd.usage, calls=calls, failed=failed)

    def _command(
        self, method: str, body: Path, log: Path, limit: tuple[str, str], shape: Shape
    ) -> list[str]:
        """Repeats the framed message in `body` until `limit`."""
        return self.tools.on_load_cores(
            self.tools.h2load,
            *HEADERS,
            *("-d", str(body)),
            *("-c", str(shape.connections), "-m", str(shape.streams)),
            *limit,
            f"--log-file={log}",
            f"http://{self.server.address}{METHODS[method].path}",
        )

    def _crowd(self, method: str, bodies: Sequence[bytes], limit: tuple[str, str]) -> _Crowd:
        folder = self.scratch / f"crowd-{time.monotonic_ns()}"
        folder.mkdir()
        processes: list[subprocess.Popen[bytes]] = []
        with metered(self.server, self.tools) as usage:
            try:
                for number, content in enumerate(bodies):
                    body, log = folder / f"{number}.body", folder / f"{number}.log"
                    body.write_bytes(content)
                    command = self._command(method, body, log, limit, ALONE)
                    with (folder / f"{number}.out").open("wb") as out:
                        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
                    processes.append(process)
                deadline = time.monotonic() + RUN_TIMEOUT
                for process in processes:
                    process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired as exc:
                message = f"a crowd did not finish within {RUN_TIMEOUT:.0f} s"
                raise BenchmarkError(message) from exc
            finally:
                for process in processes:
                    process.kill()
                    process.wait()
        outs = [folder / f"{number}.out" for number in range(len(bodies))]
        logs = [_read_log(out.with_suffix(".log")) for out in outs]
        crowd = _Crowd(
            printouts=[Printout.parse(out.read_text()) for out in outs],
            starts=[starts for starts, _ in logs],
            durations=[durations for _, durations in logs],
            usage=usage,
        )
        shutil.rmtree(folder)
        return crowd


@dataclass(frozen=True, slots=True)
class _Crowd:
    """What each process of a crowd saw."""

    printouts: Sequence[Printout]
    starts: Sequence[Microseconds]
    durations: Sequence[Microseconds]
    usage: Usage

    @property
    def calls(self) -> list[int]:
        return [len(starts) for starts in self.starts]


def _read_log(log: Path) -> tuple[Microseconds, Microseconds]:
    """Start times and durations of the requests in an h2load log, in microseconds."""
    if not log.stat().st_size:
        raise BenchmarkError(f"h2load logged no request in {log.name}")
    rows = np.loadtxt(log, ndmin=2)
    return rows[:, 0], rows[:, 2]
