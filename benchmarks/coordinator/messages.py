"""Requests as the load generators send them, and the sizes of the replies they must get."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

from google.protobuf.message import Message

from dtruntime.rpc.gen import coordinator_pb2 as pb

SERVICE = "strata.v1.CoordinatorService"
BARRIER_TIMEOUT_MS = 120_000
FRAME_HEADER_BYTES = 5
GPUS_PER_WORKER = 8


@dataclass(frozen=True, slots=True)
class Worker:
    """A registered worker, as every call must name it."""

    worker_id: str
    incarnation: int


def frame(message: Message) -> bytes:
    """The message with gRPC's header: not compressed, length."""
    payload = message.SerializeToString()
    return struct.pack(">BI", 0, len(payload)) + payload


def framed_bytes(messages: Iterable[Message]) -> int:
    """Data bytes of a response body, or of several, with their gRPC headers."""
    return sum(FRAME_HEADER_BYTES + message.ByteSize() for message in messages)


def heartbeat(job: str, worker: Worker) -> pb.HeartbeatRequest:
    """A heartbeat as a training process with several GPUs sends it."""
    gigabyte = 1 << 30
    return pb.HeartbeatRequest(
        worker_id=worker.worker_id,
        job=job,
        incarnation=worker.incarnation,
        state=pb.WORKER_STATE_TRAINING,
        step=1200,
        epoch=1,
        resources=pb.ResourceUsage(
            cpu_percent=41.5,
            memory_used_bytes=96 * gigabyte,
            memory_total_bytes=512 * gigabyte,
            gpus=[
                pb.GpuUsage(
                    index=index,
                    utilization_percent=97.0,
                    memory_used_bytes=71 * gigabyte,
                    memory_total_bytes=80 * gigabyte,
                    temperature_celsius=64.0,
                )
                for index in range(GPUS_PER_WORKER)
            ],
        ),
        metrics={"loss": 2.31},
    )


def registration(job: str) -> pb.WorkerInfo:
    """Registers a new worker each time it is sent: no id, no session, an elastic job."""
    return pb.WorkerInfo(
        job=job,
        hostname="node-17.cluster",
        port=29500,
        gpu_count=GPUS_PER_WORKER,
        memory_bytes=512 << 30,
    )


def arrival(job: str, barrier_id: str, worker: Worker, generation: int) -> pb.BarrierRequest:
    """A worker's arrival at a barrier, good for any number of rounds: never a retry."""
    return pb.BarrierRequest(
        barrier_id=barrier_id,
        worker_id=worker.worker_id,
        job=job,
        incarnation=worker.incarnation,
        generation=generation,
        timeout_ms=BARRIER_TIMEOUT_MS,
    )


def completed_rounds_bytes(rounds: int, generation: int, participants: int) -> int:
    """Data bytes one worker receives when the first `rounds` rounds of a barrier complete."""
    return framed_bytes(
        pb.BarrierResponse(
            outcome=pb.BARRIER_OUTCOME_COMPLETED,
            round=number,
            generation=generation,
            participants=participants,
        )
        for number in range(1, rounds + 1)
    )
