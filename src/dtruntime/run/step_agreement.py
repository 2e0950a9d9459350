"""The gate that the training loop passes after every step.

To do something together after the same step, without a message per step, a rank's I/O thread closes
the gate, tells the others which step it has passed last, learns theirs, and opens it again for all
to act after the step that comes after the highest. Nobody can have passed that step, and whoever
waits at a closed gate waits for I/O threads only, never for a training loop that waits in turn.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from ..types import Action

CHECK_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Due:
    """What is to be done after a step."""

    step: int
    action: Action
    lets_in: bool = False
    """Whether those who wait to train too are let in with it."""


class Gate:
    """Counts the steps of this rank, and says what has been agreed on for each."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._closed = 0
        self._step = 0
        self._era = 0
        self._due: dict[str, Due] = {}
        self._lets_in = False
        self._done: set[str] = set()
        """Actions that were carried out; heartbeats may name them a little longer."""

    @property
    def step(self) -> int:
        """The step that was passed last."""
        return self._step

    @property
    def lets_in(self) -> bool:
        """Whether all let newcomers in after the step that was passed last."""
        return self._lets_in

    def reset(self, step: int) -> None:
        """Go on from a step; what was agreed on is void."""
        with self._condition:
            self._step = step
            self._era += 1
            self._due.clear()

    def pass_step(self, check: Callable[[], None] | None = None) -> list[Action]:
        """Pass the gate after a step, when it is open; returns what is to be done now.

        While it waits it calls ``check``, which may raise.
        """
        with self._condition:
            while not self._condition.wait_for(lambda: not self._closed, CHECK_SECONDS):
                if check is not None:
                    check()
            self._step += 1
            due = [due for due in self._due.values() if due.step == self._step]
            self._lets_in = any(one.lets_in for one in due)
        return sorted((one.action for one in due), key=lambda action: action.requested_at)

    def knows(self, action: Action) -> bool:
        """Whether a step has been agreed on for an action."""
        with self._condition:
            return action.action_id in self._due or action.action_id in self._done

    def has_done(self, action: Action) -> bool:
        """Whether an action was carried out here."""
        with self._condition:
            return action.action_id in self._done

    def done(self, action: Action) -> None:
        """An action was carried out: it is never due again."""
        with self._condition:
            self._done.add(action.action_id)

    def close(self) -> tuple[int, int]:
        """Let nobody pass; returns the step that was passed last, and in which era that was."""
        with self._condition:
            self._closed += 1
            return self._step, self._era

    def open(self, action: Action, step: int | None, era: int, *, lets_in: bool = False) -> None:
        """Let everybody pass; with a ``step`` of this era, the action is due after it."""
        with self._condition:
            self._closed -= 1
            if step is not None and era == self._era:
                self._due[action.action_id] = Due(step, action, lets_in)
            self._condition.notify_all()
