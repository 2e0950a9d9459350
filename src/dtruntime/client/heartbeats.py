"""A member's heartbeats: what they carry, when they are sent, and what the replies say."""

from __future__ import annotations

import asyncio
import contextvars
import math
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ConnectionError, StrataError, SyncError
from ..retry import JITTER, Backoff
from ..rpc import messages
from ..rpc.gen import coordinator_pb2 as pb
from ..telemetry import EventLog
from ..types import Action, WorkerState, check_whole
from .local_process import ResourceProbe

if TYPE_CHECKING:
    from .membership import JobMember

log = EventLog("worker")

METRICS_LIMIT = 64
METRIC_NAME_LENGTH = 128
"""These keep a heartbeat within the size that the coordinator accepts."""


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What the program reports about itself."""

    state: WorkerState | None = None
    """None: inferred from the program's calls."""
    step: int | None = None
    epoch: int | None = None
    metrics: tuple[tuple[str, float], ...] = ()
    step_seconds: float = 0.0
    """0: not reported."""
    samples: int = 0
    """Total samples used; 0: not reported."""

    def updated(
        self,
        step: int | None,
        epoch: int | None,
        state: WorkerState | str | None,
        metrics: Mapping[str, float],
        step_seconds: float | None,
        samples: int,
    ) -> WorkerReport:
        """A copy with the given values replaced, and ``samples`` added to the total."""
        values = {**dict(self.metrics), **{name: float(x) for name, x in metrics.items()}}
        if len(values) > METRICS_LIMIT or any(len(name) > METRIC_NAME_LENGTH for name in values):
            raise ValueError(
                f"a worker reports at most {METRICS_LIMIT} metrics, with names of at most "
                f"{METRIC_NAME_LENGTH} characters; these would be {len(values)}"
            )
        for name in metrics:
            if any("\ud800" <= letter <= "\udfff" for letter in name):
                raise ValueError(f"the name of a metric must be text, not {name!r}")
        if step_seconds is not None and not 0 <= float(step_seconds) < math.inf:
            raise ValueError(f"step_seconds must be a time in seconds, not {step_seconds}")
        return WorkerReport(
            self.state if state is None else WorkerState(state),
            self.step if step is None else check_whole("step", step),
            self.epoch if epoch is None else check_whole("epoch", epoch),
            tuple(values.items()),
            self.step_seconds if step_seconds is None else float(step_seconds),
            self.samples + check_whole("samples", samples),
        )


class Activity:
    """What the program is doing, inferred from its calls.

    While a call blocks the program, that call is what it does: waiting for others, saving,
    loading. Otherwise it trains, from its first step or batch until the batches end.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active: Counter[WorkerState] = Counter()
        self._trains = False
        self.epoch: int | None = None
        """The highest epoch that any loader has reached."""
        self.samples = 0
        """How many samples loaders have handed out."""

    @contextmanager
    def doing(self, state: WorkerState) -> Iterator[None]:
        """A block during which the program is in ``state``."""
        with self._lock:
            self._active[state] += 1
        try:
            yield
        finally:
            with self._lock:
                self._active[state] -= 1

    def state(self, reported: WorkerState | None) -> WorkerState:
        """The program's state; ``reported`` counts when no call blocks it."""
        for state in (WorkerState.WAITING, WorkerState.CHECKPOINTING, WorkerState.LOADING):
            if self.under_way(state):
                return state
        return reported or (WorkerState.TRAINING if self._trains else WorkerState.IDLE)

    def under_way(self, state: WorkerState) -> int:
        """How many calls are in ``state``."""
        return self._active[state]

    def trains(self) -> None:
        """The program reported a step or got a batch."""
        self._trains = True

    # Called by loaders

    def fetching(self) -> AbstractContextManager[None]:
        """A block that waits for a batch."""
        return self.doing(WorkerState.LOADING)

    def handed_out(self, epoch: int, samples: int) -> None:
        """The program got a batch."""
        self._trains = True
        with self._lock:
            self.samples += samples
            self._reached(epoch)

    def ended(self, epoch: int) -> None:
        """An epoch has no more batches."""
        self._trains = False
        with self._lock:
            self._reached(epoch + 1)

    def _reached(self, epoch: int) -> None:
        self.epoch = epoch if self.epoch is None else max(self.epoch, epoch)


