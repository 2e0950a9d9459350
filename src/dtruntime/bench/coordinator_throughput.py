"""Registrations, heartbeats and barriers, beside bare calls that do next to nothing."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeAlias

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from .._sync_bridge import io, wait_for
from ..client import TrainingOrchestrator, WorkerConfig
from ..errors import ConnectionError
from ..rpc.channel import target_of
from ..rpc.gen import coordinator_pb2 as pb
from ..rpc.methods import METHODS
from ..testing import LocalCoordinator
from .report import Announce, Fact, Section, Series, results

JOB_PREFIX = "strata-bench-"
ROUNDS = 5
LIMIT = "bare call"
MEASURES = (LIMIT, "health check", "connect and register", "heartbeat", "barrier")
CONNECT_MS = 5_000
BARRIER_MS = 30_000
CALL_SECONDS = 10.0
UNLIMITED: dict[str, str | int | float] = {"worker_rate_limit": 1e9, "peer_rate_limit": 1e9}
"""Settings of a coordinator under load: a few workers make the calls of many."""
_OPTIONS = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]

Call: TypeAlias = Callable[[], Awaitable[object]]


class CallTimes(NamedTuple):
    """Calls for a while: how long, and each single one."""

    seconds: float
    calls: list[float]


def bench_coordinator(url: str | None, seconds: float, workers: int, tell: Announce) -> Section:
    """Measure the coordinator at ``url``, or one that is started for it and ended.

    At ``url`` a job with a name of its own remains, until an operator removes it.
    """
    job = f"{JOB_PREFIX}{secrets.token_hex(4)}"
    series = {name: Series(name, "calls", "" if name == LIMIT else LIMIT) for name in MEASURES}
    tell("starting")
    with _coordinator(url) as (address, process), BenchWorkers(address, job, workers) as crew:
        meters = [CpuMeter(each) for each in (psutil.Process(), process) if each is not None]
        for number in range(1, ROUNDS + 1):
            for name, turn in crew.turns(seconds / ROUNDS / (len(MEASURES) - 1)).items():
                tell(f"round {number}: {name}")
                with contextlib.ExitStack() as metered:
                    for meter in meters if name == "heartbeat" else ():
                        metered.enter_context(meter.running())
                    times = turn()
                series[name].add(times.seconds, len(times.calls), times.calls)
            crew.leave()
    cores = [round(meter.cores, 3) for meter in meters]
    facts: dict[str, Fact] = {"workers": workers, "rounds": ROUNDS, "job": job}
    facts |= zip(("client_cores", "coordinator_cores"), cores, strict=False)
    load = f"all workers are in this process, which used {cores[0]:.2f} cores during heartbeats"
    if process is not None:
        load += f"; the coordinator used {cores[1]:.2f}"
    notes = ["registering includes connecting", load]
    if url is not None:
        notes.append(f"job {job} stays at the coordinator: 'strata jobs rm {job}' removes it")
    place = url or "a coordinator of its own on loopback"
    return Section("coordinator", place, facts, results(list(series.values())), notes)


class CpuMeter:
    """Processor time that a process uses while the meter runs."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self.used = self.elapsed = 0.0

    @property
    def cores(self) -> float:
        """Processor seconds per second."""
        return self.used / self.elapsed if self.elapsed else 0.0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Measure a block; several add up."""
        began, before = time.perf_counter(), self._process.cpu_times()
        yield
        after = self._process.cpu_times()
        self.elapsed += time.perf_counter() - began
        self.used += after.user + after.system - before.user - before.system


@contextlib.contextmanager
def _coordinator(url: str | None) -> Iterator[tuple[str, psutil.Process | None]]:
    """The address of the coordinator, and its process if we started it."""
    if url is not None:
        yield url, None
        return
    with (
        tempfile.TemporaryDirectory(prefix=JOB_PREFIX, ignore_cleanup_errors=True) as folder,
        LocalCoordinator(
            Path(folder),
            heartbeat_interval_ms=20_000,
            heartbeat_timeout_ms=60_000,
            settings=UNLIMITED,
        ) as coordinator,
    ):
        yield coordinator.url, psutil.Process(coordinator.pid)


class BenchWorkers:
    """Workers with a connection each, and as many connections for bare calls.

    They register anew in every round; leaving the ``with`` block deregisters them.
    """

    def __init__(self, url: str, job: str, workers: int) -> None:
        self._url, self._job = url, job
        # Everything is given, so that no variable of a launcher counts.
        self._members = [
            TrainingOrchestrator(
                WorkerConfig(
                    coordinator_url=url,
                    job=job,
                    worker_id=f"bench-{rank}",
                    rank=rank,
                    world_size=workers,
                    attempt=0,
                    connect_timeout_ms=CONNECT_MS,
                    outage_timeout_ms=CONNECT_MS,
                )
            )
            for rank in range(workers)
        ]
        self._bare = wait_for(io.submit(self._open_channels()))
        self._is_registering = False
        """Whether the coordinator may know members that do not know it yet."""

    def turns(self, seconds: float) -> dict[str, Callable[[], CallTimes]]:
        """What to measure in a round, in order; each kind of call but the first for a while."""
        beats: list[Call] = [member.heartbeat for member in self._members]
        barriers = [partial(m.wait_barrier, "bench", BARRIER_MS) for m in self._members]
        return {
            "connect and register": self.register,
            LIMIT: lambda: self._bare_calls([ask for _, ask, _ in self._bare], seconds),
            "health check": lambda: self._bare_calls([check for *_, check in self._bare], seconds),
            "heartbeat": lambda: _run(beats, seconds),
            "barrier": lambda: _run(barriers, seconds),
        }

    def register(self) -> CallTimes:
        """Let all connect and register at once; then each sends its first heartbeat."""
        self._is_registering = True
        times = _run([member.register_worker for member in self._members])
        self._is_registering = False
        _run([member.heartbeat for member in self._members])
        return times

    def leave(self) -> None:
        """Let all leave the job."""
        _run([member.deregister_worker for member in self._members])

    async def _open_channels(self) -> list[tuple[grpc.aio.Channel, Call, Call]]:
        """Connections without Strata: a question that has no answer, and a health check."""
        opened = []
        for _ in self._members:
            channel = grpc.aio.insecure_channel(target_of(self._url), options=_OPTIONS)
            method = METHODS["ListActions"]
            ask = channel.unary_unary(
                method.path,
                request_serializer=method.request.SerializeToString,
                response_deserializer=method.reply.FromString,
            )
            health: Any = health_pb2_grpc.HealthStub(channel)  # its stubs name no methods
            bare: Call = partial(self._bare_call, ask, pb.JobRequest(job=self._job))
            check: Call = partial(self._bare_call, health.Check, health_pb2.HealthCheckRequest())
            opened.append((channel, bare, check))
        return opened

    async def _bare_call(self, stub: Any, request: Any) -> None:
        try:
            await stub(request, timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError as exc:
            raise ConnectionError(
                f"the coordinator at {self._url} does not answer: {exc.details()}"
            ) from exc

    def _bare_calls(self, calls: Sequence[Call], seconds: float) -> CallTimes:
        _run(calls)  # the first ones connect
        return _run(calls, seconds)

    async def _deregister(self, member: TrainingOrchestrator) -> None:
        try:
            if self._is_registering:
                # Interrupted, with the answer on its way: registering again takes its place.
                await member.register_worker()
        finally:
            await member.deregister_worker()

    async def _close(self) -> None:
        ends = [self._deregister(member) for member in self._members]
        closes = [channel.close() for channel, *_ in self._bare]
        await asyncio.gather(*ends, *closes, return_exceptions=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        wait_for(io.submit(self._close()))


def _run(calls: Sequence[Call], seconds: float = 0.0) -> CallTimes:
    """Make all calls at once, wait for all, and again until the time is up."""

    async def timed(call: Call) -> float:
        began = time.perf_counter()
        await call()
        return time.perf_counter() - began

    async def repeat() -> CallTimes:
        times: list[float] = []
        began = time.perf_counter()
        while True:
            times += await asyncio.gather(*map(timed, calls))
            elapsed = time.perf_counter() - began
            if elapsed >= seconds:
                return CallTimes(elapsed, times)

    return wait_for(io.submit(repeat()))
