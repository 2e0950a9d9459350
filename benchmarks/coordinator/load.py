"""h2load: one process that repeats one request, and what it reports."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from . import messages
from .samples import Microseconds, Sample, percentiles_ms
from .servers import Server, metered
from .tools import Tools

HEADERS = ("-H", "content-type: application/grpc", "-H", "te: trailers")
RUN_TIMEOUT = 300.0

_REQUESTS = re.compile(r"requests: (\d+) total, .* (\d+) succeeded,")
_RATE = re.compile(r"finished in [^,]+, ([\d.]+) req/s")
_DATA = re.compile(r"traffic: .*\((\d+)\) data")


class LoadError(Exception):
    """A load generator did not do its work."""


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
        """Read h2load's output; raises `LoadError` when it is not complete."""
        requests, rate, data = (p.search(text) for p in (_REQUESTS, _RATE, _DATA))
        if not (requests and rate and data):
            raise LoadError(f"h2load gave no result:\n{text[-2000:]}")
        return cls(
            rate=float(rate[1]),
            total=int(requests[1]),
            succeeded=int(requests[2]),
            data_bytes=int(data[1]),
        )

    def failed(self, reply_bytes: int) -> int:
        """Calls without a complete reply: h2load calls a gRPC error a success, but an error
        carries no data."""
        answered = min(self.succeeded, self.data_bytes // reply_bytes)
        return self.total - answered


def command(
    tools: Tools,
    server: Server,
    method: str,
    body: Path,
    log: Path,
    limit: tuple[str, str],
    shape: Shape,
) -> list[str]:
    """The h2load command that repeats the framed message in `body` until `limit`."""
    return tools.on_load_cores(
        tools.h2load,
        *HEADERS,
        *("-d", str(body)),
        *("-c", str(shape.connections), "-m", str(shape.streams)),
        *limit,
        f"--log-file={log}",
        f"http://{server.address}{messages.path(method)}",
    )


def run(
    tools: Tools, server: Server, request: Request, shape: Shape, count: int, scratch: Path
) -> Sample:
    """Send a request `count` times from one h2load process."""
    body, log = scratch / "body", scratch / "requests.log"
    body.write_bytes(request.body)
    log.unlink(missing_ok=True)
    with metered(server, tools) as usage:
        finished = subprocess.run(
            command(tools, server, request.method, body, log, ("-n", str(count)), shape),
            capture_output=True,
            text=True,
            timeout=RUN_TIMEOUT,
        )
    printout = Printout.parse(finished.stdout + finished.stderr)
    _, latencies = read_log(log)
    p50, p99 = percentiles_ms(latencies)
    return Sample(
        rate=printout.rate,
        p50_ms=p50,
        p99_ms=p99,
        calls=count,
        failed=printout.failed(request.reply_bytes),
        server_cpu_us=usage.server_seconds / count * 1e6,
        server_share=usage.server_share,
        foreign_share=usage.foreign_share,
        load_share=usage.load_share,
    )


def read_log(log: Path) -> tuple[Microseconds, Microseconds]:
    """Start times and durations of the requests in an h2load log, in microseconds."""
    if not log.stat().st_size:
        raise LoadError(f"h2load logged no request in {log.name}")
    rows = np.loadtxt(log, ndmin=2)
    return rows[:, 0], rows[:, 2]
