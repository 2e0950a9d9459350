"""The coordinator's span of a call that is part of a trace."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from google.protobuf.message import Message

from ...rpc.gen import coordinator_pb2 as pb
from ...telemetry.tracing import Span
from ..queries import Answer
from ..state import Machine

_TOLD = ("job", "worker_id", "step", "epoch", "barrier_id", "checkpoint_id", "dataset_id")
"""Fields of requests that say what a call is about."""
_FAILED = {
    pb.BARRIER_OUTCOME_TIMED_OUT: "timed out",
    pb.BARRIER_OUTCOME_MEMBERSHIP_CHANGED: "membership changed",
}


def describe(span: Span, method: str, request: Any, machine: Machine) -> None:
    """Say who calls, and about what."""
    fields = request.DESCRIPTOR.fields_by_name
    told = {name: getattr(request, name) for name in _TOLD if name in fields}
    span.set(**{name: value for name, value in told.items() if value != ""}, method=method)
    job = machine.jobs.get(told.get("job", ""))
    if job is not None:
        member = job.roster.by_id.get(told.get("worker_id", ""))
        span.set(generation=job.roster.generation, rank=member.rank if member else None)


def follow(span: Span, answer: Callable[[], Answer]) -> Answer:
    """Answer a call, and end its span when the answer is there."""
    try:
        given = answer()
    except BaseException as exc:
        span.fail(exc)
        span.end()
        raise
    if isinstance(given, asyncio.Future):
        given.add_done_callback(lambda done: _end(span, done))
    else:
        _conclude(span, given)
    return given


def _end(span: Span, done: asyncio.Future[Message]) -> None:
    if done.cancelled():
        span.fail("the caller hung up")
        span.end()
    elif (error := done.exception()) is not None:
        span.fail(error)
        span.end()
    else:
        _conclude(span, done.result())


def _conclude(span: Span, reply: Message) -> None:
    """Outcomes that are no refusals are in the reply."""
    if isinstance(reply, pb.BarrierResponse) and reply.outcome in _FAILED:
        span.fail(_FAILED[reply.outcome])
    if isinstance(reply, pb.CheckpointResponse) and reply.status != pb.CHECKPOINT_STATUS_COMMITTED:
        span.fail(f"not committed: {reply.detail}")
    span.end()
