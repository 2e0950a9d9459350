"""A small gRPC client that prepares what load generators need: workers, datasets, checks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf.message import Message

from dtruntime.rpc.gen import coordinator_pb2 as pb
from dtruntime.rpc.methods import METHODS

from . import messages
from .messages import Worker

IN_FLIGHT = 128
CALL_TIMEOUT = 120.0


class Client:
    """Calls to one server; nothing is retried."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel

    def begin(self, method: str, request: Message, timeout: float = CALL_TIMEOUT) -> Any:
        """Begin a call; returns its future."""
        known = METHODS[method]
        stub = self._channel.unary_unary(
            known.path,
            request_serializer=known.request.SerializeToString,
            response_deserializer=known.reply.FromString,
        )
        return stub.future(request, timeout=timeout)

    def call(self, method: str, request: Message, timeout: float = CALL_TIMEOUT) -> Any:
        """One call."""
        return self.begin(method, request, timeout).result()

    def call_all(self, method: str, requests: Iterable[Message]) -> list[Any]:
        """Many calls, some at a time; replies in the order of the requests."""
        replies: list[Any] = []
        in_flight: deque[Any] = deque()
        for request in requests:
            if len(in_flight) == IN_FLIGHT:
                replies.append(in_flight.popleft().result())
            in_flight.append(self.begin(method, request))
        replies.extend(future.result() for future in in_flight)
        return replies

    def live_workers(self, job: str) -> int:
        """How many members a job has."""
        members: int = self.call("GetStatus", pb.StatusRequest(job=job, limit=1)).live_workers
        return members

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
        replies = self.call_all("RegisterWorker", requests)
        workers = [Worker(reply.worker_id, reply.incarnation) for reply in replies]
        return workers, max(reply.generation for reply in replies)

    def beat(self, job: str, workers: Iterable[Worker]) -> list[pb.HeartbeatResponse]:
        """One heartbeat with resources from each worker."""
        return self.call_all("Heartbeat", (messages.heartbeat(job, worker) for worker in workers))


@contextmanager
def connect(address: str) -> Iterator[Client]:
    """A client of the server at `address`, for the length of a block."""
    with grpc.insecure_channel(address.removeprefix("http://")) as channel:
        yield Client(channel)
