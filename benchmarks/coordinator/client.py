"""A small client that prepares what the load generators need: workers, datasets, checks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from dtruntime.rpc.gen import coordinator_pb2 as pb

from . import messages
from .messages import Worker

Reply = TypeVar("Reply", bound=Message)

IN_FLIGHT = 128
CALL_TIMEOUT = 60.0


class Client:
    """Calls to one server."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel

    def call(self, method: str, request: Message, reply: type[Reply]) -> Reply:
        """One call."""
        return self.call_all(method, [request], reply)[0]

    def call_all(self, method: str, requests: Iterable[Message], reply: type[Reply]) -> list[Reply]:
        """Many calls, some at a time; replies in the order of the requests."""
        stub: grpc.UnaryUnaryMultiCallable[Message, Reply] = self._channel.unary_unary(
            messages.path(method),
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=reply.FromString,
        )
        replies: list[Reply] = []
        in_flight: deque[grpc.Future[Reply]] = deque()
        for request in requests:
            if len(in_flight) == IN_FLIGHT:
                replies.append(in_flight.popleft().result())
            in_flight.append(stub.future(request, timeout=CALL_TIMEOUT))
        replies.extend(future.result() for future in in_flight)
        return replies

    def server_info(self) -> pb.ServerInfo:
        """What the coordinator says about itself."""
        return self.call("GetServerInfo", pb.ServerInfoRequest(), pb.ServerInfo)

    def live_workers(self, job: str) -> int:
        """How many members a job has."""
        request = pb.StatusRequest(job=job, limit=1)
        return self.call("GetStatus", request, pb.JobStatus).live_workers

    def form_job(self, job: str, size: int, *, fixed: bool) -> tuple[list[Worker], int]:
        """Register `size` workers; returns them in rank order and the job's generation."""
        requests = (
            pb.WorkerInfo(
                worker_id=f"worker-{rank}",
                job=job,
                rank=rank,
                world_size=size if fixed else 0,
                hostname=f"node-{rank // 8}.cluster",
                port=29500 + rank % 8,
                gpu_count=messages.GPUS_PER_WORKER,
                memory_bytes=512 << 30,
                session=f"{job}-{rank}",
                process=f"{4000 + rank}@node-{rank // 8}",
            )
            for rank in range(size)
        )
        replies = self.call_all("RegisterWorker", requests, pb.WorkerRegistration)
        workers = [Worker(reply.worker_id, reply.incarnation) for reply in replies]
        return workers, max(reply.generation for reply in replies)

    def beat(self, job: str, workers: Iterable[Worker], *, gpus: int) -> list[pb.HeartbeatResponse]:
        """One heartbeat with resources from each worker."""
        requests = (messages.heartbeat(job, worker, gpus=gpus) for worker in workers)
        return self.call_all("Heartbeat", requests, pb.HeartbeatResponse)


@contextmanager
def connect(address: str) -> Iterator[Client]:
    """A client of the server at `address`, for the length of a block."""
    with grpc.insecure_channel(address) as channel:
        yield Client(channel)


def wait_until_serving(address: str, timeout: float) -> pb.ServerInfo:
    """Wait for a coordinator to answer; raises `TimeoutError` when it does not."""
    deadline = time.monotonic() + timeout
    with connect(address) as client:
        while True:
            try:
                return client.server_info()
            except grpc.RpcError as exc:
                if exc.code() != grpc.StatusCode.UNAVAILABLE:
                    raise
                if time.monotonic() > deadline:
                    raise TimeoutError(f"nothing answers at {address}") from exc
                time.sleep(0.05)
