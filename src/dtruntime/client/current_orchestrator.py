"""The process's current orchestrator, and its goodbye at interpreter exit.

Besides the I/O thread and the process's shutdown, this is the one place with process-wide state.
"""

from __future__ import annotations

import os
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol, cast

from .._shutdown import shutdown
from ..errors import StrataError
from ..telemetry import EventLog
from ..types import WorkerState

if TYPE_CHECKING:
    from .membership import JobMember
    from .orchestrator import TrainingOrchestrator

log = EventLog("worker")

GOODBYE_SECONDS = 2.0


class Reporter(Protocol):
    """Has reported something that a coordinator which lost its state has to be given again."""

    async def replay(self, member: JobMember) -> None:
        """Report it again, if it concerns the member's job."""


_reporters: weakref.WeakSet[Reporter] = weakref.WeakSet()
_registered: weakref.WeakSet[JobMember] = weakref.WeakSet()
_current: weakref.ref[JobMember] | None = None


def add_reporter(reporter: Reporter) -> None:
    """Include ``reporter`` in replays."""
    _reporters.add(reporter)


async def replay(member: JobMember) -> None:
    """Give a coordinator that lost its state what this process had reported."""
    for reporter in list(_reporters):
        try:
            await reporter.replay(member)
        except StrataError as exc:
            log.error("worker.not_told_again", worker=member.worker_id, error=str(exc))


def enter(member: JobMember) -> None:
    """Make a registered orchestrator the current one."""
    global _current
    _registered.add(member)
    _current = weakref.ref(member)


def leave(member: JobMember) -> None:
    """Forget an orchestrator that is no longer a member."""
    global _current
    _registered.discard(member)
    if _current is not None and _current() is member:
        _current = None


def current() -> TrainingOrchestrator | None:
    """The orchestrator that this process registered last, if it still is a member."""
    member = _current() if _current is not None else None
    return cast("TrainingOrchestrator | None", member)


class Responsible:
    """Finds the orchestrator to commit through, anew at each call.

    An orchestrator that was replaced stays responsible until another one registers: its commits are
    refused, rather than stored as if this process had never been a member.
    """

    def __init__(self) -> None:
        self._last: TrainingOrchestrator | None = None

    def __call__(self) -> TrainingOrchestrator | None:
        """The registered orchestrator, or the last one if it was replaced."""
        registered = current()
        if registered is not None or (self._last is not None and not self._last.is_replaced):
            self._last = registered
        return self._last


def doing(state: WorkerState) -> AbstractContextManager[None]:
    """A block during which the current orchestrator's heartbeats show ``state``."""
    worker = current()
    return nullcontext() if worker is None else worker.activity.doing(state)


def _forget_all() -> None:
    global _current
    _registered.clear()
    _current = None


def _say_goodbye() -> None:
    for member in list(_registered):
        member.leave("process ended", GOODBYE_SECONDS)


os.register_at_fork(after_in_child=_forget_all)
shutdown.at_end(_say_goodbye)
