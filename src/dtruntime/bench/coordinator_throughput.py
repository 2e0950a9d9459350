"""Registrations, heartbeats and barriers, beside bare calls that do next to nothing."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar

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
from .report import Fact, Section, Series, Tell, in_round, results

JOB_PREFIX = "strata-bench-"
ROUNDS = 5
LIMIT = "bare call"
_KINDS = 4
"""Calls that share a round's time."""
_OWN_INTERVAL_MS = 20_000
_OWN_TIMEOUT_MS = 60_000
_OWN_RATE = 1e9


def bench_coordinator(url: str | None, seconds: float, workers: int, tell: Tell) -> Section:
    """Measure the coordinator at ``url``, or one that is started for it and ended.

    At ``url`` a job with a name of its own remains: coordinators never remove jobs.
    """
    job = f"{JOB_PREFIX}{secrets.token_hex(4)}"
    tell("starting")
    with _coordinator(url) as (address, process), BenchWorkers(address, job, workers) as crew:
        race = _CoordinatorRounds(crew, workers, process)
        for number in range(ROUNDS):
            race.round(seconds / ROUNDS / _KINDS, in_round(tell, number + 1))
    facts: dict[str, Fact] = {
        "workers": workers,
        "rounds": ROUNDS,
        "job": job,
        "client_cores": round(race.client_load, 3),
    }
    notes = ["registering includes connecting", _loads(race)]
    if race.coordinator_load is not None:
        facts["coordinator_cores"] = round(race.coordinator_load, 3)
    if url is not None:
        notes.append(f"job {job} stays at the coordinator: jobs are never removed")
    place = url or "a coordinator of its own on loopback"
    return Section("coordinator", place, facts, results(race.records), notes)


def _loads(race: _CoordinatorRounds) -> str:
    here = f"all workers are in this process, which used {race.client_load:.2f} cores"
    if race.coordinator_load is None:
        return f"{here} during heartbeats"
    return f"{here} during heartbeats, and the coordinator's {race.coordinator_load:.2f}"


class _CoordinatorRounds:
    """Everything in each round, so that all meet the same machine."""

    def __init__(self, crew: BenchWorkers, workers: int, process: psutil.Process | None) -> None:
        self._crew = crew
        self._workers = workers
        self._watch = _Watch(psutil.Process()), None if process is None else _Watch(process)
        self._bare = Series(LIMIT, "calls")
        self._check = Series("health check", "calls", LIMIT)
        self._register = Series("connect and register", "calls", LIMIT)
        self._beat = Series("heartbeat", "calls", LIMIT)
        self._barrier = Series("barrier", "calls", LIMIT)

    @property
    def records(self) -> list[Series]:
        """The limit, and what is compared with it."""
        return [self._bare, self._check, self._register, self._beat, self._barrier]

    @property
    def client_load(self) -> float:
        """How many cores this process used during heartbeats."""
        return self._watch[0].cores

    @property
    def coordinator_load(self) -> float | None:
        """How many cores the coordinator used meanwhile; None where it cannot be seen."""
        return None if self._watch[1] is None else self._watch[1].cores

    def round(self, seconds: float, tell: Tell) -> None:
        """Let all register, call, meet, and leave; each kind of call for some time."""
        tell("registering")
        _note(self._register, self._crew.register())
        tell("bare calls")
        _note(self._bare, self._crew.questions(seconds))
        tell("health checks")
        _note(self._check, self._crew.health_checks(seconds))
        tell("heartbeats")
        with contextlib.ExitStack() as watched:
            for watch in filter(None, self._watch):
                watched.enter_context(watch.watching())
            _note(self._beat, self._crew.heartbeats(seconds))
        tell("barriers")
        _note(self._barrier, self._crew.barriers(seconds))
        self._crew.leave()


class _Watch:
    """Adds up how much processor time a process uses."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self._used = 0.0
        self._passed = 0.0

    @property
    def cores(self) -> float:
        """Processor time by time."""
        return self._used / self._passed if self._passed else 0.0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch it for a while."""
        began, used = time.perf_counter(), self._time()
        yield
        self._passed += time.perf_counter() - began
        self._used += self._time() - used

    def _time(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)


def _note(record: Series, turn: CallTimes) -> None:
    record.add(turn.seconds, len(turn.calls), turn.calls)


@contextlib.contextmanager
def _coordinator(url: str | None) -> Iterator[tuple[str, psutil.Process | None]]:
    """The address of the coordinator, and its process where it is on this machine and ours."""
    if url is not None:
        yield url, None
        return
    with (
        tempfile.TemporaryDirectory(prefix=JOB_PREFIX, ignore_cleanup_errors=True) as folder,
        LocalCoordinator(
            Path(folder),
            heartbeat_interval_ms=_OWN_INTERVAL_MS,
            heartbeat_timeout_ms=_OWN_TIMEOUT_MS,
            # A few workers here do the calls of many.
            settings={"worker_rate_limit": _OWN_RATE, "peer_rate_limit": _OWN_RATE},
        ) as coordinator,
    ):
        yield coordinator.url, psutil.Process(coordinator.pid)


