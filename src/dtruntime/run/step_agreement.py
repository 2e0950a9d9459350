"""Agreement on the step after which all ranks do something together.

To agree without a message per step, a rank's I/O thread closes the *step gate*, which the training
loop passes after every step, exchanges with the others which step it passed last, and opens the
gate for all to act after the step that follows the highest. Nobody can have passed that step, and
whoever waits at a closed gate waits for I/O threads only, never for another training loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass

from .._sync_bridge import io
from ..client import TrainingOrchestrator
from ..errors import ConnectionError, StrataError
from ..telemetry import EventLog
from ..types import Action
from .crew import RENDEZVOUS, Crew, has_lost

log = EventLog("run")

CHECK_SECONDS = 0.2
AGREE_MS = 15_000
WATCH_SECONDS = 0.2
ASK_SECONDS = 1.0
"""How often to ask for newcomers to be let in, until they are."""
JOINED = "a worker has joined"


@dataclass(frozen=True, slots=True)
class Due:
    """An action that is due after a step."""

    step: int
    action: Action
    lets_in: bool = False
    """Whether newcomers who wait to train are let in with it."""


class StepGate:
    """Counts the steps of this rank, and knows what is due after each."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._closed = 0
        self._era = 0
        self._due: dict[str, Due] = {}
        self._done: set[str] = set()
        """Actions that were carried out; heartbeats may name them a little longer."""
        self.step = 0
        """The step that was passed last."""
        self.lets_in = False
        """Whether all let newcomers in after that step."""

    def reset(self, step: int) -> None:
        """Go on from a step; what was agreed on is void."""
        with self._condition:
            self.step = step
            self._era += 1
            self._due.clear()

    def pass_step(self, check: Callable[[], None] | None = None) -> list[Action]:
        """Pass the gate after a step, once it is open; returns the actions that are due.

        While it waits it calls ``check``, which may raise.
        """
        with self._condition:
            while not self._condition.wait_for(lambda: not self._closed, CHECK_SECONDS):
                if check is not None:
                    check()
            self.step += 1
            due = [due for due in self._due.values() if due.step == self.step]
            self.lets_in = any(one.lets_in for one in due)
        return sorted((one.action for one in due), key=lambda action: action.requested_at)

    def knows(self, action: Action) -> bool:
        """Whether an action is due after a step, or was carried out."""
        with self._condition:
            return action.action_id in self._due or action.action_id in self._done

    def has_done(self, action: Action) -> bool:
        """Whether an action was carried out here."""
        with self._condition:
            return action.action_id in self._done

    def done(self, action: Action) -> None:
        """An action was carried out, and is never due again."""
        with self._condition:
            self._done.add(action.action_id)

    def close(self) -> tuple[int, int]:
        """Let nobody pass; returns the step that was passed last, and its era."""
        with self._condition:
            self._closed += 1
            return self.step, self._era

    def open(self, action: Action, step: int | None, era: int, *, lets_in: bool = False) -> None:
        """Let everybody pass; with a ``step`` of this era, the action is due after it."""
        with self._condition:
            self._closed -= 1
            if step is not None and era == self._era:
                self._due[action.action_id] = Due(step, action, lets_in)
            self._condition.notify_all()


