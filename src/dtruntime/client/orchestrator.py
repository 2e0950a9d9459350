"""A worker's membership in a job: registration, heartbeats, barriers, commits."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import math
import os
import random
import secrets
import socket
from collections.abc import Iterator
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from .._loop import awaitable, blocking, io
from ..errors import (
    CheckpointAbortedError,
    ConnectionError,
    StorageError,
    StrataError,
    SyncError,
)
from ..rpc.channel import Channel
from ..rpc.gen import coordinator_pb2 as pb
from ..telemetry import EventLog
from ..types import CheckpointInfo, WorkerState, WorkerStatus, check_id, check_whole
from . import current, wire
from .membership import Identity, Report, heartbeat_delays
from .resources import ResourceProbe
from .settings import WorkerConfig

log = EventLog("worker")


class TrainingOrchestrator:
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
        self.config = replace(config or WorkerConfig(), **chosen).resolved()
        self._channel = Channel(self.config.coordinator_url or "")
        self._identity: Identity | None = None
        self._fence: SyncError | None = None
        self._report = Report()
        self._told = 0
        self._seen = 0
        self._waiting = 0
        self._tickets = itertools.count(1)
        self._saves = itertools.count(1)
        self._heartbeats: asyncio.Task[None] | None = None
        self._probe: ResourceProbe | None = None
        self._process = os.getpid()
        self._resumes: dict[str, tuple[int, int]] = {}

    # Who this worker is

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
        """The id that the coordinator assigned, or the one asked for before registration."""
        return self._identity.worker_id if self._identity else self.config.worker_id or ""

    @property
    def rank(self) -> int:
        """This worker's rank."""
        return self.identity.rank

    @property
    def generation(self) -> int:
        """The newest number of the membership that this worker has seen."""
        return max(self._seen, self._told)

    def count_resume(self, dataset_id: str) -> tuple[int, int]:
        """Note that a dataset is read from a loaded state on.

        Returns the generation, and how often that was so in it: of two attempts at an epoch, the
        one with the higher pair is the newer.
        """
        generation, count = self._resumes.get(dataset_id, (0, 0))
        newest = self.generation, count + 1 if generation == self.generation else 1
        self._resumes[dataset_id] = newest
        return newest

    @property
    def job(self) -> str:
        """The job that this worker belongs to."""
        return self.config.job or ""

    @property
    def is_registered(self) -> bool:
        """Whether this worker is a member, as far as it knows."""
        return self._identity is not None and self._fence is None

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

        Waits up to ``connect_timeout_ms`` for the coordinator, and for a free rank when the
        job is full. Registering again is how a worker that was declared dead comes back.
        """
        if self.is_registered:
            return self.identity.worker_id
        await self._stop_heartbeats()
        config = self.config
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
        )
        patience = config.connect_timeout_ms / 1000
        reply = await self._channel.call(
            "RegisterWorker", request, pb.WorkerRegistration, patience=patience
        )
        self._enter(reply)
        return reply.worker_id

    register = blocking(register_worker)

    def _enter(self, reply: pb.WorkerRegistration) -> None:
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
        )
        self._process = os.getpid()
        self._fence = None
        self._told = self._seen = reply.generation
        self._tickets = itertools.count(1)
        self._saves = itertools.count(1)
        self._heartbeats = asyncio.get_running_loop().create_task(self._keep_beating())
        current.enter(self)
        log.info(
            "worker.registered",
            worker=reply.worker_id,
            rank=reply.rank,
            incarnation=reply.incarnation,
            generation=reply.generation,
        )

    @awaitable
    async def deregister_worker(self, reason: str = "") -> None:
        """Leave the job. Does nothing when this worker is not a member."""
        current.leave(self)
        await self._stop_heartbeats()
        identity, self._identity = self._identity, None
        try:
            if identity is not None and self._fence is None:
                await self._say_goodbye(identity, reason)
        finally:
            await self._channel.close()

    deregister = blocking(deregister_worker)

    async def _say_goodbye(self, identity: Identity, reason: str) -> None:
        request = pb.DeregisterRequest(
            job=identity.job,
            worker_id=identity.worker_id,
            incarnation=identity.incarnation,
            reason=reason,
        )
        with contextlib.suppress(SyncError):
            await self._channel.call(
                "DeregisterWorker", request, pb.DeregisterResponse, patience=5.0
            )

    def leave_at_exit(self, seconds: float) -> None:
        """Say goodbye when the interpreter ends, for at most ``seconds``."""
        if self._process != os.getpid() or io.is_current():
            return
        future = io.submit(self.deregister_worker("process ended"))
        try:
            future.result(timeout=seconds)
        except (concurrent.futures.TimeoutError, StrataError) as exc:
            log.warning("worker.goodbye_failed", worker=self.worker_id, error=repr(exc))

    # Heartbeats

    def report(
        self,
        step: int | None = None,
        epoch: int | None = None,
        state: WorkerState | str | None = None,
        loss: float | None = None,
        **metrics: float,
    ) -> None:
        """Say how far this worker is; the next heartbeat carries it, at no cost here."""
        if loss is not None:
            metrics["loss"] = loss
        self._report = self._report.updated(step, epoch, state, metrics)

    @awaitable
    async def heartbeat(self) -> None:
        """Send a heartbeat at once; they are sent by themselves in the background too."""
        identity, report = self.identity, self._report
        if self._probe is None:
            self._probe = ResourceProbe()
        request = pb.HeartbeatRequest(
            worker_id=identity.worker_id,
            job=identity.job,
            incarnation=identity.incarnation,
            state=wire.state(WorkerState.WAITING if self._waiting else report.state),
            step=report.step,
            epoch=report.epoch,
            resources=wire.resources(self._probe.sample()),
            metrics=dict(report.metrics),
        )
        with self._fencing():
            reply = await self._channel.call(
                "Heartbeat", request, pb.HeartbeatResponse, patience=0.0
            )
        self._seen = max(self._seen, reply.generation)

    async def _keep_beating(self) -> None:
        """Send heartbeats until this worker leaves or learns that it is not a member."""
        interval = self.identity.heartbeat_interval
        delays = heartbeat_delays(interval)
        while True:
            try:
                await self.heartbeat()
            except SyncError:
                return
            except ConnectionError:
                await asyncio.sleep(next(delays))
                continue
            except Exception as exc:
                log.error("heartbeat.failed", worker=self.worker_id, error=repr(exc))
            delays = heartbeat_delays(interval)
            await asyncio.sleep(interval * random.uniform(0.9, 1.0))

    async def _stop_heartbeats(self) -> None:
        task, self._heartbeats = self._heartbeats, None
        if task is not None and task is not asyncio.current_task():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    # Barriers

    @awaitable
    async def wait_barrier(self, barrier_id: str, timeout_ms: int = 30_000) -> None:
        """Wait until every member of the job has reached this barrier.

        Raises `SyncError`: with reason ``"membership_changed"`` as soon as a member is lost,
        ``"timeout"`` when somebody has not come within ``timeout_ms``, ``"superseded"`` when
        this worker itself is no longer a member. Time during which the coordinator is away
        does not count.
        """
        check_id("barrier", barrier_id)
        identity = self.identity
        request = pb.BarrierRequest(
            barrier_id=barrier_id,
            worker_id=identity.worker_id,
            job=identity.job,
            incarnation=identity.incarnation,
            generation=self._told,
            ticket=next(self._tickets),
        )
        self._waiting += 1
        try:
            with self._fencing():
                reply = await self._channel.call(
                    "WaitBarrier",
                    request,
                    pb.BarrierResponse,
                    patience=self.config.outage_timeout_ms / 1000,
                    hold=_positive("timeout_ms", timeout_ms) / 1000,
                )
        finally:
            self._waiting -= 1
        self._told = max(self._told, reply.generation)
        wire.raise_barrier_outcome(barrier_id, timeout_ms, reply)

    barrier = blocking(wait_barrier)

    # Checkpoint commits

    @awaitable
    async def begin_checkpoint_async(self, step: int) -> str:
        """The id under which all members save this step together.

        Every member calls this once for each save, before it writes, and then gives the id to
        `commit_checkpoint` with ``partial=True``. The members of one attempt get the same id,
        and no other attempt ever does: saving a step again, after a rollback or a failure, is
        another attempt. An attempt ends when a member is lost before its part is stored, or
        when a member begins the step again; `commit_checkpoint` then raises `StorageError`.
        """
        identity = self.identity
        request = pb.BeginCheckpointRequest(
            job=identity.job,
            worker_id=identity.worker_id,
            incarnation=identity.incarnation,
            step=check_whole("step", step),
            ticket=next(self._saves),
        )
        with self._fencing():
            reply = await self._channel.call(
                "BeginCheckpoint",
                request,
                pb.BeginCheckpointResponse,
                patience=self.config.outage_timeout_ms / 1000,
            )
        self._seen = max(self._seen, reply.generation)
        return reply.checkpoint_id

    begin_checkpoint = blocking(begin_checkpoint_async)

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
        have, and raises `StorageError` when a member is lost before that.
        """
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
        with self._fencing():
            reply = await self._channel.call(
                "NotifyCheckpoint",
                request,
                pb.CheckpointResponse,
                patience=self.config.outage_timeout_ms / 1000,
                hold=_positive("timeout_ms", timeout_ms) / 1000,
            )
        if reply.status == pb.CHECKPOINT_STATUS_ABORTED:
            raise CheckpointAbortedError(
                f"checkpoint {checkpoint_id!r} was not committed: {reply.detail}"
            )
        if reply.status == pb.CHECKPOINT_STATUS_PENDING:
            raise StorageError(
                f"checkpoint {checkpoint_id!r} was not committed within {timeout_ms} ms: ranks "
                f"{list(reply.missing_ranks)} have not stored their part"
            )

    commit_checkpoint = blocking(commit_checkpoint_async)

    @awaitable
    async def latest_checkpoint_async(self) -> CheckpointInfo | None:
        """The checkpoint of this job that was committed last, or ``None``."""
        request = pb.RecoveryRequest(job=self.job, worker_id=self.worker_id)
        patience = self.config.outage_timeout_ms / 1000
        reply = await self._channel.call(
            "GetLatestCheckpoint", request, pb.RecoveryInfo, patience=patience
        )
        return wire.checkpoint(reply.checkpoint) if reply.found else None

    latest_checkpoint = blocking(latest_checkpoint_async, brief=True)

    @awaitable
    async def get_status_async(self) -> WorkerStatus:
        """This worker as the coordinator sees it."""
        identity = self.identity
        request = pb.StatusRequest(job=identity.job, worker_id=identity.worker_id)
        patience = self.config.outage_timeout_ms / 1000
        with self._fencing():
            reply = await self._channel.call("GetStatus", request, pb.JobStatus, patience=patience)
        status = wire.worker_status(reply.workers[0])
        if status.incarnation != identity.incarnation:
            superseded = SyncError(
                f"worker {identity.worker_id!r} was registered again by {status.process}: stop "
                "this process, or call register() again",
                reason="superseded",
                generation=reply.generation,
            )
            self._be_fenced(superseded)
            raise superseded
        return status

    get_status = blocking(get_status_async, brief=True)

    # Fencing

    @contextlib.contextmanager
    def _fencing(self) -> Iterator[None]:
        try:
            yield
        except SyncError as exc:
            if exc.reason == "superseded":
                self._be_fenced(exc)
            raise

    def _be_fenced(self, error: SyncError) -> None:
        if self._fence is None:
            self._fence = error
            current.leave(self)
            log.error("worker.superseded", worker=self.worker_id, reason=str(error))

    # Context managers

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._goodbye_may_fail():
            self.deregister(_reason(error))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._goodbye_may_fail():
            await self.deregister_worker(_reason(error))

    @contextlib.contextmanager
    def _goodbye_may_fail(self) -> Iterator[None]:
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


def _positive(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}")
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite, not {value}")
    return float(value)
