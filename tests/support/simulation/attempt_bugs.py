"""Ways to break attempts at checkpoints, for tests that the simulation notices each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from dtruntime.coordinator.state import commands as c
from dtruntime.coordinator.state.checkpoints.attempts import Attempt, Attempts, PendingCheckpoint
from dtruntime.coordinator.state.checkpoints.commits import Checkpoints
from dtruntime.coordinator.state.roster import Roster

Patch = Callable[..., None]


def _numbers_begin_again(patch: Patch) -> None:
    record = Roster.record
    patch(Roster, "record", lambda self: replace(record(self), attempts_begun=0))


def _saves_share_an_attempt(patch: Patch) -> None:
    def asked(self: Attempts, command: c.BeginCheckpoint) -> Attempt | None:
        newest = self.newest(command.step)
        return newest if newest and command.incarnation in newest.tickets else None

    patch(Attempts, "asked", asked)


def _retries_begin_again(patch: Patch) -> None:
    patch(Attempts, "asked", lambda *_: None)


def _all_may_join(patch: Patch) -> None:
    patch(Checkpoints, "_may_join", lambda self, attempt, command: True)


def join_attempts_given_up(patch: Patch) -> None:
    """Let members join whose companions no longer wait."""
    patch(PendingCheckpoint, "given_up", False)


def _last_part_is_not_awaited(patch: Patch) -> None:
    add_part = Checkpoints._add_part

    def hasty(self: Checkpoints, pending: PendingCheckpoint, command: Any, *rest: Any) -> Any:
        expected = pending.record.expected
        if len(expected) > 2 and self.attempts.get(command.checkpoint_id):
            rank = max(expected.values())
            fewer = {who: r for who, r in expected.items() if r != rank}
            pending.record = replace(pending.record, expected=fewer)
        return add_part(self, pending, command, *rest)

    patch(Checkpoints, "_add_part", hasty)


ATTEMPT_BUGS: dict[str, Callable[[Patch], None]] = {
    "numbers begin again": _numbers_begin_again,
    "saves share an attempt": _saves_share_an_attempt,
    "retries begin again": _retries_begin_again,
    "all may join": _all_may_join,
    "the ended are revived": lambda patch: patch(Attempts, "was_begun", lambda *_: False),
    "ends are not noted": lambda patch: patch(Attempts, "end", lambda *_, **__: None),
    "the last part is not awaited": _last_part_is_not_awaited,
    "those who went past are awaited": lambda patch: patch(
        Checkpoints, "_end_passed", lambda *_: None
    ),
}
