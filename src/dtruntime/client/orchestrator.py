"""`TrainingOrchestrator`: a worker's barriers, checkpoints, actions and reports."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from .._sync_bridge import awaitable, blocking
from ..errors import CheckpointAbortedError, ConnectionError, StorageError, StrataError, SyncError
from ..rpc import messages
from ..rpc.gen import coordinator_pb2 as pb
from ..telemetry import EventLog, tracing
from ..types import (
    LONGEST_WAIT_SECONDS,
    VALUE_BYTES,
    CheckpointCondition,
    CheckpointInfo,
    JobStatus,
    WorkerState,
    WorkerStatus,
    check_id,
    check_timeout_ms,
    check_whole,
)
from . import current_orchestrator
from .membership import JobMember, StateLostError
from .worker_config import WorkerConfig

log = EventLog("worker")

FIRST_WARNING_SECONDS = 5.0
LONGEST_WARNING_SECONDS = 600.0
"""When an unlimited wait is first logged; pauses between warnings double up to the second."""
REPORT_SECONDS = 2.0
"""How long an absent coordinator is tried when reporting the condition of checkpoints."""
LOST_NAMED = 256
"""A reply names at most this many lost members; there may have been more."""
COMMITS_KEPT = 64
"""How many of its own commits a worker replays to a coordinator that lost its state."""

_ATTEMPT = re.compile(r"step-\d+-(\d+)")


@dataclass(frozen=True, slots=True)
class Meeting:
    """A completed barrier round; the same for all participants."""

    values: dict[int, bytes]
    """Each participant's value, by rank."""
    generation: int
    """The generation when the round completed."""
    left_out: int
    """How many live members did not take part."""


