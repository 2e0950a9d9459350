"""Where the members of a job meet."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass

from .._sync_bridge import awaitable, blocking
from ..errors import StrataError
from ..rpc import messages
from ..rpc.gen import coordinator_pb2 as pb
from ..telemetry import EventLog, tracing
from ..types import LONGEST_WAIT_SECONDS, VALUE_BYTES, WorkerState, check_id, check_whole
from .member import Member, hold_seconds

log = EventLog("worker")

FIRST_TOLD_SECONDS = 5.0
LAST_TOLD_SECONDS = 600.0
"""After how long a wait without an end is first told of; the pauses double up to the second."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """A completed round of a barrier, in the same words for all who were there."""

    values: dict[int, bytes]
    """What each brought, by rank."""
    generation: int
    """The number of the membership at that moment."""
    left_out: int
    """How many members were live and not there."""


class BarrierCalls(Member):
    """A member's calls that wait for all others."""

    @awaitable
    async def wait_barrier(self, barrier_id: str, timeout_ms: int | None = None) -> None:
        """Wait until every member of the job has reached this barrier.

        Without ``timeout_ms`` for as long as its members live, while the log names who is missing.

        Raises `SyncError`: with reason ``"membership_changed"`` as soon as a member is lost,
        ``"timeout"`` when somebody has not come within ``timeout_ms``, ``"superseded"`` when
        this worker itself is no longer a member. Time during which the coordinator is away
        does not count.
        """
        await self._arrive(barrier_id, timeout_ms)

    _wait_barrier = blocking(wait_barrier)

    def barrier(self, name: str, timeout_ms: int = 30_000) -> None:
        """As `wait_barrier`, for at most 30 s if nothing else is given."""
        hold_seconds(timeout_ms)
        self._wait_barrier(name, timeout_ms)

    @awaitable
    async def exchange_async(
        self,
        name: str,
        value: bytes,
        timeout_ms: int = 30_000,
        *,
        ranks: Iterable[int] | None = None,
    ) -> dict[int, bytes]:
        """Wait like `barrier`, and return the values of all who took part, by rank.

        Every participant gets the same. A value has at most 1,024 bytes; that of a member which
        came to the same name with `barrier` is empty. Raises `SyncError` as `barrier` does.

        With ``ranks`` only these meet, this worker among them, and members that joined since are
        not awaited; all who meet give the same.
        """
        return (await self.meet_async(name, value, timeout_ms, ranks=ranks)).values

    exchange = blocking(exchange_async)

    @awaitable
    async def meet_async(
        self,
        name: str,
        value: bytes,
        timeout_ms: int = 30_000,
        *,
        ranks: Iterable[int] | None = None,
    ) -> Meeting:
        """As `exchange`, and say of which membership the values are, and whether of all of it."""
        reply = await self._arrive(name, timeout_ms, _checked(value), ranks)
        if not reply.values:
            raise StrataError(
                f"the coordinator at {self._channel.url} let this worker pass {name!r} without the "
                "values of the others: it is older than this client; upgrade it"
            )
        return Meeting(dict(sorted(reply.values.items())), reply.generation, reply.left_out)

    async def _arrive(
        self,
        barrier_id: str,
        timeout_ms: int | None,
        payload: bytes | None = None,
        ranks: Iterable[int] | None = None,
    ) -> pb.BarrierResponse:
        check_id("barrier", barrier_id)
        hold = LONGEST_WAIT_SECONDS if timeout_ms is None else hold_seconds(timeout_ms)
        identity = self.identity
        request = pb.BarrierRequest(
            barrier_id=barrier_id,
            worker_id=identity.worker_id,
            job=identity.job,
            incarnation=identity.incarnation,
            generation=self._told,
            ticket=next(self._tickets),
            payload=payload,
            ranks=None if ranks is None else [check_whole("rank", rank) for rank in ranks],
        )
        with tracing.span(
            "barrier",
            calls=True,
            **self.described(),
            step=self._report.step,
            barrier_id=barrier_id,
        ):
            reply = await self._wait(request, hold, names_missing=timeout_ms is None)
            while timeout_ms is None and reply.outcome == pb.BARRIER_OUTCOME_TIMED_OUT:
                request.ticket, request.generation = next(self._tickets), self._told
                reply = await self._wait(request, hold, names_missing=True)
            messages.raise_barrier_outcome(barrier_id, timeout_ms or 0, reply)
        return reply

    async def _wait(
        self, request: pb.BarrierRequest, hold: float, *, names_missing: bool
    ) -> pb.BarrierResponse:
        began = time.monotonic()
        telling = asyncio.ensure_future(self._name_missing(request)) if names_missing else None
        try:
            with self.activity.doing(WorkerState.WAITING):
                reply = await self.call("WaitBarrier", request, pb.BarrierResponse, hold=hold)
        finally:
            if telling is not None:
                telling.cancel()
            self.waited_seconds += time.monotonic() - began
        self._told = max(self._told, reply.generation)
        return reply

    async def _name_missing(self, request: pb.BarrierRequest) -> None:
        """Log who is waited for, less and less often."""
        asked = pb.StatusRequest(job=request.job, worker_id=request.worker_id)
        waited, pause = 0.0, FIRST_TOLD_SECONDS
        while True:
            await asyncio.sleep(pause)
            waited, pause = waited + pause, min(2 * pause, LAST_TOLD_SECONDS)
            with contextlib.suppress(StrataError):
                status = await self.call("GetStatus", asked, pb.JobStatus, patience=0.0)
                for barrier in status.barriers:
                    if barrier.barrier_id == request.barrier_id:
                        log.warning(
                            "barrier.waiting",
                            barrier=barrier.barrier_id,
                            seconds=round(waited),
                            arrived=f"{barrier.arrived} of {barrier.expected}",
                            missing=messages.named_missing(
                                barrier.missing, barrier.expected - barrier.arrived
                            ),
                        )


def _checked(value: bytes) -> bytes:
    if not isinstance(value, bytes | bytearray | memoryview):
        raise TypeError(f"a value to hand round must be bytes, not {type(value).__name__}")
    data = bytes(value)
    if len(data) > VALUE_BYTES:
        raise ValueError(
            f"a value of {len(data)} bytes cannot be handed round: at most {VALUE_BYTES} bytes; "
            "put it into the storage that all workers share, and hand round its name"
        )
    return data
