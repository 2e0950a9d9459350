"""The coordinator service: every gRPC method, independent of the transport."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

from google.protobuf.message import Message

from ..config import CoordinatorConfig
from ..errors import StorageError
from ..events import ALARMS
from ..rpc import decode, encode
from ..rpc.gen import coordinator_pb2 as pb
from ..rpc.messages import to_message
from ..rpc.methods import METHODS, SERVICE
from ..telemetry import EventLog, MethodStats, tracing
from ..telemetry.tracing import Span
from ..types import DEFAULT_JOB
from .limits import RateLimits
from .queries import Answer, Queries
from .state import HELD, Effect, Emit, Machine, Refused, Release
from .state import commands as c
from .store import SqliteStore

log = EventLog("coordinator")

STATED = {
    "Heartbeat": "worker_id",
    "DeregisterWorker": "worker_id",
    "ClaimSamples": "worker_id",
    "CommitSamples": "worker_id",
    "ReportCoverage": "worker_id",
    "WaitBarrier": "worker_id",
    "BeginCheckpoint": "worker_id",
    "NotifyCheckpoint": "worker_id",
    "AbandonCheckpoints": "worker_id",
    "ReportCheckpoints": "reported_by",
    "RequestAction": "requested_by",
    "CompleteAction": "completed_by",
}
"""Methods that members call, and the field of the request that names the member."""
COMMANDS: dict[str, Callable[[Any], c.Command]] = {
    "DeregisterWorker": decode.deregister,
    "ReportEndedProcesses": decode.report_ended,
    "CommitSamples": decode.commit,
    "RebalanceEpoch": decode.rebalance,
    "ReportCoverage": decode.report_coverage,
    "BeginCheckpoint": decode.begin_checkpoint,
    "AbandonCheckpoints": decode.abandon_checkpoints,
    "ReportCheckpoints": decode.report_checkpoints,
    "RequestAction": decode.request_action,
    "CompleteAction": decode.complete_action,
    "RemoveJob": decode.remove_job,
    "RemoveDataset": decode.remove_dataset,
}
"""Methods that are one command each, answered at once."""
HeldCommand = c.Arrive | c.NotifyCheckpoint | c.Claim
HELD_COMMANDS: dict[str, Callable[[Any, int], HeldCommand]] = {
    "WaitBarrier": decode.arrive,
    "NotifyCheckpoint": decode.notify_checkpoint,
    "ClaimSamples": decode.claim,
}
"""Methods whose answer may have to wait for other workers; each call has a number."""
FOREIGN_STATES = 16
"""How many lost states are reported, each once, while the coordinator runs."""


class Clock:
    """Seconds since 1970 that never jump: the wall clock at the start, then monotonic time."""

    __slots__ = ("_offset",)

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def __call__(self) -> float:
        """The time."""
        return self._offset + time.monotonic()


class CoordinatorService:
    """The service's methods over a machine and its store; used on one event loop.

    `handle` answers a unary call with a message, or with a future when the answer has to
    wait: for the disk, or for other workers.
    """

    def __init__(
        self,
        store: SqliteStore,
        config: CoordinatorConfig | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Load the state that ``store`` holds."""
        self.config = config or CoordinatorConfig()
        self.clock = clock or Clock()
        self.started_at = self.clock()
        self.transport = ""
        self.stats = {name: MethodStats() for name in METHODS}
        self._store = store
        self._limits = RateLimits(self.config.worker_rate_limit, self.config.peer_rate_limit)
        self._held: dict[int, asyncio.Future[Message]] = {}
        self._next_call = 1
        self._closing = False
        self._disk_is_slow = False
        self._appended = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._foreign_states: set[str] = set()
        self._admitted = ""
        """The address of the call that is handled next."""
        self.machine = Machine(
            self.config.heartbeat_timeout_ms / 1000,
            store.events(),
            self.config.max_workers_per_job,
            time.perf_counter,
        )
        self._restore()
        self._queries = Queries(self.machine, store, self._limits, self.config)
        self._handlers: dict[str, Callable[[Any, float], Answer]] = {
            **self._queries.handlers,
            "RegisterWorker": self._register_worker,
            "Heartbeat": self._heartbeat,
            "RegisterDataset": self._register_dataset,
            "GetServerInfo": lambda _, now: self._queries.server_info(
                self.started_at, now, self.transport, self.stats
            ),
            **{method: partial(self._change, method) for method in COMMANDS},
            **{method: partial(self._hold, decoded) for method, decoded in HELD_COMMANDS.items()},
        }

    def _restore(self) -> None:
        orphans = self.machine.restore(self._store.load(), self.clock())
        for orphan in orphans:
            log.warning("state.record_orphaned", record=orphan)

    # Entry points

    def admit(self, method: str, peer: str) -> None:
        """Refuse a call from an address that makes too many."""
        try:
            self._limits.check_peer(peer, self.clock())
        except Refused:
            self._count_unheard(method)
            raise
        self._admitted = peer

    def handle(self, method: str, request: Any, metadata: Any = ()) -> Answer:
        """Answer a call; raises `Refused`. ``metadata`` carries the span of a traced caller."""
        if metadata and tracing.is_on():
            span = tracing.serve(f"{SERVICE}/{method}", metadata)
            if span is not None:
                describe(span, method, request, self.machine)
                return follow(span, lambda: self._answer(method, request))
        return self._answer(method, request)

    def _answer(self, method: str, request: Any) -> Answer:
        stats = self.stats[method]
        peer, self._admitted = self._admitted, ""
        worked = time.thread_time() if self._limits.is_costly(peer) else None
        started = time.perf_counter()
        try:
            if self._closing:
                raise self._shutting_down()
            answer = self._obey(method, request, self.clock())
            if self._store.dirty and not isinstance(answer, asyncio.Future):
                answer = asyncio.ensure_future(self._flushed(answer))
        except BaseException:
            stats.errors += 1
            stats.latency.observe(time.perf_counter() - started)
            raise
        finally:
            if worked is not None:
                self._limits.charge_peer(peer, time.thread_time() - worked)
            elif peer:
                self._limits.note_duration(peer, time.perf_counter() - started)
        if isinstance(answer, asyncio.Future):
            answer.add_done_callback(lambda done: _observe(stats, started, done))
        else:
            stats.latency.observe(time.perf_counter() - started)
        return answer

    def _obey(self, method: str, request: Any, now: float) -> Answer:
        """Handle a request, unless it is of a member of another state."""
        state_id = request.state_id if method in STATED else ""
        if not state_id or state_id == self._store.state_id:
            return self._handlers[method](request, now)
        if state_id not in self._store.ancestors or self._is_newer(method, request):
            raise self._foreign(method, request, now)
        return self._handlers[method](request, now)

    def _is_newer(self, method: str, request: Any) -> bool:
        """Whether a member registered after this state was copied and then restored."""
        job = self.machine.jobs.get(request.job or DEFAULT_JOB)
        member = None if job is None else job.roster.by_id.get(getattr(request, STATED[method]))
        return member is None or member.incarnation < request.incarnation

    def request_limit(self, method: str) -> int:
        """How many bytes a request may have."""
        limit = self.config.max_request_bytes
        return max(limit, self.config.max_dataset_bytes) if method == "RegisterDataset" else limit

    def refuse_oversized(self, method: str, size: int) -> Refused:
        """The refusal of a request that is too large."""
        self._count_unheard(method)
        key = "max_dataset_bytes" if method == "RegisterDataset" else "max_request_bytes"
        return Refused(
            "request_too_large",
            f"the request has {size} bytes, more than {self.request_limit(method)}: send less, or "
            f"raise {key} in [coordinator]",
        )

    def refuse_unreadable(self, method: str, error: Exception) -> Refused:
        """The refusal of a request that cannot be parsed."""
        self._count_unheard(method)
        return Refused("invalid", f"the request cannot be parsed: {error}")

    def _count_unheard(self, method: str) -> None:
        self.stats[method].errors += 1
        self.stats[method].latency.observe(0.0)

    async def watch(self, request: pb.WatchRequest) -> AsyncIterator[pb.Event]:
        """Events of the journal, then those to come."""
        last = request.after_id
        job = decode.job_name(request.job) if request.job else ""
        while not self._closing:
            appended = self._appended
            newest = self.machine.journal.last_id
            for entry in self.machine.journal.after(last, job):
                yield to_message(entry, pb.Event)
            last = newest
            if not request.follow:
                return
            await appended.wait()

    def tick(self) -> None:
        """Advance the machine's time.

        Not while everybody waits for the disk: members send their next heartbeat after the answer
        to the last, and must not be declared dead meanwhile.
        """
        if self._waits_for_disk():
            return
        now = self.clock()
        _, effects = self.machine.apply(c.Tick(), now)
        if effects:
            self._carry_out(effects)

    def _waits_for_disk(self) -> bool:
        seconds = self._store.waiting_seconds
        was_slow, self._disk_is_slow = self._disk_is_slow, seconds > self.machine.stall
        if self._disk_is_slow and not was_slow:
            log.warning(
                "state.disk_is_slow",
                waiting_seconds=round(seconds, 1),
                path=str(self._store.path),
                remedy="nobody is answered meanwhile: give the coordinator a --data-dir on a disk "
                "that nothing else keeps busy",
            )
        return self._disk_is_slow

    def housekeep(self) -> None:
        """Store lazy events and forget idle rate limits."""
        self._store.flush_events()
        self._limits.forget_idle(self.clock())

    def close(self) -> None:
        """Refuse further calls, and fail those that are held."""
        self._closing = True
        self._appended.set()
        for future in list(self._held.values()):
            if not future.done():
                future.set_exception(self._shutting_down())
        self._held.clear()

    @property
    def closing(self) -> bool:
        """Whether it is shutting down."""
        return self._closing

    async def settled(self) -> None:
        """Wait until everything visible in the state is stored.

        Raises `StorageError` if it cannot be stored.
        """
        if self._store.dirty:
            await self._store.flush()

    @property
    def failure(self) -> StorageError | None:
        """Why the state cannot be stored, if so."""
        return self._store.failure

    # Methods

    def _register_worker(self, request: pb.WorkerInfo, now: float) -> Answer:
        state_id = request.state_id
        returns = state_id not in ("", self._store.state_id)
        command = decode.register(request, self.config.max_workers_per_job, returns=returns)
        if returns and state_id not in self._store.ancestors:
            self._note_foreign(command.job, command.worker_id, state_id, now)
        return encode.reply(
            self._apply(command, now),
            heartbeat_interval_ms=self.config.heartbeat_interval_ms,
            heartbeat_timeout_ms=self.config.heartbeat_timeout_ms,
            state_id=self._store.state_id,
        )

    def _heartbeat(self, request: pb.HeartbeatRequest, now: float) -> Answer:
        command = decode.heartbeat(request)
        self._limit_worker(command.job, command.worker_id, now)
        reply = self._apply(command, now)
        assert isinstance(reply, c.Pulse)
        response = pb.HeartbeatResponse(
            generation=reply.generation,
            heartbeat_interval_ms=self.config.heartbeat_interval_ms,
            live_workers=reply.live_workers,
            lost_generation=reply.lost_generation,
        )
        if reply.actions:
            response.actions.extend(encode.action(record) for record in reply.actions)
        if request.HasField("known_losses") and request.known_losses < reply.lost_generation:
            losses = self.machine.jobs[command.job].roster.losses
            since = losses.since(request.known_losses)
            response.lost.extend(to_message(loss, pb.LostWorker) for loss in since)
        return response

    def _foreign(self, method: str, request: Any, now: float) -> Refused:
        """The refusal for a member that was registered in another state."""
        job, worker_id = decode.job_name(request.job), getattr(request, STATED[method])
        decode.identifier("worker id", worker_id)
        self._note_foreign(job, worker_id, request.state_id, now)
        why = (
            "the coordinator's state was restored from a copy made before this worker registered"
            if request.state_id in self._store.ancestors
            else "it was registered in a state that this coordinator has never had: its data "
            "directory was emptied or exchanged, or the address leads to another coordinator"
        )
        return Refused(
            "foreign_state",
            f"worker {worker_id!r} of job {job!r} is not a member: {why}; register() again",
        )

    def _note_foreign(self, job: str, worker_id: str, state_id: str, now: float) -> None:
        """Report a lost state, when a member of it first calls."""
        restored = state_id in self._store.ancestors
        if state_id not in self._foreign_states and len(self._foreign_states) < FOREIGN_STATES:
            names = (job, worker_id or "a newcomer", decode.identifier("state id", state_id))
            self._foreign_states.add(state_id)
            log.error(
                "state.lost",
                job=job,
                worker=worker_id,
                state=state_id,
                own_state=self._store.state_id,
                restored=restored,
                remedy="look for the data directory that it had, or restore a backup: "
                "'strata state restore COPY'",
            )
            self._apply(c.ReportLostState(*names, restored), now)

    def _register_dataset(self, request: pb.DatasetInfo, now: float) -> Answer:
        reply = self._apply(decode.register_dataset(request), now)
        return encode.reply(reply, state_id=self._store.state_id)

    def _change(self, method: str, request: Any, now: float) -> Answer:
        """Answer a method of `COMMANDS`; a member's calls are rate-limited, except its last."""
        command: Any = COMMANDS[method](request)
        if method in STATED and method != "DeregisterWorker":
            self._limit_worker(command.job, getattr(command, STATED[method]), now)
        reply = self._apply(command, now)
        return METHODS[method].reply() if reply is c.DONE else encode.reply(reply)

    def _limit_worker(self, job: str, worker_id: str, now: float) -> None:
        """Count a call of a member; others are only counted by address."""
        known = self.machine.jobs.get(job)
        if known is not None and worker_id in known.roster.by_id:
            self._limits.check_worker(job, worker_id, now)

    # Calls that are held

    def _hold(self, decoded: Callable[[Any, int], HeldCommand], request: Any, now: float) -> Answer:
        command = decoded(request, self._next_call)
        self._next_call += 1
        self._limit_worker(command.job, command.worker_id, now)
        reply = self._apply(command, now)
        if reply is not HELD:
            return encode.reply(reply)
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._held[command.call] = future
        future.add_done_callback(lambda done: self._ended(command.job, command.call, done))
        return future

    def _ended(self, job: str, call: int, future: asyncio.Future[Message]) -> None:
        self._held.pop(call, None)
        if future.cancelled() and not self._closing:
            _, effects = self.machine.apply(c.Hangup(job, call), self.clock())
            if effects:
                self._carry_out(effects)

    # Effects

    def _apply(self, command: c.Command, now: float) -> c.Reply:
        reply, effects = self.machine.apply(command, now)
        if effects:
            self._carry_out(effects)
        return reply

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        """Store what is durable, then answer held calls."""
        releases = [effect for effect in effects if isinstance(effect, Release)]
        if len(releases) < len(effects):
            self._store.submit([effect for effect in effects if not isinstance(effect, Release)])
            self._announce(effects)
        if not releases:
            return
        if self._store.dirty:
            task = asyncio.get_running_loop().create_task(self._release_later(releases))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._release(releases)

    def _announce(self, effects: Sequence[Effect]) -> None:
        emitted = [effect.event for effect in effects if isinstance(effect, Emit)]
        for event in emitted:
            level = log.warning if event.kind in ALARMS else log.info
            level(event.kind, job=event.job, **event.fields)
        if emitted:
            self._appended.set()
            self._appended = asyncio.Event()

    async def _release_later(self, releases: list[Release]) -> None:
        try:
            await self._store.flush()
        except StorageError as exc:
            releases = [Release(r.call, Refused("storage", str(exc))) for r in releases]
        self._release(releases)

    def _release(self, releases: list[Release]) -> None:
        previous: object = None
        message: Message | None = None
        for release in releases:
            future = self._held.get(release.call)
            if future is None or future.done():
                continue
            if isinstance(release.reply, Refused):
                future.set_exception(release.reply)
                continue
            if release.reply is not previous or message is None:
                previous, message = release.reply, encode.reply(release.reply)
            future.set_result(message)

    async def _flushed(self, answer: Message) -> Message:
        try:
            await self._store.flush()
        except StorageError as exc:
            raise Refused("storage", str(exc)) from exc
        return answer

    def _shutting_down(self) -> Refused:
        return Refused("shutting_down", "the coordinator is shutting down: try again soon")


