"""What a model that watches the coordinator from outside knows of one job."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from dtruntime.coordinator.state import Machine
from dtruntime.coordinator.state import commands as c
from dtruntime.coordinator.state.effects import Effect, Emit, Release
from dtruntime.coordinator.state.records import CheckpointRecord, RoundRecord


class PromiseBroken(AssertionError):
    """The machine did what it promised not to do."""


def demand(holds: object, what: str, *details: object) -> None:
    """Raise `PromiseBroken` unless ``holds``."""
    if not holds:
        raise PromiseBroken(f"{what}: {', '.join(map(repr, details))}" if details else what)


@dataclass(frozen=True)
class Applied:
    """A command that was applied, seen from one job."""

    machine: Machine
    job: str
    command: Any
    reply: Any
    effects: list[Effect]
    """Without the records of other jobs."""
    lost: list[int]
    """Incarnations that were members before."""

    @property
    def released(self) -> dict[int, Any]:
        """Replies to held calls."""
        return {e.call: e.reply for e in self.effects if isinstance(e, Release)}

    def generations_of_losses(self) -> dict[int, int]:
        """Of each lost incarnation, as the journal has it."""
        return {
            int(effect.event.fields["incarnation"]): int(effect.event.fields["generation"])
            for effect in self.effects
            if isinstance(effect, Emit)
            and effect.event.job == self.job
            and effect.event.kind in ("worker.dead", "worker.left")
        }


class JobModel:
    """One job since the beginning."""

    def __init__(self) -> None:
        self.live: dict[int, int] = {}
        """Incarnation to rank."""
        self.registered: dict[int, int] = {}
        """Incarnation to the number of the step in which it registered."""
        self.heard: dict[int, int] = {}
        self.heard_at: dict[int, float] = {}
        self.session_of: dict[int, str] = {}
        self.losses: list[tuple[int, int, int]] = []
        """Generation, incarnation, step in which it was last heard."""
        self.forgotten = 0
        """Losses up to this generation may be reported to anybody who was there."""
        self.waiting: dict[str, dict[int, c.Arrive]] = defaultdict(dict)
        """Held calls by barrier and call."""
        self.present_at_open: dict[str, set[int]] = {}
        self.counted: set[tuple[int, int]] = set()
        """Incarnation and ticket of every call that a completed round counted."""
        self.last_round: dict[str, RoundRecord] = {}
        self.ended: set[tuple[Any, ...]] = set()
        """Sessions, barrier calls and parts that have ended since the coordinator started."""
        self.saving: dict[int, c.NotifyCheckpoint] = {}
        self.begun: dict[str, dict[int, int]] = {}
        """Who was live when a pending checkpoint was begun."""
        self.commits: dict[str, CheckpointRecord] = {}
        # What has left the coordinator, or is stored.
        self.sessions: dict[int, str] = {}
        self.generation = 0
        self.views: dict[int, tuple[int, ...]] = {}
        self.stored_counted: set[tuple[int, int]] = set()
        self.stored_rounds: dict[tuple[str, int], RoundRecord] = {}
        self.stored_commits: dict[str, CheckpointRecord] = {}
        self.unlearned_rounds: list[tuple[str, RoundRecord]] = []
        """Completed and answered, then lost with the coordinator's power."""

    def knew(self, incarnation: int, lost: int) -> bool:
        """Whether one was registered when the other was last heard."""
        return self.heard[lost] >= self.registered[incarnation]

    def forget_what_was_not_stored(self) -> None:
        """The coordinator starts again."""
        for soft in (self.waiting, self.present_at_open, self.losses, self.ended, self.saving):
            soft.clear()
        self.counted = set(self.stored_counted)
        self.commits = dict(self.stored_commits)
        self.last_round = {key[0]: record for key, record in self.stored_rounds.items()}

    def unlearn_rounds(self, barrier_id: str, last: int) -> None:
        """Rounds after ``last`` were lost with the coordinator's power."""
        for key in [k for k in self.stored_rounds if k[0] == barrier_id and k[1] > last]:
            record = self.stored_rounds.pop(key)
            self.stored_counted -= set(record.tickets.items())
            self.unlearned_rounds.append((barrier_id, record))

    def was_unlearned(self, command: c.Arrive) -> bool:
        """Whether a call was counted in a round that was lost with the power."""
        return any(
            barrier_id == command.barrier_id
            and record.tickets.get(command.incarnation) == command.ticket
            for barrier_id, record in self.unlearned_rounds
        )


def live_members(machine: Machine, job: str) -> dict[int, int]:
    """Incarnation to rank of the live members of a job."""
    known = machine.jobs.get(job)
    members = known.roster.slots if known else []
    return {m.incarnation: m.rank for m in members if m is not None and m.live}
