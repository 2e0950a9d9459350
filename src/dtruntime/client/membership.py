"""What a member is, what it says of itself, and the connection that its calls go through."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import Message

from ..config import split_address
from ..errors import StrataError, SyncError
from ..rpc.channel import Channel
from ..rpc.gen import coordinator_pb2 as pb
from ..rpc.status_codes import ForeignStateError
from ..telemetry import EventLog
from ..types import LONGEST_WAIT_SECONDS, WorkerState, check_whole
from .worker_config import WorkerConfig

log = EventLog("worker")

R = TypeVar("R", bound=Message)

SPEAKERS = ("reported_by", "requested_by", "completed_by")
"""Fields that name the member that calls, where ``worker_id`` names another one, or none."""
METRICS_LIMIT = 64
METRIC_NAME_LENGTH = 128
"""With these a heartbeat stays within the size that the coordinator accepts."""


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
    """After so many seconds of silence a member is declared dead."""

    @property
    def silent_after(self) -> float:
        """A live member is heard at least once in this many seconds."""
        return self.heartbeat_timeout / 2 + self.heartbeat_interval


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What the program says, for the next heartbeat."""

    state: WorkerState | None = None
    """None: what it does is known by its calls alone."""
    step: int | None = None
    epoch: int | None = None
    metrics: tuple[tuple[str, float], ...] = ()
    step_seconds: float = 0.0
    """0: not reported."""
    samples: int = 0
    """How many were used in all; 0: not reported."""

    def updated(
        self,
        step: int | None,
        epoch: int | None,
        state: WorkerState | str | None,
        metrics: Mapping[str, float],
        step_seconds: float | None = None,
        samples: int = 0,
    ) -> WorkerReport:
        """A report with what is given replaced, ``samples`` added; metrics not given stay."""
        values = {**dict(self.metrics), **{name: float(x) for name, x in metrics.items()}}
        if len(values) > METRICS_LIMIT or any(len(name) > METRIC_NAME_LENGTH for name in values):
            raise ValueError(
                f"a worker reports at most {METRICS_LIMIT} metrics, with names of at most "
                f"{METRIC_NAME_LENGTH} characters; these would be {len(values)}"
            )
        for name in metrics:
            if any("\ud800" <= letter <= "\udfff" for letter in name):
                raise ValueError(f"the name of a metric must be text, not {name!r}")
        return WorkerReport(
            self.state if state is None else WorkerState(state),
            self.step if step is None else check_whole("step", step),
            self.epoch if epoch is None else check_whole("epoch", epoch),
            tuple(values.items()),
            self.step_seconds if step_seconds is None else _seconds(step_seconds),
            self.samples + check_whole("samples", samples),
        )


