"""Workers of one process that all call at once, and bare calls that do next to nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from .._sync_bridge import io, wait_for
from ..client import TrainingOrchestrator, WorkerConfig
from ..errors import ConnectionError
from ..rpc.channel import target_of
from ..rpc.gen import coordinator_pb2 as pb
from ..rpc.methods import METHODS

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
