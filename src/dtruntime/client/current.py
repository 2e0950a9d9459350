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
