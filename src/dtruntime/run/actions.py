"""Doing what an operator asks of a job, after the same step on all ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .._loop import io
from ..client import TrainingOrchestrator
from ..errors import StrataError
from ..telemetry import EventLog
from ..types import Action
from .crew import Crew
from .gate import Gate

log = EventLog("run")

AGREE_MS = 15_000
WATCH_SECONDS = 0.2


class Agreements:
    """Agrees with the other ranks, on the I/O thread, after which step an action is carried out."""

    def __init__(self, orchestrator: TrainingOrchestrator, gate: Gate) -> None:
        self._orchestrator = orchestrator
        self._gate = gate
        self._crew: Crew | None = None
        self._under_way: dict[str, asyncio.Task[None]] = {}
        orchestrator.on_heartbeat(self._heard)

    def begin(self, crew: Crew) -> None:
        """A crew trains from now on."""
        self._crew = crew
        io.loop.call_soon_threadsafe(self._heard)

    def end(self) -> None:
        """Nobody trains for now: nothing is agreed on."""
        self._crew = None

    def _heard(self) -> None:
        crew = self._crew
        if crew is None:
            return
        for action in self._orchestrator.actions:
            known = self._gate.knows(action) or action.action_id in self._under_way
            if not known:
                agreeing = asyncio.get_running_loop().create_task(self._agree(action, crew))
                self._under_way[action.action_id] = agreeing

    async def _agree(self, action: Action, crew: Crew) -> None:
        passed, era = self._gate.close()
        step = None
        try:
            values = await self._orchestrator.exchange_async(
                f"run:{crew.generation}:{action.action_id}",
                str(passed).encode(),
                timeout_ms=AGREE_MS,
                ranks=crew.ranks,
            )
            step = max(int(value) for value in values.values()) + 1
        except StrataError as exc:
            log.warning("run.no_agreement", action=action.kind, reason=str(exc))
        finally:
            self._gate.open(action, step, era)
            del self._under_way[action.action_id]
        if step is not None:
            log.info("run.agreed", action=action.kind, step=step, reason=action.reason)


class Watch:
    """Asks for this worker to be drained when it gets notice, whatever the training loop does."""

    def __init__(self, orchestrator: TrainingOrchestrator, noticed: Callable[[], str]) -> None:
        """``noticed`` says why this worker has to go, or nothing."""
        self._orchestrator = orchestrator
        self._noticed = noticed
        self._task = io.submit(self._watch())

    def close(self) -> None:
        """Stop watching."""
        self._task.cancel()

    async def _watch(self) -> None:
        # A signal handler must not do more than take a note, so that it is looked for here.
        while not (reason := self._noticed()):  # noqa: ASYNC110
            await asyncio.sleep(WATCH_SECONDS)
        log.warning("run.notice", reason=reason)
        worker = self._orchestrator.worker_id
        try:
            await self._orchestrator.request_action_async("drain", worker, reason)
        except StrataError as exc:
            log.error("run.drain_not_requested", reason=str(exc))
            return
        try:
            # The request comes back with it, and not only at the next that is due.
            await self._orchestrator.heartbeat()
        except StrataError as exc:
            log.warning("run.no_heartbeat", reason=str(exc))
