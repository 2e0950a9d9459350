"""The process's current orchestrator, and the goodbye at interpreter exit.

This is, beside the I/O thread and the process's shutdown, the one place that keeps state for the
whole process.
"""

from __future__ import annotations

import os
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

from .._shutdown import shutdown
from ..errors import StrataError
from ..telemetry import EventLog
from ..types import WorkerState

if TYPE_CHECKING:
    from .orchestrator import TrainingOrchestrator

log = EventLog("worker")

GOODBYE_SECONDS = 2.0


class Teller(Protocol):
    """What has told the coordinator something that has to be told again to an empty one."""

    async def tell_again(self, worker: TrainingOrchestrator) -> None:
        """Tell it, if it concerns the worker's job."""


_tellers: weakref.WeakSet[Teller] = weakref.WeakSet()
_registered: weakref.WeakSet[TrainingOrchestrator] = weakref.WeakSet()
_current: weakref.ref[TrainingOrchestrator] | None = None


def tells(teller: Teller) -> None:
    """Ask ``teller`` to tell what it knows when a coordinator has lost its state."""
    _tellers.add(teller)


async def tell_again(worker: TrainingOrchestrator) -> None:
    """Let everything in this process tell the coordinator what it knows."""
    for teller in list(_tellers):
        try:
            await teller.tell_again(worker)
        except StrataError as exc:
            log.error("worker.not_told_again", worker=worker.worker_id, error=str(exc))


def enter(orchestrator: TrainingOrchestrator) -> None:
    """Make a registered orchestrator the current one."""
    global _current
    _registered.add(orchestrator)
    _current = weakref.ref(orchestrator)


def leave(orchestrator: TrainingOrchestrator) -> None:
    """Forget an orchestrator that is no longer a member."""
    global _current
    _registered.discard(orchestrator)
    if _current is not None and _current() is orchestrator:
        _current = None


def current() -> TrainingOrchestrator | None:
    """The orchestrator that this process registered last, if it still is a member."""
    return _current() if _current is not None else None


class Responsible:
    """Finds the orchestrator that somebody has to commit through, each time it is called.

    One that was replaced stays it until another is registered: what it commits is refused, and must
    not be stored instead as if this process had never been a member.
    """

    def __init__(self) -> None:
        self._last: TrainingOrchestrator | None = None

    def __call__(self) -> TrainingOrchestrator | None:
        """The one that is registered, or was and then replaced."""
        found = current()
        if found is not None or (self._last is not None and not self._last.is_replaced):
            self._last = found
        return self._last


def doing(state: WorkerState) -> AbstractContextManager[None]:
    """A block that keeps the program, for the next heartbeat of the current orchestrator."""
    worker = current()
    return nullcontext() if worker is None else worker.activity.doing(state)


def _forget_all() -> None:
    global _current
    _registered.clear()
    _current = None


def _say_goodbye() -> None:
    for orchestrator in list(_registered):
        orchestrator.leave("process ended", GOODBYE_SECONDS)


os.register_at_fork(after_in_child=_forget_all)
shutdown.at_end(_say_goodbye)
