"""One h2load process per worker: h2load has one body, and workers differ.

A crowd shows what the workers of a job see: each has a connection and one call in flight.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .load import RUN_TIMEOUT, LoadError, Printout, Request, Shape, command, read_log
from .samples import Microseconds, Sample, percentiles_ms
from .servers import Server, Usage, metered
from .tools import Tools

ALONE = Shape(connections=1, streams=1)
WARM_UP_PART = 5
"""One round in so many is warm-up: processes start one after another. The last round is left out
too: they end one after another."""
START_SECONDS = 0.02
"""What starting one process of a free crowd takes, at most, while the others run."""
STRAGGLERS = 5
"""Per cent of a free crowd that may start late or end early."""


@dataclass(frozen=True, slots=True)
class Crowd:
    """What each process of a crowd saw."""

    starts: Sequence[Microseconds]
    durations: Sequence[Microseconds]
    failed: int
    usage: Usage

    def sample(self, rate: float, durations: Microseconds) -> Sample:
        """The crowd's calls as one measurement."""
        p50, p99 = percentiles_ms(durations)
        calls = sum(len(seen) for seen in self.starts)
        return Sample(
            rate=float(rate),
            p50_ms=p50,
            p99_ms=p99,
            calls=calls,
            failed=self.failed,
            server_cpu_us=self.usage.server_seconds / calls * 1e6,
            server_share=self.usage.server_share,
            foreign_share=self.usage.foreign_share,
            load_share=self.usage.load_share,
        )


def run_barriers(
    tools: Tools,
    server: Server,
    bodies: Sequence[bytes],
    rounds: int,
    reply_bytes: int,
    scratch: Path,
) -> Sample:
    """Barriers per second of workers that meet `rounds` times; a body is a worker's arrival.

    Each worker must receive `reply_bytes` in all; otherwise all its calls count as failed.
    """

    def failed(printout: Printout, calls: int) -> int:
        whole = calls == rounds == printout.succeeded and printout.data_bytes == reply_bytes
        return 0 if whole else rounds

    limit = ("-n", str(rounds))
    crowd = _run(tools, server, "WaitBarrier", bodies, limit, failed, scratch)
    starts, durations = np.stack(crowd.starts), np.stack(crowd.durations)
    ends = (starts + durations).max(axis=0)
    first, last = max(1, rounds // WARM_UP_PART), rounds - 1
    seconds = (ends[last - 1] - ends[first - 1]) / 1e6
    return crowd.sample((last - first) / seconds, durations[:, first:last])


def run_freely(
    tools: Tools, server: Server, request: Request, size: int, seconds: float, scratch: Path
) -> Sample:
    """Calls per second of `size` processes that do not wait for each other, once they all run."""

    def failed(printout: Printout, calls: int) -> int:
        return max(0, calls - printout.data_bytes // request.reply_bytes)

    limit = ("-D", f"{seconds + size * START_SECONDS:.0f}")
    bodies = [request.body] * size
    crowd = _run(tools, server, request.method, bodies, limit, failed, scratch)
    begun = [starts[0] for starts in crowd.starts]
    ended = [s[-1] + d[-1] for s, d in zip(crowd.starts, crowd.durations, strict=True)]
    since, until = np.percentile(begun, 100 - STRAGGLERS), np.percentile(ended, STRAGGLERS)
    starts, durations = np.concatenate(crowd.starts), np.concatenate(crowd.durations)
    inside = (starts >= since) & (starts + durations <= until)
    if not inside.any():
        raise LoadError("the processes of a crowd never ran at the same time: is the machine busy?")
    return crowd.sample(inside.sum() / (until - since) * 1e6, durations[inside])


def _run(
    tools: Tools,
    server: Server,
    method: str,
    bodies: Sequence[bytes],
    limit: tuple[str, str],
    failed: Callable[[Printout, int], int],
    scratch: Path,
) -> Crowd:
    folder = scratch / f"crowd-{time.monotonic_ns()}"
    folder.mkdir()
    processes: list[subprocess.Popen[bytes]] = []
    with metered(server, tools) as usage:
        try:
            for index, body in enumerate(bodies):
                processes.append(_spawn(tools, server, method, body, limit, folder, index))
            _wait(processes)
        finally:
            _end(processes)
    everyone = range(len(bodies))
    printouts = [Printout.parse(folder.joinpath(f"{i}.out").read_text()) for i in everyone]
    logs = [read_log(folder / f"{i}.log") for i in everyone]
    shutil.rmtree(folder)
    return Crowd(
        starts=[starts for starts, _ in logs],
        durations=[durations for _, durations in logs],
        failed=sum(failed(p, len(log[0])) for p, log in zip(printouts, logs, strict=True)),
        usage=usage,
    )


def _spawn(
    tools: Tools,
    server: Server,
    method: str,
    body: bytes,
    limit: tuple[str, str],
    folder: Path,
    index: int,
) -> subprocess.Popen[bytes]:
    body_file, log = folder / f"{index}.body", folder / f"{index}.log"
    body_file.write_bytes(body)
    with folder.joinpath(f"{index}.out").open("wb") as out:
        return subprocess.Popen(
            command(tools, server, method, body_file, log, limit, ALONE),
            stdout=out,
            stderr=subprocess.STDOUT,
        )


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + RUN_TIMEOUT
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired as exc:
            raise LoadError(f"a crowd did not finish within {RUN_TIMEOUT:.0f} s") from exc


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()
