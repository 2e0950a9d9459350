"""What tracing costs: barriers and heartbeats of one worker, without it and with it, in turns.

`python -m benchmarks.tracing [--rounds N] [--calls N]`
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from rich.console import Console

from dtruntime.testing import LocalCoordinator

from .tables import Row, table

WORKER = """
import json, sys, time
from dtruntime import TrainingOrchestrator

def seconds(call, calls):
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - began) / calls

calls = int(sys.argv[1])
with TrainingOrchestrator(world_size=1, heartbeat_interval_ms=60_000) as worker:
    worker.register()
    for line in sys.stdin:
        cpu = time.process_time()
        took = {"barrier": seconds(lambda: worker.barrier("b"), calls)}
        took["barrier CPU"] = (time.process_time() - cpu) / calls
        took["heartbeat"] = seconds(worker.beat, calls)
        print(json.dumps(took), flush=True)
"""
RATIOS = (None, 0.0, 0.1, 1.0)
"""None: no collector is configured."""
SETTINGS: dict[str, str | int | float] = {
    "worker_rate_limit": 1_000_000,
    "peer_rate_limit": 1_000_000,
    "heartbeat_timeout_ms": 600_000,
}


class Taker(BaseHTTPRequestHandler):
    """A collector that takes everything and keeps nothing."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def collector() -> Iterator[str]:
    """Its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Taker)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


@dataclass
class Contender:
    """A coordinator and a worker that trace as much as each other."""

    ratio: float | None
    process: subprocess.Popen[str]

    def measure(self) -> dict[str, float]:
        """Seconds per call."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(file=self.process.stdin, flush=True)
        measured: dict[str, float] = json.loads(self.process.stdout.readline())
        return measured


@contextmanager
def contender(ratio: float | None, endpoint: str, calls: int) -> Iterator[Contender]:
    """Started with the variables that it needs."""
    traced = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "STRATA_TRACE_RATIO": str(ratio)}
    before = {name: os.environ.pop(name, None) for name in traced}
    if ratio is not None:
        os.environ.update(traced)
    try:
        with LocalCoordinator(heartbeat_interval_ms=1000, settings=SETTINGS) as coordinator:
            process = subprocess.Popen(
                [sys.executable, "-c", WORKER, str(calls)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={**os.environ, "COORDINATOR_URL": coordinator.url},
            )
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
            try:
                yield Contender(ratio, process)
            finally:
                process.kill()
                process.wait()
    finally:
        os.environ.update({name: value for name, value in before.items() if value is not None})


def name_of(ratio: float | None) -> str:
    """As the table calls it."""
    return "off" if ratio is None else f"ratio {ratio:g}"


def main() -> int:
    """Measure and show."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tracing", description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--calls", type=int, default=100)
    options = parser.parse_args()
    took: dict[float | None, list[dict[str, float]]] = {ratio: [] for ratio in RATIOS}
    with ExitStack() as stack:
        endpoint = stack.enter_context(collector())
        contenders = [
            stack.enter_context(contender(ratio, endpoint, options.calls)) for ratio in RATIOS
        ]
        for one in contenders:
            one.measure()
        for number in range(options.rounds):
            for one in contenders if number % 2 else contenders[::-1]:
                took[one.ratio].append(one.measure())
    rows: list[Row] = []
    for ratio, rounds in took.items():
        row: Row = [name_of(ratio)]
        for name in rounds[0]:
            # The best of many short rounds: a busy machine only adds.
            ours, off = (min(one[name] for one in some) for some in (rounds, took[None]))
            row += [f"{ours * 1e6:.0f}", f"{ours / off:.2f}"]
        rows.append(row)
    headings = ["tracing"]
    for name in took[None][0]:
        headings += [f"{name} µs", "ratio"]
    Console().print(table("What tracing costs one worker", headings, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