CONNECT_MS = 5_000
BARRIER_MS = 30_000
CALL_SECONDS = 10.0
_OPTIONS = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]

R = TypeVar("R")
Call: TypeAlias = Callable[[], Awaitable[object]]


@dataclass(slots=True)
class CallTimes:
    """Calls for a while: how long, and each single one."""

    seconds: float = 0.0
    calls: list[float] = field(default_factory=list)


class BenchWorkers:
    """Workers with a connection each, and as many connections for bare calls.

    They register anew in every round; leaving the ``with`` block lets them say goodbye.
    """

    def __init__(self, url: str, job: str, workers: int) -> None:
        # All is given, so that no variable of a launcher counts.
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
        self._bare = [_Bare(url, job) for _ in range(workers)]
        self._is_registering = False
        """Whether the coordinator may know members that do not know it yet."""

    def register(self) -> CallTimes:
        """Let all connect and register at once; then each sends its first heartbeat."""
        self._is_registering = True
        turn = self._run(_play([member.register_worker for member in self._members], 0))
        self._is_registering = False
        self._run(_play(self._beats, 0))
        return turn

    def leave(self) -> None:
        """Let all leave the job."""
        self._run(_all([member.deregister_worker for member in self._members]))

    def questions(self, seconds: float) -> CallTimes:
        """Calls to the service that ask for what there is none of."""
        return self._bare_turn([bare.ask for bare in self._bare], seconds)

    def health_checks(self, seconds: float) -> CallTimes:
        """Calls to the standard health service."""
        return self._bare_turn([bare.check for bare in self._bare], seconds)

    def heartbeats(self, seconds: float) -> CallTimes:
        """Heartbeats of all workers."""
        return self._run(_play(self._beats, seconds))

    def barriers(self, seconds: float) -> CallTimes:
        """Barriers that all workers come to."""

        def arrive(member: TrainingOrchestrator) -> Call:
            return lambda: member.wait_barrier("bench", BARRIER_MS)

        return self._run(_play([arrive(member) for member in self._members], seconds))

    async def _say_goodbye(self, member: TrainingOrchestrator) -> None:
        try:
            if self._is_registering:
                # Interrupted, with the answer on its way: who registers again takes its place.
                await member.register_worker()
        finally:
            await member.deregister_worker()

    @property
    def _beats(self) -> list[Call]:
        return [member.heartbeat for member in self._members]

    def _bare_turn(self, calls: Sequence[Call], seconds: float) -> CallTimes:
        self._run(_play(calls, 0))  # the first ones connect
        return self._run(_play(calls, seconds))

    def _run(self, work: Coroutine[Any, Any, R]) -> R:
        return wait_for(io.submit(work))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        goodbyes = [partial(self._say_goodbye, member) for member in self._members]
        self._run(_all([*goodbyes, *(bare.close for bare in self._bare)], tolerant=True))


class _Bare:
    """One connection of gRPC without Strata's client; it is used on the I/O thread."""

    def __init__(self, url: str, job: str) -> None:
        self._url = url
        self._question = pb.JobRequest(job=job)
        self._channel: grpc.aio.Channel | None = None
        self._stubs: tuple[Any, Any] = None, None

    async def ask(self) -> None:
        """Ask for the actions of a job that has none."""
        await self._call(0, self._question)

    async def check(self) -> None:
        """Ask whether the coordinator is well."""
        await self._call(1, health_pb2.HealthCheckRequest())

    async def _call(self, which: int, request: Any) -> None:
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(target_of(self._url), options=_OPTIONS)
            health: Any = health_pb2_grpc.HealthStub(self._channel)  # its stubs name no methods
            self._stubs = _stub(self._channel), health.Check
        try:
            await self._stubs[which](request, timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError as exc:
            raise ConnectionError(
                f"the coordinator at {self._url} does not answer: {exc.details()}"
            ) from exc

    async def close(self) -> None:
        """Close the connection."""
        if self._channel is not None:
            await self._channel.close()


def _stub(channel: grpc.aio.Channel) -> Any:
    method = METHODS["ListActions"]
    return channel.unary_unary(
        method.path,
        request_serializer=method.request.SerializeToString,
        response_deserializer=method.reply.FromString,
    )


async def _play(calls: Sequence[Call], seconds: float) -> CallTimes:
    """Make all calls at once, wait for all, and again until the time is up."""
    turn = CallTimes()
    began = time.perf_counter()
    while True:
        turn.calls += await asyncio.gather(*map(_timed, calls))
        turn.seconds = time.perf_counter() - began
        if turn.seconds >= seconds:
            return turn


async def _timed(call: Call) -> float:
    began = time.perf_counter()
    await call()
    return time.perf_counter() - began


async def _all(calls: Sequence[Call], *, tolerant: bool = False) -> None:
    await asyncio.gather(*(call() for call in calls), return_exceptions=tolerant)
