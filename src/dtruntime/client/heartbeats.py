"""A member's heartbeats: what it tells of itself at intervals, and what it hears in reply."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Iterator

from ..errors import ConnectionError, StrataError, SyncError
from ..retry import JITTER, Backoff
from ..rpc import messages
from ..rpc.gen import coordinator_pb2 as pb
from ..rpc.messages import STATE_CODES
from ..telemetry import EventLog
from ..types import Action
from .local_process import ResourceProbe
from .membership import MemberConnection, WorkerReport

log = EventLog("worker")

Said = tuple[WorkerReport, int, int]
"""What the program reports, its epoch, and how many samples it has used."""


class Heartbeats:
    """Sends the heartbeats of one member, at intervals or at once.

    The member is given to each call and not kept: only what runs in the background holds it, so
    that one which is dropped without having registered is freed at once.
    """

    def __init__(self) -> None:
        self.generation = 0
        """The one that the last heartbeat, or the registration, told of."""
        self.actions: tuple[Action, ...] = ()
        """What is asked of the job and not done yet, as the last heartbeat said."""
        self._sent: Said = (WorkerReport(), 0, 0)
        self._probe: ResourceProbe | None = None
        self._listeners: list[Callable[[], None]] = []
        self._beating: asyncio.Task[None] | None = None
        self.watching: asyncio.Task[None] | None = None
        """Looks for members that are not heard."""

    # In the background

    def start(self, member: MemberConnection) -> None:
        """Send them until `stop`, or until the member learns that it is none; on the I/O thread."""
        # In a context of their own: heartbeats belong to no span that is current here.
        self._beating = asyncio.get_running_loop().create_task(
            self._keep_beating(member), context=contextvars.Context()
        )

    async def stop(self) -> None:
        """End what runs in the background."""
        tasks, self._beating, self.watching = (self._beating, self.watching), None, None
        for task in tasks:
            await cancel(task)

    async def _keep_beating(self, member: MemberConnection) -> None:
        interval = member.identity.heartbeat_interval
        delays = _delays(interval)
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
            delays = _delays(interval)
            await asyncio.sleep(interval * JITTER.uniform(0.9, 1.0))

    # One heartbeat

    async def send(self, member: MemberConnection) -> None:
        """Send one, and take note of the reply."""
        identity, said = member.identity, _said(member)
        report, epoch, samples = said
        if self._probe is None:
            self._probe = ResourceProbe()
        request = pb.HeartbeatRequest(
            worker_id=identity.worker_id,
            job=identity.job,
            incarnation=identity.incarnation,
            state=STATE_CODES[member.activity.state(report.state)],
            step=report.step,
            epoch=epoch,
            resources=messages.resources(self._probe.sample()),
            metrics=dict(report.metrics),
            step_seconds=report.step_seconds,
            samples=samples,
        )
        reply = await member.call("Heartbeat", request, pb.HeartbeatResponse, patience=0.0)
        self._sent = said
        if member.is_incarnation(request.incarnation):
            self._hear(member, reply)

    def has_unsent(self, member: MemberConnection) -> bool:
        """Whether the program has reported something since the last one."""
        return _said(member) != self._sent

    # What is heard

    def enter(self, generation: int) -> None:
        """Begin with what a registration told."""
        self.generation, self.actions = generation, ()

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` after each heartbeat that told of other members or actions."""
        self._listeners.append(listener)

    def _hear(self, member: MemberConnection, reply: pb.HeartbeatResponse) -> None:
        before = self.generation, self.actions
        member.note_generation(reply.generation, reply.lost_generation)
        self.generation = max(self.generation, reply.generation)
        self.actions = tuple(messages.action(action) for action in reply.actions)
        if (self.generation, self.actions) == before:
            return
        for listener in self._listeners:
            try:
                listener()
            except Exception as exc:
                log.error("heartbeat.listener_failed", worker=member.worker_id, error=repr(exc))

    # The heartbeats of others

    def watch_others(self, member: MemberConnection) -> None:
        """Warn once of members that are silent; on the I/O thread, once per registration."""
        if self.watching is None:
            self.watching = asyncio.get_running_loop().create_task(
                _warn_of_silence(member), context=contextvars.Context()
            )


async def _warn_of_silence(member: MemberConnection) -> None:
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
                remedy="they were not heard since this worker registered, and their part of "
                "the data is read by nobody: if they are gone, samples are missed; 'strata "
                "status' shows them",
            )
        if late or not reply.silent_workers:
            return


def _said(member: MemberConnection) -> Said:
    """What there is to tell; the samples are those of loaders where the program says none."""
    report, seen = member.reported, member.activity
    epoch = seen.epoch if report.epoch is None else report.epoch
    return report, epoch or 0, report.samples or seen.samples


def _delays(interval: float) -> Iterator[float]:
    """Delays between attempts to reach a coordinator that is away, up to the interval."""
    return Backoff(first=0.1, longest=max(0.1, interval)).delays()


async def cancel(task: asyncio.Task[None] | None) -> None:
    """Cancel a task and wait for its end, unless it is the one that calls."""
    if task is not None and task is not asyncio.current_task():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
