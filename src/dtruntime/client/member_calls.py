"""A member's calls: barriers, checkpoints, and actions that are asked of the whole job."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import re
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .._sync_bridge import awaitable, blocking
from ..errors import CheckpointAbortedError, StorageError, StrataError
from ..rpc import messages
from ..rpc.gen import coordinator_pb2 as pb
from ..telemetry import EventLog, tracing
from ..types import (
    LONGEST_WAIT_SECONDS,
    VALUE_BYTES,
    CheckpointCondition,
    CheckpointInfo,
    WorkerState,
    check_id,
    check_whole,
)
from .membership import MemberConnection, StateLostError, hold_seconds
from .worker_config import WorkerConfig

log = EventLog("worker")

FIRST_TOLD_SECONDS = 5.0
LAST_TOLD_SECONDS = 600.0
"""After how long a wait without an end is first told of; the pauses double up to the second."""
SAVES_SECONDS = 600.0
"""How long a member that leaves waits for its saves to be committed."""
REPORT_SECONDS = 2.0
"""How long a coordinator that is away is tried when it is told what became of a checkpoint."""
COMMITS_KEPT = 64
"""So many commits of one writer are told again to a coordinator that has lost its state."""

_ATTEMPT = re.compile(r"step-\d+-(\d+)")


@dataclass(frozen=True, slots=True)
class Meeting:
    """A completed round of a barrier, in the same words for all who were there."""

    values: dict[int, bytes]
    """What each brought, by rank."""
    generation: int
    """The number of the membership at that moment."""
    left_out: int
    """How many members were live and not there."""


class MemberCalls(MemberConnection):
    """The calls that a program makes as a member of its job."""

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config)
        self._tickets = itertools.count(1)
        """Of arrivals at barriers."""
        self._saves = itertools.count(1)
        """The tickets of saves that are begun."""
        self._under_way: set[concurrent.futures.Future[Any]] = set()
        """Saves that are to be committed through this member."""
        self._attempts_known = 0
        """The highest number of an attempt at a checkpoint that it was told."""
        self._commits_told: deque[pb.CheckpointInfo] = deque(maxlen=COMMITS_KEPT)
        self._actions_lost: set[str] = set()
        """Ids of actions that a coordinator has forgotten with its state."""

    def _enter(self, reply: pb.WorkerRegistration) -> None:
        super()._enter(reply)
        self._tickets = itertools.count(1)
        self._saves = itertools.count(1)

    # Barriers

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
            step=self.reported.step,
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

    # Checkpoints

    def expect_commit(self, save: concurrent.futures.Future[Any]) -> None:
        """Do not leave before a save has ended that is to be committed through this member."""
        self._under_way.add(save)
        save.add_done_callback(self._under_way.discard)

    async def _let_saves_end(self) -> None:
        """Wait for saves under way, on the I/O thread."""
        saves = [asyncio.wrap_future(save) for save in list(self._under_way)]
        if saves:
            done, _ = await asyncio.wait(saves, timeout=SAVES_SECONDS)
            for save in done:
                save.exception()  # whoever has the handle is told

    @awaitable
    async def begin_checkpoint_async(self, step: int, *, ranks: Sequence[int] | None = None) -> str:
        """The id under which all members save this step together.

        Every member calls this once for each save, before it writes, and then gives the id to
        `commit_checkpoint` with ``partial=True``. The members of one attempt get the same id,
        and no other attempt ever does: saving a step again, after a rollback or a failure, is
        another attempt. A member sends its parts in the order in which it began. An attempt ends
        when a member is lost before its part is stored, begins the step again, or goes past it:
        by sending its part of a later one, or by beginning a later one without having asked for
        it. `commit_checkpoint` then raises `CheckpointAbortedError`.

        ``ranks`` says who saves together; by default all members that are live. All of them have
        to give the same.
        """
        identity = self.identity
        request = pb.BeginCheckpointRequest(
            job=identity.job,
            worker_id=identity.worker_id,
            incarnation=identity.incarnation,
            step=check_whole("step", step),
            ranks=ranks,
        )
        reply = await self._begin(request)
        self.note_generation(reply.generation)
        if number := _ATTEMPT.fullmatch(reply.checkpoint_id):
            self._attempts_known = max(self._attempts_known, int(number[1]))
        return reply.checkpoint_id

    begin_checkpoint = blocking(begin_checkpoint_async)

    async def _begin(self, request: pb.BeginCheckpointRequest) -> pb.BeginCheckpointResponse:
        """Begin a save, under a ticket of the state that the coordinator has."""
        while True:
            request.ticket = next(self._saves)
            with contextlib.suppress(StateLostError):
                return await self.call(
                    "BeginCheckpoint", request, pb.BeginCheckpointResponse, repeat=False
                )

    @awaitable
    async def abandon_checkpoints_async(self) -> int:
        """End what is being saved together with this worker; returns how many saves that were.

        For a worker that goes back to an earlier step: the others need not wait for it.
        """
        identity = self.identity
        request = pb.AbandonRequest(
            job=identity.job, worker_id=identity.worker_id, incarnation=identity.incarnation
        )
        reply = await self.call("AbandonCheckpoints", request, pb.Abandoned)
        return reply.count

    abandon_checkpoints = blocking(abandon_checkpoints_async)

    @awaitable
    async def commit_checkpoint_async(
        self,
        /,
        checkpoint_id: str,
        step: int,
        *,
        epoch: int = 0,
        path: str = "",
        size_bytes: int = 0,
        is_full: bool = True,
        partial: bool = False,
        timeout_ms: int = 600_000,
        **metadata: object,
    ) -> None:
        """Record a checkpoint that is safely stored, so that recovery finds it.

        ``partial`` means that every member writes its own part: the call returns when all
        have. Raises `CheckpointAbortedError` when that will never be, and `StorageError` when it
        is not so within ``timeout_ms``.
        """
        hold = hold_seconds(timeout_ms)
        identity = self.identity
        request = pb.CheckpointInfo(
            checkpoint_id=check_id("checkpoint", checkpoint_id),
            worker_id=identity.worker_id,
            step=check_whole("step", step),
            epoch=check_whole("epoch", epoch),
            path=path,
            size_bytes=check_whole("size_bytes", size_bytes),
            is_full=is_full,
            metadata={key: str(value) for key, value in metadata.items()},
            job=identity.job,
            incarnation=identity.incarnation,
            generation=self._told,
            partial=partial,
        )
        reply = await self._notify(request, hold)
        if reply.status == pb.CHECKPOINT_STATUS_ABORTED:
            raise CheckpointAbortedError(
                f"checkpoint {checkpoint_id!r} was not committed: {reply.detail}"
            )
        if reply.status == pb.CHECKPOINT_STATUS_PENDING:
            raise StorageError(
                f"checkpoint {checkpoint_id!r} was not committed within {timeout_ms} ms: ranks "
                f"{list(reply.missing_ranks)} have not stored their part"
            )
        if not partial:
            self._commits_told.append(request)

    commit_checkpoint = blocking(commit_checkpoint_async)

    async def _notify(self, request: pb.CheckpointInfo, hold: float) -> pb.CheckpointResponse:
        """Send a commit; behind the earlier ones if the coordinator has lost these."""
        try:
            return await self.call(
                "NotifyCheckpoint", request, pb.CheckpointResponse, hold=hold, repeat=False
            )
        except StateLostError as exc:
            if request.partial:
                error = CheckpointAbortedError(
                    f"checkpoint {request.checkpoint_id!r} was not committed: {exc}"
                )
                error.may_be_committed = True
                raise error from exc
        await self._tell_commits()
        return await self.call("NotifyCheckpoint", request, pb.CheckpointResponse, hold=hold)

    @awaitable
    async def report_checkpoints_async(
        self,
        checkpoint_ids: Sequence[str],
        condition: CheckpointCondition,
        *,
        path: str = "",
        detail: str = "",
    ) -> int:
        """Say what became of committed checkpoints; returns how many of them are known.

        The coordinator cannot see where they are stored, and shows what it was told last. ``path``
        stands for one whose id cannot be read: the path that it was committed with. A coordinator
        that is away is tried for two seconds only.
        """
        identity = self.identity
        if condition is CheckpointCondition.REMOVED:
            gone = set(checkpoint_ids)
            kept = [told for told in self._commits_told if told.checkpoint_id not in gone]
            self._commits_told = deque(kept, COMMITS_KEPT)
        request = messages.checkpoint_report(identity.job, checkpoint_ids, condition, path, detail)
        request.reported_by, request.incarnation = identity.worker_id, identity.incarnation
        reply = await self.call(
            "ReportCheckpoints", request, pb.CheckpointsReported, patience=REPORT_SECONDS
        )
        return reply.known

    report_checkpoints = blocking(report_checkpoints_async, brief=True)

    async def _tell_commits(self) -> None:
        """Record again what this worker has recorded alone."""
        for request in list(self._commits_told):
            await self.call("NotifyCheckpoint", request, pb.CheckpointResponse)

    @awaitable
    async def latest_checkpoint_async(
        self, *, patience: float | None = None
    ) -> CheckpointInfo | None:
        """The checkpoint of this job that was committed last and not deleted, or ``None``.

        This worker need not be registered. ``patience`` is how long a coordinator that is away is
        tried, in seconds.
        """
        request = pb.RecoveryRequest(job=self.job, worker_id=self.worker_id)
        reply = await self.call("GetLatestCheckpoint", request, pb.RecoveryInfo, patience=patience)
        return messages.checkpoint(reply.checkpoint) if reply.found else None

    latest_checkpoint = blocking(latest_checkpoint_async, brief=True)

    # Actions

    @awaitable
    async def request_action_async(self, kind: str, worker_id: str = "", reason: str = "") -> str:
        """Ask something of the whole job; returns the action's id.

        ``"checkpoint"``: save at the next step that all can agree on. ``"stop"``: save, then end
        the run. ``"drain"``: save, then let the worker that is named leave; this one, if none is.
        All members hear of it with their next heartbeat. While the same is pending, its id is
        returned again. Raises `StrataError` when no such worker is live.
        """
        identity = self.identity
        request = messages.action_request(identity.job, kind, worker_id, reason)
        if kind == "drain" and not worker_id:
            request.worker_id = identity.worker_id
        request.requested_by = identity.worker_id
        request.incarnation = identity.incarnation
        return (await self.call("RequestAction", request, pb.Action)).action_id

    request_action = blocking(request_action_async)

    @awaitable
    async def complete_action_async(self, action_id: str, outcome: str = "") -> None:
        """Say that an action is done; any member may, also several, and the first is recorded."""
        identity = self.identity
        if action_id in self._actions_lost:
            return
        request = pb.ActionCompletion(
            job=identity.job,
            action_id=check_id("action", action_id),
            outcome=outcome,
            completed_by=identity.worker_id,
            incarnation=identity.incarnation,
        )
        with contextlib.suppress(StateLostError):
            await self.call("CompleteAction", request, pb.ActionCompleted, repeat=False)

    complete_action = blocking(complete_action_async)


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
