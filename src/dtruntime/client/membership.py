"""A worker's membership in a job: registration, fenced calls, and leaving.

A coordinator may come back without its state (an empty data directory, a restored copy). A call
then fails with `ForeignStateError`; the member registers again under its old id and rank, and
everything that this process had reported is replayed (see ``current_orchestrator``).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import os
import secrets
import socket
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from google.protobuf.message import Message

from .._sync_bridge import awaitable, blocking, io
from ..config import split_address
from ..errors import ConnectionError, StrataError, SyncError
from ..rpc import messages
from ..rpc.channel import Channel
from ..rpc.gen import coordinator_pb2 as pb
from ..rpc.status_codes import ForeignStateError
from ..telemetry import EventLog
from ..types import Action, Membership, WorkerStatus, check_whole
from . import current_orchestrator
from .heartbeats import Activity, Heartbeats, WorkerReport, cancel, in_background
from .local_process import LocalProcess, report_ended
from .worker_config import WorkerConfig, trace_worker

log = EventLog("worker")

R = TypeVar("R", bound=Message)

REPLAY_SECONDS = 60.0
"""How long leaving waits for a replay to a coordinator that lost its state."""
LAST_REPORT_SECONDS = 2.0
"""How long leaving waits for the last report to be sent."""
SAVES_SECONDS = 600.0
"""How long leaving waits for saves to be committed."""

CALLER_FIELDS = ("reported_by", "requested_by", "completed_by")
"""Fields that name the calling member, where ``worker_id`` names another one, or none."""

ANYBODY = -1
"""Stands for the rank of a lost member that is not known."""

Tickets = Iterator[int]
_tickets = partial(itertools.count, 1)


@dataclass(frozen=True, slots=True)
class Identity:
    """What registration gave this worker; every call carries it."""

    job: str
    worker_id: str
    rank: int
    incarnation: int
    world_size: int
    heartbeat_interval: float
    heartbeat_timeout: float
    """A member that is silent for this many seconds is declared dead."""
    barrier_tickets: Tickets = field(default_factory=_tickets)
    save_tickets: Tickets = field(default_factory=_tickets)

    @property
    def silent_after(self) -> float:
        """A live member is heard at least once in this many seconds."""
        return self.heartbeat_timeout / 2 + self.heartbeat_interval


class StateLostError(SyncError):
    """The coordinator lost its state during a call that must not be repeated in another state."""


class JobMember:
    """A member of a job: its identity, the calls that carry it, and its life cycle."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        """The settings, completed from the environment."""
        self.activity = Activity()
        self.reported = WorkerReport()
        self.waited_seconds = 0.0
        """Total time that calls have waited for other workers."""
        self._channel = Channel(
            config.coordinator_url or "", connect_timeout=config.connect_seconds
        )
        self._heartbeats = Heartbeats()
        self._identity: Identity | None = None
        self._fence: SyncError | None = None
        self._process = os.getpid()
        self._registration = pb.WorkerInfo()
        """What this worker registered with."""
        self._state_id = ""
        """The coordinator's state that this worker is registered in."""
        self._program_generation = 0
        """The newest generation that the program knows of."""
        self._newest_generation = 0
        self._loss_generation = 0
        self._lost_ranks: dict[int, int] = {}
        """The generation that the last known loss of each rank began."""
        self.known_losses = 0
        """The generation up to which this worker knows who was lost."""
        self._attempts = 0
        """The highest number of a checkpoint attempt that this worker knows of."""
        self._lost_actions: set[str] = set()
        """Ids of actions that a coordinator forgot with its state."""
        self._resumes: dict[str, tuple[int, int]] = {}
        self._saves: set[concurrent.futures.Future[Any]] = set()
        """Saves to be committed through this member."""
        self._returning = asyncio.Lock()
        self._replaying: asyncio.Task[None] | None = None

    @property
    def identity(self) -> Identity:
        """Rank, incarnation and the rest; raises when this worker is not a member."""
        if self._fence is not None:
            raise self._fence
        if self._process != os.getpid():
            raise StrataError(
                f"this worker was registered by process {self._process}, not by this one "
                f"({os.getpid()}): a forked child is not a member; pass it plain data"
            )
        if self._identity is None:
            raise StrataError("this worker is not registered: call register() first")
        return self._identity

    @property
    def worker_id(self) -> str:
        """The assigned id; before registration, the requested one."""
        return self._identity.worker_id if self._identity else self.config.worker_id or ""

    @property
    def rank(self) -> int:
        """This worker's rank."""
        return self.identity.rank

    @property
    def job(self) -> str:
        """The job that this worker belongs to."""
        return self.config.job or ""

    @property
    def generation(self) -> int:
        """The newest generation of the membership that this worker has seen."""
        return max(self._newest_generation, self._program_generation)

    @property
    def lost_generation(self) -> int:
        """The newest generation known to have begun because a member was lost or left."""
        return self._loss_generation

    def losses_since(self, generation: int) -> frozenset[int]:
        """The ranks whose holders were lost or left after a generation, as far as is known.

        `ANYBODY` among them stands for losses of which the coordinator keeps no details.
        """
        if self._loss_generation <= generation:
            return frozenset()
        return frozenset(rank for rank, lost in self._lost_ranks.items() if lost > generation)

    @property
    def heartbeat_timeout_seconds(self) -> float:
        """How long a member may be silent before it is declared dead; 0 before registration."""
        return self._identity.heartbeat_timeout if self._identity else 0.0

    @property
    def state_id(self) -> str:
        """Identifies the coordinator's state that this worker is registered in."""
        return self._state_id

    @property
    def coordinator_url(self) -> str:
        """The coordinator's address."""
        return self._channel.url

    @property
    def coordinator_host(self) -> str:
        """The coordinator's host."""
        return split_address(self._channel.url)[0]

    @property
    def is_registered(self) -> bool:
        """Whether this worker is a member, as far as it knows."""
        return self._identity is not None and self._fence is None

    @property
    def is_replaced(self) -> bool:
        """Whether the coordinator declared this worker dead or gave its rank to another."""
        return self._fence is not None

    @property
    def actions(self) -> tuple[Action, ...]:
        """The job's pending actions, as of the last heartbeat."""
        return self._heartbeats.actions

    def described(self) -> dict[str, Any]:
        """Attributes for spans."""
        identity = self.identity
        return {
            "job": identity.job,
            "worker_id": identity.worker_id,
            "rank": identity.rank,
            "generation": self.generation,
        }

    def is_incarnation(self, number: int) -> bool:
        """Whether this worker is, or was until it was replaced, that incarnation."""
        return self._identity is not None and self._identity.incarnation == number

    def note_generation(self, generation: int) -> None:
        """Note a generation that the coordinator named."""
        self._newest_generation = max(self._newest_generation, generation)

    def note_losses(self, generation: int, losses: Iterable[pb.LostWorker]) -> None:
        """Note who was lost since `known_losses`, up to the last generation begun by a loss."""
        self._loss_generation = max(self._loss_generation, generation)
        if generation <= self.known_losses:
            return
        ranks = {loss.rank if loss.worker_id else ANYBODY: loss.generation for loss in losses}
        if max(ranks.values(), default=0) < generation:
            ranks[ANYBODY] = generation  # from a coordinator that does not name them
        self._lost_ranks |= ranks
        self.known_losses = generation

    def _generation_for(self, ranks: Collection[int] | None) -> int:
        """The generation up to which the program knows of losses: of anybody, or of some ranks."""
        if ranks is None:
            return self._program_generation
        lost = [
            generation
            for rank, generation in self._lost_ranks.items()
            if generation > self._program_generation and (rank in ranks or rank == ANYBODY)
        ]
        return max(self._program_generation, min(lost) - 1 if lost else self.known_losses)

    def count_resume(self, dataset_id: str) -> tuple[int, int]:
        """Note that a dataset is read from a loaded state on.

        Returns the generation and the number of such resumes in it: of two attempts at an epoch,
        the one with the higher pair is newer.
        """
        generation, count = self._resumes.get(dataset_id, (0, 0))
        newest = self.generation, count + 1 if generation == self.generation else 1
        self._resumes[dataset_id] = newest
        return newest

    def expect_commit(self, save: concurrent.futures.Future[Any]) -> None:
        """Do not leave before this save has ended: it is committed through this member."""
        self._saves.add(save)
        save.add_done_callback(self._saves.discard)

    # Calls

    async def call(
        self,
        method: str,
        request: Any,
        reply: type[R],
        *,
        hold: float | None = None,
        patience: float | None = None,
        repeat: bool = True,
    ) -> R:
        """A call that waits out an absence of the coordinator, and notices being fenced.

        If the coordinator lost its state, this worker registers again and repeats the call under
        its new identity; without ``repeat`` it raises `StateLostError` instead.
        """
        if patience is None:
            patience = self.config.outage_timeout_ms / 1000
        while True:
            identity = self._sign(request)
            try:
                try:
                    return await self._channel.call(
                        method, request, reply, patience=patience, hold=hold
                    )
                except ForeignStateError as exc:
                    if identity is None:
                        raise
                    await self._come_back(identity, exc)
            except SyncError as exc:
                # A refusal of an older identity says nothing about the present one.
                if identity and exc.reason == "superseded" and self._identity is identity:
                    self._be_fenced(exc)
                raise
            if not repeat:
                raise StateLostError(
                    f"the coordinator at {self._channel.url} has lost its state, and this worker "
                    "has registered again",
                    reason="membership_changed",
                    generation=self.generation,
                )

    def _sign(self, request: Any) -> Identity | None:
        """Fill in who calls, and in which state; None for requests that anybody may send.

        Only a request that names the state lets the coordinator tell a fence from a lost state.
        """
        fields = request.DESCRIPTOR.fields_by_name
        if "state_id" not in fields:
            return None
        identity = self.identity
        caller = next((name for name in CALLER_FIELDS if name in fields), "worker_id")
        setattr(request, caller, identity.worker_id)
        request.job = identity.job
        request.incarnation = identity.incarnation
        request.state_id = self._state_id
        return identity

    async def rest(self, seconds: float) -> None:
        """Wait for a coordinator that is away; returns early when it can be reached again."""
        await self._channel.rest(seconds)

    def _be_fenced(self, error: SyncError) -> None:
        if self._fence is None:
            self._fence = error
            log.error("worker.superseded", worker=self.worker_id, reason=str(error))
        current_orchestrator.leave(self)

    # Joining

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

        Waits for the coordinator (10 s if it has never answered), and for a free rank when the job
        is full (60 s); ``connect_timeout_ms`` sets both. A worker that was declared dead comes
        back by registering again.
        """
        if self.is_registered:
            return self.identity.worker_id
        await self._stop_background()
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
            process=f"{os.getpid()}@{socket.gethostname()}",
            attempt=config.attempt or 0,
            machine=own.machine,
            pid=own.pid,
            process_started=own.started,
        )
        await report_ended(self._channel, self.job, own, config.registration_seconds)
        reply = await self._send_registration(request)
        self._registration = request
        self._enter(reply)
        self._program_generation = self.known_losses = reply.generation
        self._loss_generation, self._lost_ranks = 0, {}
        self._heartbeats.start(self)
        return reply.worker_id

    register = blocking(register_worker)

    async def _send_registration(self, request: pb.WorkerInfo) -> pb.WorkerRegistration:
        request.session, request.state_id = secrets.token_hex(16), self._state_id
        patience = self.config.registration_seconds
        return await self._channel.call(
            "RegisterWorker", request, pb.WorkerRegistration, patience=patience
        )

    def _enter(self, reply: pb.WorkerRegistration) -> None:
        """Take on the identity that a registration gave."""
        interval = self.config.heartbeat_interval_ms or reply.heartbeat_interval_ms
        if interval * 2 > reply.heartbeat_timeout_ms:
            log.warning(
                "heartbeat.interval_shortened",
                asked_ms=interval,
                timeout_ms=reply.heartbeat_timeout_ms,
            )
            interval = reply.heartbeat_timeout_ms // 3
        self._identity = Identity(
            reply.job,
            reply.worker_id,
            reply.rank,
            reply.incarnation,
            reply.world_size,
            interval / 1000,
            reply.heartbeat_timeout_ms / 1000,
        )
        self._process, self._fence, self._state_id = os.getpid(), None, reply.state_id
        self._newest_generation = reply.generation
        self._heartbeats.reset(reply.generation)
        current_orchestrator.enter(self)
        log.info(
            "worker.registered",
            worker=reply.worker_id,
            rank=reply.rank,
            incarnation=reply.incarnation,
            generation=reply.generation,
        )

    @awaitable
    async def rejoin_async(self) -> str:
        """Register again after being declared dead, or with a coordinator that began anew.

        Raises `SyncError` when a live process has taken this worker's rank or id meanwhile: two
        workers that displaced each other would do so for ever. A worker configured with neither
        takes whatever is free.
        """
        if self._fence is not None:
            for holder in await self._live_holders(self.config.rank, self.config.worker_id):
                if not self.is_incarnation(holder.incarnation):
                    raise _taken(holder, self.job) from self._fence
        return await self.register_worker()

    rejoin = blocking(rejoin_async)

    async def _come_back(self, identity: Identity, why: SyncError) -> None:
        """Register again, under the same id and rank, with a coordinator that lost its state.

        The program learns of it at its next barrier, as a changed membership. Raises when a live
        process has taken the id or rank meanwhile.
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
            for holder in await self._live_holders(identity.rank, identity.worker_id):
                if holder.process != self._registration.process:
                    raise _taken(holder, self.job) from why
            request = pb.WorkerInfo()
            request.CopyFrom(self._registration)
            request.worker_id, request.rank = identity.worker_id, identity.rank
            request.previous_incarnation = identity.incarnation
            request.previous_generation = self.generation
            request.previous_attempts = self._attempts
            reply = await self._send_registration(request)
            if self._identity is not identity:
                return  # it has left meanwhile
            self._lost_actions = {action.action_id for action in self.actions}
            self._enter(reply)
        self._replaying = in_background(current_orchestrator.replay(self))

    async def _live_holders(self, rank: int | None, worker_id: str | None) -> list[WorkerStatus]:
        """The live members that hold a rank or an id."""
        requests = []
        if rank is not None:
            requests.append(pb.StatusRequest(job=self.job, from_rank=rank, limit=1))
        if worker_id is not None:
            requests.append(pb.StatusRequest(job=self.job, worker_id=worker_id))
        workers: list[WorkerStatus] = []
        for request in requests:
            try:
                reply = await self._channel.call(
                    "GetStatus",
                    request,
                    pb.JobStatus,
                    patience=self.config.registration_seconds,
                )
            except ConnectionError:
                raise
            except StrataError:
                continue  # there is no such job or worker
            workers += [messages.worker_status(worker) for worker in reply.workers]
        return [
            worker
            for worker in workers
            if worker.membership == Membership.LIVE
            and (worker.rank == rank or worker.worker_id == worker_id)
        ]

    # Leaving

    @awaitable
    async def deregister_worker(self, reason: str = "") -> None:
        """Leave the job; does nothing when this worker is not a member.

        Without a ``reason`` it first waits for saves under way, which are committed through this
        member.
        """
        if not reason and self.is_registered:
            await self._wait_for_saves()
        if self._replaying is not None:
            seconds = LAST_REPORT_SECONDS if reason else REPLAY_SECONDS
            await asyncio.wait({self._replaying}, timeout=seconds)
        current_orchestrator.leave(self)
        await self._stop_background()
        if self.is_registered and self._heartbeats.has_unsent(self):
            with contextlib.suppress(StrataError, TimeoutError):
                await asyncio.wait_for(self._heartbeats.send(self), LAST_REPORT_SECONDS)
        identity, self._identity = self._identity, None
        try:
            if identity is not None and self._fence is None:
                await self._say_goodbye(identity, reason)
        finally:
            await self._channel.close()

    deregister = blocking(deregister_worker)

    async def _wait_for_saves(self) -> None:
        saves = [asyncio.wrap_future(save) for save in list(self._saves)]
        if saves:
            done, _ = await asyncio.wait(saves, timeout=SAVES_SECONDS)
            for save in done:
                save.exception()  # the handle raises it

    async def _stop_background(self) -> None:
        replaying, self._replaying = self._replaying, None
        await self._heartbeats.stop()
        await cancel(replaying)

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
        """Deregister, for at most ``seconds``; without an answer, heartbeats just stop."""
        if self._process != os.getpid() or io.is_current():
            return
        worker = self.worker_id
        future = io.submit(self.deregister_worker(reason))
        try:
            future.result(timeout=seconds)
        except (concurrent.futures.TimeoutError, StrataError) as exc:
            future.cancel()
            log.warning("worker.goodbye_failed", worker=worker, error=repr(exc))

    @contextlib.contextmanager
    def goodbye_may_fail(self) -> Iterator[None]:
        """Leave even if the coordinator is away: it will miss the heartbeats."""
        worker = self.worker_id
        try:
            yield
        except ConnectionError as exc:
            log.warning("worker.goodbye_failed", worker=worker, error=repr(exc))


def _taken(holder: WorkerStatus, job: str) -> SyncError:
    return SyncError(
        f"another process ({holder.process}) has registered as {holder.worker_id!r}, rank "
        f"{holder.rank} of job {job!r}, and is live: this one ends. Give each worker a rank of its "
        "own (RANK, rank=), or this program another job (STRATA_JOB, job=)",
        reason="superseded",
    )