class Activity:
    """What a program does, as far as its calls show it; heartbeats carry it.

    A call that keeps the program is what it does: waiting for others, saving, loading. Between
    such calls it trains, once it has reported a step or got a batch, until the batches end.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: Counter[WorkerState] = Counter()
        self._trains = False
        self.epoch: int | None = None
        """The highest that a loader has come to."""
        self.samples = 0
        """How many loaders have handed out."""

    @contextmanager
    def doing(self, state: WorkerState) -> Iterator[None]:
        """The program is kept by a block that does this."""
        with self._lock:
            self._under_way[state] += 1
        try:
            yield
        finally:
            with self._lock:
                self._under_way[state] -= 1

    def state(self, said: WorkerState | None) -> WorkerState:
        """What the program does, where it says ``said`` of itself."""
        for kept in (WorkerState.WAITING, WorkerState.CHECKPOINTING, WorkerState.LOADING):
            if self.under_way(kept):
                return kept
        return said or (WorkerState.TRAINING if self._trains else WorkerState.IDLE)

    def under_way(self, state: WorkerState) -> int:
        """How many calls do this at the moment."""
        return self._under_way[state]

    def trains(self) -> None:
        """The program has something to train on, or says that it does."""
        self._trains = True

    # What a loader tells

    def fetching(self) -> AbstractContextManager[None]:
        """A block in which a batch is waited for."""
        return self.doing(WorkerState.LOADING)

    def handed_out(self, epoch: int, samples: int) -> None:
        """The program got a batch of an epoch."""
        self._trains = True
        with self._lock:
            self.samples += samples
            self._reached(epoch)

    def ended(self, epoch: int) -> None:
        """There are no more batches of an epoch."""
        self._trains = False
        with self._lock:
            self._reached(epoch + 1)

    def _reached(self, epoch: int) -> None:
        self.epoch = epoch if self.epoch is None else max(self.epoch, epoch)


def _seconds(value: float) -> float:
    seconds = float(value)
    if not 0 <= seconds < math.inf:
        raise ValueError(f"step_seconds must be a time in seconds, not {value}")
    return seconds


class StateLostError(SyncError):
    """The coordinator has lost its state during a call that must not be repeated in another."""


class MemberConnection:
    """A worker's identity, and the calls that carry it."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        """The settings, with what the environment says."""
        self._channel = Channel(
            config.coordinator_url or "", connect_timeout=config.connect_seconds
        )
        self._identity: Identity | None = None
        self._fence: SyncError | None = None
        self._state_id = ""
        """The coordinator's state that this worker was registered in."""
        self._told = 0
        """The newest generation that the program was told of."""
        self._seen = 0
        self._lost = 0
        self.activity = Activity()
        """What the program does, as far as its calls show it."""
        self.reported = WorkerReport()
        """What the program says."""
        self.waited_seconds = 0.0
        """How long calls have waited for other workers, in all."""
        self._process = os.getpid()
        self._resumes: dict[str, tuple[int, int]] = {}

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

    @property
    def lost_generation(self) -> int:
        """The newest generation known to have begun because a member was lost or left."""
        return self._lost

    @property
    def heartbeat_timeout_seconds(self) -> float:
        """After how long a silent member is declared dead; 0 before this worker has registered."""
        return self._identity.heartbeat_timeout if self._identity else 0.0

    @property
    def job(self) -> str:
        """The job that this worker belongs to."""
        return self.config.job or ""

    @property
    def state_id(self) -> str:
        """What tells the coordinator's state, in which this worker is registered, from others."""
        return self._state_id

    @property
    def coordinator_url(self) -> str:
        """The address that the coordinator is reached at."""
        return self._channel.url

    @property
    def coordinator_host(self) -> str:
        """The host that the coordinator is reached at."""
        return split_address(self._channel.url)[0]

    @property
    def is_registered(self) -> bool:
        """Whether this worker is a member, as far as it knows."""
        return self._identity is not None and self._fence is None

    @property
    def is_replaced(self) -> bool:
        """Whether the coordinator has declared this worker dead, or given its place to another."""
        return self._fence is not None

    def described(self) -> dict[str, Any]:
        """Who this member is, for spans."""
        identity = self.identity
        return {
            "job": identity.job,
            "worker_id": identity.worker_id,
            "rank": identity.rank,
            "generation": self.generation,
        }

    def is_incarnation(self, number: int) -> bool:
        """Whether this worker is, or was until it was replaced, a certain incarnation."""
        return self._identity is not None and self._identity.incarnation == number

    def note_generation(self, generation: int, lost: int = 0) -> None:
        """Note of which membership the coordinator told, and of the last that began by a loss."""
        self._seen = max(self._seen, generation)
        self._lost = max(self._lost, lost)

    def count_resume(self, dataset_id: str) -> tuple[int, int]:
        """Note that a dataset is read from a loaded state on.

        Returns the generation, and how often that was so in it: of two attempts at an epoch, the
        one with the higher pair is the newer.
        """
        generation, count = self._resumes.get(dataset_id, (0, 0))
        newest = self.generation, count + 1 if generation == self.generation else 1
        self._resumes[dataset_id] = newest
        return newest

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
        """A call that rides through an absence of the coordinator, and notices the fence.

        Should the coordinator have lost its state, this worker registers again and repeats the
        call as what it is then; without ``repeat`` it raises `StateLostError` instead.
        """
        if patience is None:
            patience = self.config.outage_timeout_ms / 1000
        while True:
            identity = self._identity
            # Only a call that says of which state it is can tell a fence from a lost state.
            signed = self._sign(request)
            with self._fencing(identity) if signed else contextlib.nullcontext():
                try:
                    return await self._channel.call(
                        method, request, reply, patience=patience, hold=hold
                    )
                except ForeignStateError as exc:
                    if identity is None:
                        raise
                    await self._come_back(identity, exc)
            if not repeat:
                raise StateLostError(
                    f"the coordinator at {self._channel.url} has lost its state, and this worker "
                    "has registered again",
                    reason="membership_changed",
                    generation=self.generation,
                )

    async def rest(self, seconds: float) -> None:
        """Wait for a coordinator that is away, less when it can be reached again."""
        await self._channel.rest(seconds)

    def _sign(self, request: Any) -> bool:
        """Say as whom, and in which state, a member calls; false where there is no place for it."""
        fields = request.DESCRIPTOR.fields_by_name
        if self._identity is None or "state_id" not in fields:
            return False
        names = (name for name in SPEAKERS if name in fields)
        setattr(request, next(names, "worker_id"), self._identity.worker_id)
        request.incarnation = self._identity.incarnation
        request.state_id = self._state_id
        return True

    def _enter(self, reply: pb.WorkerRegistration) -> None:
        """Be what a registration gave."""
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
        self._process = os.getpid()
        self._fence = None
        self._state_id = reply.state_id
        self._seen = reply.generation

    async def _come_back(self, identity: Identity, why: SyncError) -> None:
        """Register again with a coordinator that has lost its state."""
        raise why

    @contextlib.contextmanager
    def _fencing(self, identity: Identity | None) -> Iterator[None]:
        """What is refused to an identity says nothing about one that was given since."""
        try:
            yield
        except SyncError as exc:
            if exc.reason == "superseded" and self._identity is identity:
                self._be_fenced(exc)
            raise

    def _be_fenced(self, error: SyncError) -> None:
        if self._fence is None:
            self._fence = error
            log.error("worker.superseded", worker=self.worker_id, reason=str(error))


def hold_seconds(timeout_ms: Any) -> float:
    """How long the coordinator may hold a call, by the caller's ``timeout_ms``: at most a day."""
    if not isinstance(timeout_ms, int | float) or isinstance(timeout_ms, bool):
        raise TypeError(f"timeout_ms must be a number, not {type(timeout_ms).__name__}")
    if not 0 < timeout_ms < math.inf:
        raise ValueError(f"timeout_ms must be positive and finite, not {timeout_ms}")
    return min(timeout_ms / 1000, LONGEST_WAIT_SECONDS)