def _observe(stats: MethodStats, started: float, done: asyncio.Future[Message]) -> None:
    if done.cancelled() or done.exception() is not None:
        stats.errors += 1
    stats.latency.observe(time.perf_counter() - started)


_SPAN_FIELDS = ("job", "worker_id", "step", "epoch", "barrier_id", "checkpoint_id", "dataset_id")
"""Fields of requests that go into a span."""
_FAILED = {
    pb.BARRIER_OUTCOME_TIMED_OUT: "timed out",
    pb.BARRIER_OUTCOME_MEMBERSHIP_CHANGED: "membership changed",
}


def describe(span: Span, method: str, request: Any, machine: Machine) -> None:
    """Add the caller and the subject of a call to its span."""
    fields = request.DESCRIPTOR.fields_by_name
    subject = {name: getattr(request, name) for name in _SPAN_FIELDS if name in fields}
    span.set(**{name: value for name, value in subject.items() if value != ""}, method=method)
    job = machine.jobs.get(subject.get("job", ""))
    if job is not None:
        member = job.roster.by_id.get(subject.get("worker_id", ""))
        span.set(generation=job.roster.generation, rank=member.rank if member else None)


def follow(span: Span, answer: Callable[[], Answer]) -> Answer:
    """Answer a call, and end its span with the answer."""
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
    """Failures that are not refusals are in the reply."""
    if isinstance(reply, pb.BarrierResponse) and reply.outcome in _FAILED:
        span.fail(_FAILED[reply.outcome])
    if isinstance(reply, pb.CheckpointResponse) and reply.status != pb.CHECKPOINT_STATUS_COMMITTED:
        span.fail(f"not committed: {reply.detail}")
    span.end()
