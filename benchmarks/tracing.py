"""What tracing costs: barriers and heartbeats of one worker, without it and with it, in turns.

`python -m benchmarks.tracing [--rounds N] [--calls N]`
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest import mock

from rich.console import Console

from dtruntime import TrainingOrchestrator
from dtruntime.bench.report import in_turn
from dtruntime.bench.tables import table
from dtruntime.testing import LocalCoordinator

from .coordinator.servers import SETTINGS, SILENCE_MS
from .processes import Handler, Process, serve

RATIOS = (None, 0.0, 0.1, 1.0)
"""None: no collector is configured."""
MEASURES = ("barrier", "barrier CPU", "heartbeat")


class Collector(BaseHTTPRequestHandler):
    """Takes everything and keeps nothing."""

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
    """The address of one."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


@contextmanager
def contender(ratio: float | None, endpoint: str) -> Iterator[Process]:
    """A coordinator and a worker that trace as much as each other; yields the worker."""
    traced = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "STRATA_TRACE_RATIO": str(ratio)}
    with ExitStack() as stack:
        with mock.patch.dict(os.environ):  # which both inherit
            for name, value in traced.items():
                os.environ.pop(name, None)
                if ratio is not None:
                    os.environ[name] = value
            coordinator = LocalCoordinator(heartbeat_timeout_ms=SILENCE_MS, settings=SETTINGS)
            stack.enter_context(coordinator)
            process = Process("benchmarks.tracing", {"url": coordinator.url})
        yield stack.enter_context(process)


def _prepare(order: dict[str, Any]) -> Handler:
    """A worker that makes calls when it is asked to, and says how many seconds each took."""
    url = order["url"]
    worker = TrainingOrchestrator(coordinator_url=url, world_size=1, heartbeat_interval_ms=60_000)
    worker.register()

    def seconds(call: Callable[[], object], calls: int) -> float:
        began = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - began) / calls

    def measure(question: dict[str, int]) -> list[float]:
        calls, cpu = question["calls"], time.process_time()
        barrier = seconds(lambda: worker.barrier("b"), calls)
        cpu = (time.process_time() - cpu) / calls
        return [barrier, cpu, seconds(worker.beat, calls)]

    return measure


def main() -> None:
    """Measure and show."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tracing", description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--calls", type=int, default=100)
    options = parser.parse_args()
    took: dict[float | None, list[list[float]]] = {ratio: [] for ratio in RATIOS}
    with ExitStack() as stack:
        endpoint = stack.enter_context(collector())
        workers = {ratio: stack.enter_context(contender(ratio, endpoint)) for ratio in RATIOS}
        for number in range(options.rounds + 1):
            for ratio in in_turn(RATIOS, number):
                seconds = workers[ratio].ask({"calls": options.calls})
                if number:  # the first warms up
                    took[ratio].append(seconds)
    # The best of many short rounds: a busy machine only adds.
    best = {ratio: [min(times) for times in zip(*of, strict=True)] for ratio, of in took.items()}
    rows = []
    for ratio, times in best.items():
        row = ["off" if ratio is None else f"ratio {ratio:g}"]
        for ours, off in zip(times, best[None], strict=True):
            row += [f"{ours * 1e6:.0f}", f"{ours / off:.2f}"]
        rows.append(row)
    headings = ["tracing", *(text for name in MEASURES for text in (f"{name} µs", "ratio"))]
    Console().print(table(headings, rows, "What tracing costs one worker"))


if __name__ == "__main__":
    serve(_prepare) if sys.argv[1:2] and sys.argv[1].startswith("{") else main()