class TrainingOrchestrator(JobMember):
    """A worker's side of the coordinator.

    All of these work::

        TrainingOrchestrator(WorkerConfig(coordinator_url="http://host:50051", gpu_count=8))
        TrainingOrchestrator(worker_id="w", coordinator_url="http://host:50051",
                             world_size=8, rank=0)
        TrainingOrchestrator()          # everything from the environment

    Constructing one does not touch the network. `register` joins the job and starts background
    heartbeats; leaving a ``with`` block, `deregister` or the end of the process ends the
    membership. A worker that was declared dead or replaced gets a `SyncError` with
    ``reason="superseded"`` from its next call, and may `register` again.
    """

    def __init__(
        self,
        config: WorkerConfig | str | None = None,
        coordinator_url: str | None = None,
        world_size: int | None = None,
        rank: int | None = None,
        *,
        worker_id: str | None = None,
        job: str | None = None,
        gpu_count: int | None = None,
        heartbeat_interval_ms: int | None = None,
    ) -> None:
        """Take a `WorkerConfig`, or its fields as arguments; the first may be the worker's id."""
        if isinstance(config, str):
            config, worker_id = None, config
        if config is not None and not isinstance(config, WorkerConfig):
            raise TypeError(f"config must be a WorkerConfig, not {type(config).__name__}")
        arguments: dict[str, Any] = {
            "coordinator_url": coordinator_url,
            "world_size": world_size,
            "rank": rank,
            "worker_id": worker_id,
            "job": job,
            "gpu_count": gpu_count,
            "heartbeat_interval_ms": heartbeat_interval_ms,
        }
        given = {name: value for name, value in arguments.items() if value is not None}
        super().__init__(replace(config or WorkerConfig(), **given).resolved())
        self._commits: deque[pb.CheckpointInfo] = deque(maxlen=COMMITS_KEPT)
        """What this worker committed alone, for a replay."""
        self._ranks_saving: dict[str, tuple[int, ...]] = {}
        """Who saves a checkpoint together, if that was given when it was begun."""
        current_orchestrator.add_reporter(self)

    # Barriers

    @awaitable
    async def wait_barrier(self, barrier_id: str, timeout_ms: int | None = None) -> None:
        """Wait until every member of the job has reached this barrier.

        Without ``timeout_ms`` it waits as long as the members live, and logs who is missing.

        Raises `SyncError`: with reason ``"membership_changed"`` as soon as a member is lost,
        ``"timeout"`` when somebody has not arrived within ``timeout_ms``, ``"superseded"`` when
        this worker is no longer a member. Time during which the coordinator is away does not count.
        """
        await self._arrive(barrier_id, timeout_ms)

    _wait_barrier = blocking(wait_barrier)

    def barrier(self, name: str, timeout_ms: int = 30_000) -> None:
        """As `wait_barrier`, with a timeout of 30 s by default."""
        check_timeout_ms(timeout_ms)
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
        """Wait like `barrier`, and return every participant's value, by rank.

        All participants get the same values, of at most 1,024 bytes each; a member that came to
        the same name with `barrier` has an empty one. Raises `SyncError` as `barrier` does.

        With ``ranks`` only these take part, this worker among them: other members are not
        awaited, and losing them changes nothing. All participants have to give the same ranks.
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
        """As `exchange`, with the generation and how many members were left out."""
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
        hold = LONGEST_WAIT_SECONDS if timeout_ms is None else check_timeout_ms(timeout_ms)
        named = None if ranks is None else [check_whole("rank", rank) for rank in ranks]
        request = pb.BarrierRequest(
            barrier_id=check_id("barrier", barrier_id),
            payload=payload,
            ranks=named,
            generation=self._generation_for(named),
        )
        with tracing.span(
            "barrier",
            calls=True,
            **self.described(),
            step=self.reported.step,
            barrier_id=barrier_id,
        ):
            while True:
                request.ticket = next(self.identity.barrier_tickets)
                reply = await self._wait(request, hold, log_missing=timeout_ms is None)
                again = timeout_ms is None and reply.outcome == pb.BARRIER_OUTCOME_TIMED_OUT
                if not again and not _lost_only_others(reply, request.ranks):
                    break
                request.generation = reply.generation
            if not named or reply.outcome == pb.BARRIER_OUTCOME_MEMBERSHIP_CHANGED:
                self._program_generation = max(self._program_generation, reply.generation)
            messages.raise_barrier_outcome(barrier_id, timeout_ms or 0, reply)
        return reply

    async def _wait(
        self, request: pb.BarrierRequest, hold: float, *, log_missing: bool
    ) -> pb.BarrierResponse:
        began = time.monotonic()
        logging = asyncio.ensure_future(self._log_missing(request)) if log_missing else None
        try:
            with self.activity.doing(WorkerState.WAITING):
                reply = await self.call("WaitBarrier", request, pb.BarrierResponse, hold=hold)
        finally:
            if logging is not None:
                logging.cancel()
            self.waited_seconds += time.monotonic() - began
        return reply

    async def _log_missing(self, request: pb.BarrierRequest) -> None:
        """Log who is missing, less and less often."""
        query = pb.StatusRequest(job=self.job, worker_id=self.worker_id)
        waited, pause = 0.0, FIRST_WARNING_SECONDS
        while True:
            await asyncio.sleep(pause)
            waited, pause = waited + pause, min(2 * pause, LONGEST_WARNING_SECONDS)
            with contextlib.suppress(StrataError):
                status = await self.call("GetStatus", query, pb.JobStatus, patience=0.0)
                for barrier in status.barriers:
                    if barrier.barrier_id != request.barrier_id:
                        continue
                    missing = barrier.expected - barrier.arrived
                    log.warning(
                        "barrier.waiting",
                        barrier=barrier.barrier_id,
                        seconds=round(waited),
                        arrived=f"{barrier.arrived} of {barrier.expected}",
                        missing=messages.named_missing(barrier.missing, missing),
                    )

    # Checkpoints

    @awaitable
    async def begin_checkpoint_async(self, step: int, *, ranks: Sequence[int] | None = None) -> str:
        """The id under which all members save this step together.

        Every member calls this once for each save, before it writes, and passes the id to
        `commit_checkpoint` with ``partial=True``. The members of one attempt get the same id, and
        no other attempt ever does: saving a step again, after a rollback or a failure, is another
        attempt. A member sends its parts in the order in which it began. An attempt ends when a
        member is lost before its part is stored, begins the step again, or goes past it: by
        sending its part of a later one, or by beginning a later one without having asked for it.
        `commit_checkpoint` then raises `CheckpointAbortedError`.

        ``ranks`` says who saves together, by default all live members; all of them have to give
        the same ranks.
        """
        request = pb.BeginCheckpointRequest(step=check_whole("step", step), ranks=ranks)
        reply = await self._begin(request)
        self.note_generation(reply.generation)
        if ranks is not None:
            self._ranks_saving[reply.checkpoint_id] = tuple(ranks)
        if number := _ATTEMPT.fullmatch(reply.checkpoint_id):
            self._attempts = max(self._attempts, int(number[1]))
        return reply.checkpoint_id

    begin_checkpoint = blocking(begin_checkpoint_async)

    async def _begin(self, request: pb.BeginCheckpointRequest) -> pb.BeginCheckpointResponse:
        while True:
            # A ticket counts in one state of the coordinator.
            request.ticket = next(self.identity.save_tickets)
            with contextlib.suppress(StateLostError):
                return await self.call(
                    "BeginCheckpoint", request, pb.BeginCheckpointResponse, repeat=False
                )

    @awaitable
    async def abandon_checkpoints_async(self) -> int:
        """End the saves that wait for this worker's part; returns how many there were.

        For a worker that goes back to an earlier step, so that the others need not wait for it.
        """
        return (await self.call("AbandonCheckpoints", pb.AbandonRequest(), pb.Abandoned)).count

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

        ``partial`` means that every member writes its own part: the call returns when all have.
        Raises `CheckpointAbortedError` when that will never happen, and `StorageError` when it
        has not happened within ``timeout_ms``.
        """
        hold = check_timeout_ms(timeout_ms)
        request = pb.CheckpointInfo(
            checkpoint_id=check_id("checkpoint", checkpoint_id),
            step=check_whole("step", step),
            epoch=check_whole("epoch", epoch),
            path=path,
            size_bytes=check_whole("size_bytes", size_bytes),
            is_full=is_full,
            metadata={key: str(value) for key, value in metadata.items()},
            generation=self._generation_for(self._ranks_saving.pop(checkpoint_id, None)),
            partial=partial,
        )
        reply = await self._commit(request, hold)
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
            self._commits.append(request)

    commit_checkpoint = blocking(commit_checkpoint_async)

    async def _commit(self, request: pb.CheckpointInfo, hold: float) -> pb.CheckpointResponse:
        """Send a commit, after replaying the earlier ones if the coordinator lost its state."""
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
        await self.replay(self)
        return await self.call("NotifyCheckpoint", request, pb.CheckpointResponse, hold=hold)

    async def replay(self, member: JobMember) -> None:
        """Commit again what this worker committed alone, to a coordinator that lost its state."""
        if member is self:
            for request in list(self._commits):
                await self.call("NotifyCheckpoint", request, pb.CheckpointResponse)

    @awaitable
    async def report_checkpoints_async(
        self,
        checkpoint_ids: Sequence[str],
        condition: CheckpointCondition,
        *,
        path: str = "",
        detail: str = "",
    ) -> int:
        """Report the condition of committed checkpoints; returns how many of them are known.

        The coordinator cannot see where they are stored, and shows the last report. ``path``
        identifies a checkpoint whose id cannot be read: the path that it was committed with. An
        absent coordinator is tried for two seconds only.
        """
        identity = self.identity
        if condition is CheckpointCondition.REMOVED:
            kept = [one for one in self._commits if one.checkpoint_id not in set(checkpoint_ids)]
            self._commits = deque(kept, COMMITS_KEPT)
        request = messages.checkpoint_report(identity.job, checkpoint_ids, condition, path, detail)
        reply = await self.call(
            "ReportCheckpoints", request, pb.CheckpointsReported, patience=REPORT_SECONDS
        )
        return reply.known

    report_checkpoints = blocking(report_checkpoints_async, brief=True)

    @awaitable
    async def latest_checkpoint_async(
        self, *, patience: float | None = None
    ) -> CheckpointInfo | None:
        """The checkpoint of this job that was committed last and not deleted, or ``None``.

        This worker need not be registered. ``patience`` is how many seconds an absent coordinator
        is tried.
        """
        request = pb.RecoveryRequest(job=self.job, worker_id=self.worker_id)
        reply = await self.call("GetLatestCheckpoint", request, pb.RecoveryInfo, patience=patience)
        return messages.checkpoint(reply.checkpoint) if reply.found else None

    latest_checkpoint = blocking(latest_checkpoint_async, brief=True)

    # Actions

    @awaitable
    async def request_action_async(self, kind: str, worker_id: str = "", reason: str = "") -> str:
        """Ask the whole job for something; returns the action's id.

        ``"checkpoint"``: save at the next step that all can agree on. ``"stop"``: save, then end
        the run. ``"drain"``: save, then let the named worker leave; this one, if none is named.
        All members hear of it with their next heartbeat. While the same action is pending, its id
        is returned again. Raises `StrataError` when no such worker is live.
        """
        identity = self.identity
        if kind == "drain":
            worker_id = worker_id or identity.worker_id
        request = messages.action_request(identity.job, kind, worker_id, reason)
        return (await self.call("RequestAction", request, pb.Action)).action_id

    request_action = blocking(request_action_async)

    @awaitable
    async def complete_action_async(self, action_id: str, outcome: str = "") -> None:
        """Complete an action; any member may, and the first completion is recorded."""
        if action_id in self._lost_actions:
            return
        request = pb.ActionCompletion(action_id=check_id("action", action_id), outcome=outcome)
        with contextlib.suppress(StateLostError):
            await self.call("CompleteAction", request, pb.ActionCompleted, repeat=False)

    complete_action = blocking(complete_action_async)

    # Reports

    def report(
        self,
        step: int | None = None,
        epoch: int | None = None,
        state: WorkerState | str | None = None,
        loss: float | None = None,
        step_seconds: float | None = None,
        samples_used: float = 0,
        **metrics: float,
    ) -> None:
        """Update what the next heartbeat carries; no network access.

        Without ``state`` it is inferred from this worker's calls: waiting in barriers, saving,
        loading, otherwise training from the first step or batch on. ``step_seconds`` is how long a
        recent step took; the coordinator finds stragglers by it. ``samples_used`` counts since the
        last report; the job's throughput is the sum of these, or else of what loaders hand out.
        """
        if loss is not None:
            metrics["loss"] = loss
        if step is not None:
            self.activity.trains()
        self.reported = self.reported.updated(
            step, epoch, state, metrics, step_seconds, int(samples_used)
        )

    def on_heartbeat(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` after each heartbeat that brought a new generation or other actions.

        It runs on the I/O thread and must not block. What it raises is logged.
        """
        self._heartbeats.on_change(listener)

    @awaitable
    async def heartbeat(self) -> None:
        """Send a heartbeat now; the background ones continue."""
        await self._heartbeats.send(self)

    beat = blocking(heartbeat, brief=True)

    def listen_for_others(self) -> None:
        """Warn of silent members that share the data with this one.

        On the I/O thread; once per registration. A member that was killed keeps its part of the
        data, which nobody reads, until its heartbeats are missed.
        """
        self._heartbeats.watch_others(self)

    # Status

    @awaitable
    async def get_status_async(self) -> WorkerStatus:
        """This worker as the coordinator sees it."""
        return (await self._status()).workers[0]

    get_status = blocking(get_status_async, brief=True)

    @awaitable
    async def recent_losses_async(self, seconds: float) -> int:
        """How many members the job lost in the last ``seconds``, counted up to 64.

        Those that left by themselves do not count, nor does a whole group that was restarted.
        """
        return (await self._status()).recent_losses(seconds)

    recent_losses = blocking(recent_losses_async, brief=True)

    @awaitable
    async def live_workers_async(self) -> int:
        """How many live members the job has."""
        return (await self._status()).live_workers

    live_workers = blocking(live_workers_async, brief=True)

    @awaitable
    async def are_waiting_async(self, barrier_id: str, others: int) -> bool:
        """Whether all live members but ``others`` wait at a barrier, and at least one does."""
        status = await self._status()
        arrived = sum(b.arrived for b in status.barriers if b.barrier_id == barrier_id)
        return 0 < status.live_workers - others <= arrived

    async def _status(self) -> JobStatus:
        """The job, with this worker alone."""
        try:
            return await self._query_status()
        except ConnectionError:
            raise
        except StrataError:
            # A coordinator that lost its state knows neither; the heartbeat finds out.
            await self.heartbeat()
            return await self._query_status()

    async def _query_status(self) -> JobStatus:
        identity = self.identity
        request = pb.StatusRequest(job=identity.job, worker_id=identity.worker_id)
        reply = await self.call("GetStatus", request, pb.JobStatus)
        status = messages.worker_status(reply.workers[0])
        if status.incarnation != identity.incarnation:
            async with self._returning:
                pass  # it may be coming back to a coordinator that lost its state
            if self._identity is not identity:
                return await self._query_status()
            superseded = SyncError(
                f"worker {identity.worker_id!r} was registered again by {status.process}: stop "
                "this process, or call register() again",
                reason="superseded",
                generation=reply.generation,
            )
            self._be_fenced(superseded)
            raise superseded
        return messages.job_status(reply, [status])

    # Context managers

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self.goodbye_may_fail():
            self.deregister(_reason(error))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self.goodbye_may_fail():
            await self.deregister_worker(_reason(error))

    def __repr__(self) -> str:
        state = "registered" if self.is_registered else "not registered"
        return f"<TrainingOrchestrator {self.worker_id or '?'} of job {self.job!r}, {state}>"


def _reason(error: BaseException | None) -> str:
    return "" if error is None else f"failed: {type(error).__name__}"


def _lost_only_others(reply: pb.BarrierResponse, ranks: Collection[int]) -> bool:
    """Whether a round of some ranks ended only because others were lost."""
    if not ranks or not 0 < len(reply.lost) < LOST_NAMED:
        return False
    return all(loss.worker_id and loss.rank not in ranks for loss in reply.lost)


def _checked(value: bytes) -> bytes:
    if not isinstance(value, bytes | bytearray | memoryview):
        raise TypeError(f"an exchanged value must be bytes, not {type(value).__name__}")
    data = bytes(value)
    if len(data) > VALUE_BYTES:
        raise ValueError(
            f"a value of {len(data)} bytes cannot be exchanged: at most {VALUE_BYTES} bytes; put "
            "it into the storage that all workers share, and exchange its name"
        )
    return data