class StepAgreements:
    """Agrees with the other ranks, on the I/O thread, after which step to carry out an action.

    The leader also requests a checkpoint when newcomers wait to train: they are let in after it,
    when nothing is lost by forming the crew anew.
    """

    def __init__(
        self, orchestrator: TrainingOrchestrator, gate: StepGate, *, lets_in: bool = False
    ) -> None:
        """``lets_in``: the crew can be formed anew with newcomers."""
        self._orchestrator = orchestrator
        self._gate = gate
        self._lets_in = lets_in
        self._crew: Crew | None = None
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._letting_in: asyncio.Task[None] | None = None
        self._are_waiting = False
        """Whether all newcomers are at the roll call; known to the leader alone."""
        self._are_let_in = False
        """Whether it is agreed after which step the crew is formed anew with them."""
        orchestrator.on_heartbeat(self._heard)

    def begin(self, crew: Crew) -> None:
        """A crew trains from now on."""
        self._are_waiting = self._are_let_in = False
        self._crew = crew
        io.submit(self._catch_up(crew))

    def end(self) -> None:
        """Nobody trains for now, and nothing is agreed on."""
        self._crew = None
        io.submit(self._cancel())

    async def _cancel(self) -> None:
        for task in (*self._under_way.values(), self._letting_in):
            if task is not None:
                task.cancel()

    async def _catch_up(self, crew: Crew) -> None:
        """Ask which actions are pending: those of the last heartbeat may have been done since.

        Report those that were done but not reported because the crew's leader is gone: the others
        would wait for this rank to agree on them.
        """
        while self._crew is crew:
            try:
                await self._orchestrator.heartbeat()
                for action in self._orchestrator.actions:
                    if self._gate.has_done(action):
                        await self._orchestrator.complete_action_async(action.action_id, "done")
                break
            except ConnectionError:
                await asyncio.sleep(WATCH_SECONDS)
            except StrataError as exc:
                log.info("run.no_heartbeat", reason=str(exc))
                break
        self._heard()

    def _heard(self) -> None:
        crew = self._crew
        if crew is None:
            return
        loop = asyncio.get_running_loop()
        for action in self._orchestrator.actions:
            if not self._gate.knows(action) and action.action_id not in self._under_way:
                self._under_way[action.action_id] = loop.create_task(self._agree(action, crew))
        have_come = self._orchestrator.generation > crew.generation and not self._are_let_in
        if self._lets_in and crew.leads and have_come and self._letting_in is None:
            self._letting_in = loop.create_task(self._let_in(crew))

    async def _agree(self, action: Action, crew: Crew) -> None:
        step = None
        try:
            # With open gates, because some hear of it a whole heartbeat later than others.
            await self._exchange(f"{action.action_id}:heard", b"", crew)
            if self._crew is crew:
                step = await self._agree_on_step(action, crew)
        except StrataError as exc:
            log.warning("run.no_agreement", action=action.kind, reason=str(exc))
        finally:
            del self._under_way[action.action_id]
            self._look_again(crew)
        if step is not None:
            log.info("run.agreed", action=action.kind, step=step, reason=action.reason)

    async def _agree_on_step(self, action: Action, crew: Crew) -> int:
        """Learn, with closed gates, how far all ranks are; returns the step after all of these."""
        passed, era = self._gate.close()
        step, lets_in = None, False
        try:
            own = f"{passed} {int(self._are_waiting)}".encode()
            values = (await self._exchange(action.action_id, own, crew)).values()
            ranks = [value.split() for value in values]
            lets_in = any(waiting == b"1" for _, waiting in ranks)
            step = max(int(passed) for passed, _ in ranks) + 1
            self._are_let_in |= lets_in and self._crew is crew
            return step
        finally:
            self._gate.open(action, step, era, lets_in=lets_in)

    async def _exchange(self, name: str, value: bytes, crew: Crew) -> dict[int, bytes]:
        return await self._orchestrator.exchange_async(
            f"run:{crew.generation}:{name}", value, timeout_ms=AGREE_MS, ranks=crew.ranks
        )

    async def _let_in(self, crew: Crew) -> None:
        """Request a checkpoint once all newcomers are at the roll call.

        One that still starts would keep the others waiting there.
        """
        worker = self._orchestrator
        try:
            while self._crew is crew and not self._are_let_in:
                self._are_waiting = await worker.are_waiting_async(RENDEZVOUS, crew.size)
                if self._are_waiting and not self._are_let_in:
                    await worker.request_action_async("checkpoint", reason=JOINED)
                    await worker.heartbeat()
                await asyncio.sleep(ASK_SECONDS if self._are_waiting else WATCH_SECONDS)
        except StrataError as exc:
            log.warning("run.not_let_in", reason=str(exc))
        finally:
            self._letting_in = None
            self._look_again(crew)

    def _look_again(self, crew: Crew) -> None:
        """Look at what came while something was under way: listeners hear of it only once.

        A crew that has lost a worker does nothing more, and the next one begins with a look.
        """
        if self._crew is not crew or not has_lost(self._orchestrator, crew):
            asyncio.get_running_loop().call_later(WATCH_SECONDS, self._heard)


class PreemptionWatch:
    """Requests that this worker be drained when it gets a notice, whatever its loop is doing."""

    def __init__(self, orchestrator: TrainingOrchestrator, notice: Callable[[], str]) -> None:
        """``notice`` returns why this worker has to go, or nothing."""
        self._orchestrator = orchestrator
        self._notice = notice
        self._task = io.submit(self._watch())

    def close(self) -> None:
        """Stop watching."""
        self._task.cancel()

    async def _watch(self) -> None:
        # A signal handler may only take a note, so it is polled here.
        while not (reason := self._notice()):  # noqa: ASYNC110
            await asyncio.sleep(WATCH_SECONDS)
        log.warning("run.notice", reason=reason)
        worker = self._orchestrator.worker_id
        try:
            await self._orchestrator.request_action_async("drain", worker, reason)
        except StrataError as exc:
            log.error("run.drain_not_requested", reason=str(exc))
            return
        try:
            # It brings the request back now, and not when the next one is due.
            await self._orchestrator.heartbeat()
        except StrataError as exc:
            log.warning("run.no_heartbeat", reason=str(exc))