class Heartbeats:
    """Sends one member's heartbeats, at intervals or on demand.

    The member is passed to each call rather than stored: only the background tasks hold it, so an
    orchestrator that never registered is freed at once.
    """

    def __init__(self) -> None:
        self.generation = 0
        """The generation in the last reply, or in the registration."""
        self.actions: tuple[Action, ...] = ()
        """The job's pending actions, as of the last reply."""
        self._sent: tuple[WorkerReport, int, int] = (WorkerReport(), 0, 0)
        self._probe: ResourceProbe | None = None
        self._listeners: list[Callable[[], None]] = []
        self._beating: asyncio.Task[None] | None = None
        self.watching: asyncio.Task[None] | None = None
        """Looks for silent members."""

    def start(self, member: JobMember) -> None:
        """Send heartbeats until `stop`, or until the member is fenced; on the I/O thread."""
        self._beating = in_background(self._beat(member))

    async def stop(self) -> None:
        """End the background tasks."""
        tasks, self._beating, self.watching = (self._beating, self.watching), None, None
        for task in tasks:
            await cancel(task)

    async def _beat(self, member: JobMember) -> None:
        interval = member.identity.heartbeat_interval
        backoff = Backoff(first=0.1, longest=max(0.1, interval))
        delays = backoff.delays()
        while True:
            try:
                await self.send(member)
            except SyncError:
                return
            except ConnectionError:
                await member.rest(next(delays))
                continue
            except Exception as exc:
                log.error("heartbeat.failed", worker=member.worker_id, error=repr(exc))
            delays = backoff.delays()
            await asyncio.sleep(interval * JITTER.uniform(0.9, 1.0))

    async def send(self, member: JobMember) -> None:
        """Send one heartbeat and take in the reply."""
        report, epoch, samples = content = _content(member)
        if self._probe is None:
            self._probe = ResourceProbe()
        request = pb.HeartbeatRequest(
            state=messages.STATE_CODES[member.activity.state(report.state)],
            step=report.step,
            epoch=epoch,
            resources=messages.resources(self._probe.sample()),
            metrics=dict(report.metrics),
            step_seconds=report.step_seconds,
            samples=samples,
            known_losses=member.known_losses,
        )
        reply = await member.call("Heartbeat", request, pb.HeartbeatResponse, patience=0.0)
        self._sent = content
        if member.is_incarnation(request.incarnation):
            self._receive(member, reply)

    def has_unsent(self, member: JobMember) -> bool:
        """Whether something was reported since the last heartbeat."""
        return _content(member) != self._sent

    def reset(self, generation: int) -> None:
        """Start from what a registration returned."""
        self.generation, self.actions = generation, ()

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` after each heartbeat that brought a new generation or other actions."""
        self._listeners.append(listener)

    def _receive(self, member: JobMember, reply: pb.HeartbeatResponse) -> None:
        before = self.generation, self.actions
        member.note_generation(reply.generation)
        member.note_losses(reply.lost_generation, reply.lost)
        self.generation = max(self.generation, reply.generation)
        self.actions = tuple(messages.action(action) for action in reply.actions)
        if (self.generation, self.actions) == before:
            return
        for listener in self._listeners:
            try:
                listener()
            except Exception as exc:
                log.error("heartbeat.listener_failed", worker=member.worker_id, error=repr(exc))

    def watch_others(self, member: JobMember) -> None:
        """Warn once of silent members; on the I/O thread, once per registration."""
        if self.watching is None:
            self.watching = in_background(_warn_of_silence(member))


async def _warn_of_silence(member: JobMember) -> None:
    identity = member.identity
    request = pb.StatusRequest(job=identity.job, worker_id=identity.worker_id)
    while True:
        await asyncio.sleep(identity.heartbeat_interval)
        try:
            reply = await member.call("GetStatus", request, pb.JobStatus, patience=0.0)
        except ConnectionError:
            continue
        except StrataError:
            return
        late = [x for x in reply.silent_workers if x.heartbeat_age_seconds > identity.silent_after]
        if late:
            log.warning(
                "worker.shares_with_silent_members",
                worker=identity.worker_id,
                silent=messages.named_silent(late),
                remedy="they have not been heard since this worker registered, and nobody reads "
                "their part of the data: if they are gone, samples are missed; 'strata status' "
                "shows them",
            )
        if late or not reply.silent_workers:
            return


def _content(member: JobMember) -> tuple[WorkerReport, int, int]:
    """The report, the epoch and the samples used; the last two fall back to what loaders did."""
    report, activity = member.reported, member.activity
    epoch = activity.epoch if report.epoch is None else report.epoch
    return report, epoch or 0, report.samples or activity.samples


def in_background(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """A task in a context of its own: it belongs to no span that is current here."""
    return asyncio.get_running_loop().create_task(work, context=contextvars.Context())


async def cancel(task: asyncio.Task[None] | None) -> None:
    """Cancel a task and wait for it to end, unless it is the current one."""
    if task is not None and task is not asyncio.current_task():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
