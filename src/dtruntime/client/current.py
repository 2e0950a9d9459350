"""The process's current orchestrator, and the goodbye at interpreter exit.

This is, beside the I/O thread and the process's shutdown, the one place that keeps state for the
whole process.
"""

from __future__ import annotations

import os
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from .._shutdown import shutdown
from ..types import WorkerState

if TYPE_CHECKING:
    from .orchestrator import TrainingOrchestrator

GOODBYE_SECONDS = 2.0

_registered: weakref.WeakSet[TrainingOrchestrator] = weakref.WeakSet()
_current: weakref.ref[TrainingOrchestrator] | None = None
_latest: TrainingOrchestrator | None = None


def enter(orchestrator: TrainingOrchestrator) -> None:
    """Make a registered orchestrator the current one."""
    global _current, _latest
    _registered.add(orchestrator)
    _current = weakref.ref(orchestrator)
    _latest = orchestrator


def leave(orchestrator: TrainingOrchestrator) -> None:
    """Forget an orchestrator that is no longer a member."""
    global _current, _latest
    _registered.discard(orchestrator)
    if _current is not None and _current() is orchestrator:
        _current = None
    if _latest is orchestrator and not orchestrator.is_replaced:
        _latest = None


def current() -> TrainingOrchestrator | None:
    """The orchestrator that this process registered last, if it still is a member."""
    return _current() if _current is not None else None


def responsible() -> TrainingOrchestrator | None:
    """The orchestrator that this process has to commit through, if it has not left by itself.

    One that was replaced stays it: what it commits is refused, and must not be stored instead as
    if this process had never had any.
    """
    return _latest


def doing(state: WorkerState) -> AbstractContextManager[None]:
    """A block that keeps the program, for the next heartbeat of the current orchestrator."""
    worker = current()
    return nullcontext() if worker is None else worker.activity.doing(state)


def _forget_all() -> None:
    global _current, _latest
    _registered.clear()
    _current = _latest = None


def _say_goodbye() -> None:
    for orchestrator in list(_registered):
        orchestrator.leave("process ended", GOODBYE_SECONDS)


os.register_at_fork(after_in_child=_forget_all)
shutdown.at_end(_say_goodbye)
