"""A thousand workers on one coordinator process."""

import asyncio
import itertools
import random
from typing import Any

import grpc
import pytest

from dtruntime.rpc.gen import coordinator_pb2 as pb
from dtruntime.rpc.methods import METHODS
from dtruntime.testing import eventually_async
from tests.support.coordinators import StartCoordinator

WORKERS = 1000
CONNECTIONS = 8
ROUNDS = 3


class Crowd:
    """Many workers in one event loop, over a few connections."""

    def __init__(self, url: str) -> None:
        self._channels = [
            grpc.aio.insecure_channel(
                url.removeprefix("http://"), options=[("grpc.use_local_subchannel_pool", 1)]
            )
            for _ in range(CONNECTIONS)
        ]
        self._turn = itertools.cycle(self._channels)
        self.members: list[pb.WorkerRegistration] = []
        self.heard: set[int] = set()
        """Ranks whose heartbeats were answered."""

    async def call(self, method: str, request: Any) -> Any:
        known = METHODS[method]
        stub = next(self._turn).unary_unary(
            known.path,
            request_serializer=known.request.SerializeToString,
            response_deserializer=known.reply.FromString,
        )
        return await stub(request, timeout=60)

    async def register(self) -> None:
        request = pb.WorkerInfo(world_size=WORKERS, gpu_count=8)
        registrations = [self.call("RegisterWorker", request) for _ in range(WORKERS)]
        self.members = await asyncio.gather(*registrations)

    async def beat(self, member: pb.WorkerRegistration) -> None:
        request = pb.HeartbeatRequest(
            worker_id=member.worker_id,
            incarnation=member.incarnation,
            state=pb.WORKER_STATE_TRAINING,
            resources=pb.ResourceUsage(cpu_percent=50.0, memory_used_bytes=2**30),
            metrics={"loss": 0.5},
        )
        await asyncio.sleep(random.uniform(0.0, 2.0))
        for step in itertools.count():
            request.step = step
            await self.call("Heartbeat", request)
            self.heard.add(member.rank)
            await asyncio.sleep(2.0)

    async def barrier(self, ticket: int) -> list[pb.BarrierResponse]:
        arrivals = [
            self.call(
                "WaitBarrier",
                pb.BarrierRequest(
                    barrier_id="step",
                    worker_id=member.worker_id,
                    incarnation=member.incarnation,
                    generation=member.generation,
                    ticket=ticket,
                    timeout_ms=50_000,
                ),
            )
            for member in self.members
        ]
        return await asyncio.gather(*arrivals)

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()


@pytest.mark.parametrize(
    "transport", ["pygrpc-native", pytest.param("grpc.aio", marks=pytest.mark.long)]
)
async def test_thousand_workers_beat_and_pass_barriers_and_none_is_declared_dead(
    start_coordinator: StartCoordinator, transport: str
) -> None:
    coordinator = await asyncio.to_thread(
        start_coordinator, heartbeat_timeout_ms=20_000, options=["--transport", transport]
    )
    crowd = Crowd(coordinator.url)
    await crowd.register()
    assert sorted(member.rank for member in crowd.members) == list(range(WORKERS))
    async with asyncio.TaskGroup() as group:
        beating = [group.create_task(crowd.beat(member)) for member in crowd.members]
        for ticket in range(1, ROUNDS + 1):
            replies = await crowd.barrier(ticket)
            assert {reply.outcome for reply in replies} == {pb.BARRIER_OUTCOME_COMPLETED}
            assert {reply.round for reply in replies} == {ticket}
            assert {reply.participants for reply in replies} == {WORKERS}
        await eventually_async(lambda: len(crowd.heard) == WORKERS)
        for task in beating:
            task.cancel()
    status = await crowd.call("GetStatus", pb.StatusRequest())
    assert (status.live_workers, status.dead_workers) == (WORKERS, 0)
    assert status.generation == 1
    assert all(worker.HasField("step") for worker in status.workers)
    await crowd.close()
