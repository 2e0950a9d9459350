"""A worker's membership in a job: registration, heartbeats, and all of its calls."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from .._sync_bridge import awaitable, blocking, io
from ..errors import ConnectionError, StrataError, SyncError
from ..rpc import messages
from ..rpc.gen import coordinator_pb2 as pb
from ..telemetry import EventLog
from ..types import Action, JobStatus, Membership, WorkerState, WorkerStatus, check_whole
from . import current_orchestrator
from .heartbeats import Heartbeats, cancel
from .local_process import LocalProcess, report_ended
from .member_calls import MemberCalls
from .membership import Identity
from .worker_config import WorkerConfig, trace_worker

log = EventLog("worker")

TELLING_SECONDS = 60.0
"""So long may leaving take because a coordinator that lost its state is being told what it knew."""
LAST_REPORT_SECONDS = 2.0
"""So long may leaving take because of what was reported last."""


class TrainingOrchestrator(MemberCalls):
    """A worker's side of the coordinator.

    All of these work::

        TrainingOrchestrator(WorkerConfig(coordinator_url="http://host:50051", gpu_count=8))
        TrainingOrchestrator(worker_id="w", coordinator_url="http://host:50051",
                             world_size=8, rank=0)
        TrainingOrchestrator()          # everything from the environment

    Constructing touches no network. `register` joins the job and starts heartbeats in the
    background; leaving a ``with`` block, `deregister` or the end of the process ends the
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
        """Take a `WorkerConfig`, or the same as arguments; the first may be the worker's id."""
        if isinstance(config, str):
            config, worker_id = None, config
        if config is not None and not isinstance(config, WorkerConfig):
            raise TypeError(f"config must be a WorkerConfig, not {type(config).__name__}")
        given: dict[str, Any] = {
            "coordinator_url": coordinator_url,
            "world_size": world_size,
            "rank": rank,
            "worker_id": worker_id,
            "job": job,
            "gpu_count": gpu_count,
            "heartbeat_interval_ms": heartbeat_interval_ms,
        }
        chosen = {name: value for name, value in given.items() if value is not None}
        super().__init__(replace(config or WorkerConfig(), **chosen).resolved())
        self._heartbeats = Heartbeats()
        self._registration = pb.WorkerInfo()
        """What this worker registered with."""
        self._returning = asyncio.Lock()
        self._telling: asyncio.Task[None] | None = None
        """Tells a coordinator that has lost its state what it knew."""

    # Joining and leaving

    @awaitable
    async def register_worker(
        self,
        /,
        ip: str | None = None,
        port: int = 0,
        gpu_count: int | None = None,
        memory_bytes: int | None = None,
        **metadata: object,
    ) -> str:
        """Join the job and start heartbeats; returns the assigned worker id.

        Waits for the coordinator (10 s for one that has never answered), and for a free rank when
        the job is full (60 s); ``connect_timeout_ms`` sets both. Registering again is how a worker
        that was declared dead comes back.
        """
        if self.is_registered:
            return self.identity.worker_id
        await self._stop_heartbeats()
        trace_worker()
        config, own = self.config, LocalProcess.own()
        request = pb.WorkerInfo(
            worker_id=config.worker_id or "",
            hostname=ip or socket.gethostname(),
            port=check_whole("port", port, most=65535),
            gpu_count=config.gpu_count if gpu_count is None else gpu_count,
            memory_bytes=config.memory_bytes if memory_bytes is None else memory_bytes,
            metadata={**config.metadata, **{key: str(value) for key, value in metadata.items()}},
            job=self.job,
            rank=config.rank,
            world_size=config.world_size or 0,
            session=secrets.token_hex(16),
            process=f"{os.getpid()}@{socket.gethostname()}",
            attempt=config.attempt or 0,
            state_id=self._state_id,
            machine=own.machine,
            pid=own.pid,
            process_started=own.started,
        )
        await report_ended(self._channel, self.job, own, config.registration_seconds)
        reply = await self._channel.call(
            "RegisterWorker",
            request,
            pb.WorkerRegistration,
            patience=config.registration_seconds,
        )
        self._registration = request
        self._enter(reply)
        self._told = reply.generation
        self._heartbeats.start(self)
        return reply.worker_id

    register = blocking(register_worker)

    async def _come_back(self, identity: Identity, why: SyncError) -> None:
        """Register again, under the same id and rank, with a coordinator that lost its state.

        What the program is told of stays as it was: its next barrier says that the membership has
        changed. Raises when a live process has taken the id or rank meanwhile.
        """
        async with self._returning:
            if self._identity is not identity:
                return
            log.error(
                "worker.coordinator_lost_its_state",
                worker=identity.worker_id,
                rank=identity.rank,
                reason=str(why),
            )
            await self._refuse_to_displace(identity, why)
            request = pb.WorkerInfo()
            request.CopyFrom(self._registration)
            request.worker_id, request.rank = identity.worker_id, identity.rank
            request.session, request.state_id = secrets.token_hex(16), self._state_id
            request.previous_incarnation = identity.incarnation
            request.previous_generation = self.generation
            request.previous_attempts = self._attempts_known
            reply = await self._channel.call(
                "RegisterWorker",
                request,
                pb.WorkerRegistration,
                patience=self.config.registration_seconds,
            )
            if self._identity is not identity:
                return  # it has left meanwhile
            self._actions_lost = {action.action_id for action in self.actions}
            self._enter(reply)
        self._telling = asyncio.get_running_loop().create_task(
            self._tell_again(), context=contextvars.Context()
        )

    async def _refuse_to_displace(self, identity: Identity, why: SyncError) -> None:
        asked = [
            pb.StatusRequest(job=self.job, from_rank=identity.rank, limit=1),
            pb.StatusRequest(job=self.job, worker_id=identity.worker_id),
        ]
        for request in asked:
            for status in await self._workers(request):
                same = status.rank == identity.rank or status.worker_id == identity.worker_id
                own = status.process == self._registration.process
                if same and not own and status.membership == Membership.LIVE:
                    raise _taken(status, self.job) from why

    async def _tell_again(self) -> None:
        """Tell the coordinator what this process had told the one that lost its state."""
        try:
            await self._tell_commits()
        except StrataError as exc:
            log.error("worker.not_told_again", worker=self.worker_id, error=str(exc))
        await current_orchestrator.tell_again(self)

    @awaitable
    async def rejoin_async(self) -> str:
        """Register again, as a worker that was declared dead, or whose coordinator began anew.

        A live process that has taken this worker's rank or id meanwhile is not displaced: two that
        displaced each other would do so for ever. Then it raises `SyncError`.
        """
        if self._fence is not None and (successor := await self._successor()) is not None:
            raise _taken(successor, self.job) from self._fence
        return await self.register_worker()

    rejoin = blocking(rejoin_async)

    async def _successor(self) -> WorkerStatus | None:
        """The live member that has the rank, or the id, which this worker was told to take.

        Without either it takes what is free, and gets into nobody's way.
        """
        asked, incarnation = self.config, self._identity and self._identity.incarnation
        requests = []
        if asked.rank is not None:
            requests.append(pb.StatusRequest(job=self.job, from_rank=asked.rank, limit=1))
        if asked.worker_id is not None:
            requests.append(pb.StatusRequest(job=self.job, worker_id=asked.worker_id))
        for request in requests:
            for status in await self._workers(request):
                named = asked.rank == status.rank or asked.worker_id == status.worker_id
                alive = status.membership == Membership.LIVE
                if named and alive and status.incarnation != incarnation:
                    return status
        return None

    async def _workers(self, request: pb.StatusRequest) -> list[WorkerStatus]:
        patience = self.config.registration_seconds
        try:
            reply = await self._channel.call("GetStatus", request, pb.JobStatus, patience=patience)
        except ConnectionError:
            raise
        except StrataError:
            return []  # there is no such job, or no such worker
        return [messages.worker_status(worker) for worker in reply.workers]

    def _enter(self, reply: pb.WorkerRegistration) -> None:
        super()._enter(reply)
        self._heartbeats.enter(reply.generation)
        current_orchestrator.enter(self)
        log.info(
            "worker.registered",
            worker=reply.worker_id,
            rank=reply.rank,
            incarnation=reply.incarnation,
            generation=reply.generation,
        )

    @awaitable
    async def deregister_worker(self, reason: str = "") -> None:
        """Leave the job. Does nothing when this worker is not a member.

        Without a ``reason`` it waits for saves that were begun as a member: they are committed
        through it.
        """
        if not reason and self.is_registered:
            await self._let_saves_end()
        await self._end_telling(TELLING_SECONDS if not reason else LAST_REPORT_SECONDS)
        current_orchestrator.leave(self)
        await self._stop_heartbeats()
        await self._send_last_report()
        identity, self._identity = self._identity, None
        try:
            if identity is not None and self._fence is None:
                await self._say_goodbye(identity, reason)
        finally:
            await self._channel.close()

    deregister = blocking(deregister_worker)

    async def _end_telling(self, seconds: float) -> None:
        """Let what is being told again be told, for so long."""
        telling = self._telling
        if telling is not None:
            await asyncio.wait({telling}, timeout=seconds)

    async def _send_last_report(self) -> None:
        """Send what was reported since the last heartbeat: nobody asks for it later."""
        if self._identity is None or self._fence is not None:
            return
        if not self._heartbeats.has_unsent(self):
            return
        with contextlib.suppress(StrataError, TimeoutError):
            await asyncio.wait_for(self.heartbeat(), LAST_REPORT_SECONDS)

    async def _say_goodbye(self, identity: Identity, reason: str) -> None:
        request = pb.DeregisterRequest(
            job=identity.job,
            worker_id=identity.worker_id,
            incarnation=identity.incarnation,
            reason=reason,
            state_id=self._state_id,
        )
        with contextlib.suppress(SyncError):
            await self._channel.call(
                "DeregisterWorker", request, pb.DeregisterResponse, patience=5.0
            )

    def leave(self, reason: str, seconds: float) -> None:
        """Deregister, for at most ``seconds``; a coordinator that is away misses the heartbeats."""
        if self._process != os.getpid() or io.is_current():
            return
        worker = self.worker_id
        future = io.submit(self.deregister_worker(reason))
        try:
            future.result(timeout=seconds)
        except (concurrent.futures.TimeoutError, StrataError) as exc:
            future.cancel()
            log.warning("worker.goodbye_failed", worker=worker, error=repr(exc))

    # Heartbeats

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
        """Say how far this worker is; the next heartbeat carries it, at no cost here.

        Where ``state`` is not given, the calls of this worker tell it: waiting in barriers, saving,
        loading, else training from the first step or batch on. ``step_seconds`` is how long one
        of the last steps took; by it the coordinator tells who is slower than the others.
        ``samples_used`` is how many were since the last report; from their sum the coordinator
        tells how many the job uses in a second, else from what loaders hand out.
        """
        if loss is not None:
            metrics["loss"] = loss
        if step is not None:
            self.activity.trains()
        self.reported = self.reported.updated(
            step, epoch, state, metrics, step_seconds, int(samples_used)
        )

    def on_heartbeat(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` after each heartbeat that told of other members or actions.

        It runs on the I/O thread and must not block. What it raises is logged.
        """
        self._heartbeats.on_change(listener)

    @awaitable
    async def heartbeat(self) -> None:
        """Send a heartbeat at once; they are sent by themselves in the background too."""
        await self._heartbeats.send(self)

    beat = blocking(heartbeat, brief=True)

    @property
    def actions(self) -> tuple[Action, ...]:
        """What is asked of the job and not done yet, as the last heartbeat said."""
        return self._heartbeats.actions

    async def _stop_heartbeats(self) -> None:
        telling, self._telling = self._telling, None
        await self._heartbeats.stop()
        await cancel(telling)

    def listen_for_others(self) -> None:
        """Warn of members that share the data with this one and are silent.

        On the I/O thread; once per registration. A member that was killed counts until its
        heartbeats are missed, and what is its part is read by nobody.
        """
        self._heartbeats.watch_others(self)

    # Observation

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
        """How many members the job has at the moment."""
        return (await self._status()).live_workers

    live_workers = blocking(live_workers_async, brief=True)

    @awaitable
    async def are_waiting_async(self, barrier_id: str, others: int) -> bool:
        """Whether all live members but so many wait at a barrier, and there are such."""
        status = await self._status()
        arrived = sum(b.arrived for b in status.barriers if b.barrier_id == barrier_id)
        return 0 < status.live_workers - others <= arrived

    async def _status(self) -> JobStatus:
        """The job, with this worker alone."""
        try:
            return await self._status_of_itself()
        except ConnectionError:
            raise
        except StrataError:
            # A coordinator that has lost its state knows of neither; a heartbeat is told so.
            await self.heartbeat()
            return await self._status_of_itself()

    async def _status_of_itself(self) -> JobStatus:
        identity = self.identity
        request = pb.StatusRequest(job=identity.job, worker_id=identity.worker_id)
        reply = await self.call("GetStatus", request, pb.JobStatus)
        status = messages.worker_status(reply.workers[0])
        if status.incarnation != identity.incarnation:
            async with self._returning:
                pass  # it may be coming back to a coordinator that lost its state
            if self._identity is not identity:
                return await self._status_of_itself()
            superseded = SyncError(
                f"worker {identity.worker_id!r} was registered again by {status.process}: stop "
                "this process, or call register() again",
                reason="superseded",
                generation=reply.generation,
            )
            self._be_fenced(superseded)
            raise superseded
        return messages.job_status(reply, [status])

    def _be_fenced(self, error: SyncError) -> None:
        super()._be_fenced(error)
        current_orchestrator.leave(self)

    # Context managers

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self.goodbye_may_fail():
            self.deregister(_reason(error))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self.goodbye_may_fail():
            await self.deregister_worker(_reason(error))

    @contextlib.contextmanager
    def goodbye_may_fail(self) -> Iterator[None]:
        """Leaving a block succeeds without the coordinator, which will miss the heartbeats."""
        worker = self.worker_id
        try:
            yield
        except ConnectionError as exc:
            log.warning("worker.goodbye_failed", worker=worker, error=repr(exc))

    def __repr__(self) -> str:
        state = "registered" if self.is_registered else "not registered"
        return f"<TrainingOrchestrator {self.worker_id or '?'} of job {self.job!r}, {state}>"


def _reason(error: BaseException | None) -> str:
    return "" if error is None else f"failed: {type(error).__name__}"


def _taken(status: WorkerStatus, job: str) -> SyncError:
    """The refusal to displace a live process."""
    return SyncError(
        f"another process ({status.process}) has registered as {status.worker_id!r}, rank "
        f"{status.rank} of job {job!r}, and is live: this one ends. Give each worker a rank of its "
        "own (RANK, rank=), or this program another job (STRATA_JOB, job=)",
        reason="superseded",
    )
