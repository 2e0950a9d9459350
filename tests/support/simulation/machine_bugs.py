"""Ways to break the machine that the simulation must notice."""

from collections.abc import Callable
from typing import Any

import msgspec

from dtruntime.coordinator.state import barriers, effects, machine, operator_requests, roster
from dtruntime.coordinator.state.checkpoints import attempts
from dtruntime.coordinator.state.commands import Arrive, Passed


def count_duplicate_arrivals(patch: Callable[..., None]) -> None:
    arrive = barriers.Barriers.arrive

    def counting(self: barriers.Barriers, c: Arrive, member: Any, out: Any) -> Any:
        round_ = self.open.get(c.barrier_id)
        if round_ and member.rank in round_.arrived and len(round_.missing_ranks()) == 1:
            return self._complete(round_, out)
        return arrive(self, c, member, out)

    patch(barriers.Barriers, "arrive", counting)


def reuse_incarnations(patch: Callable[..., None]) -> None:
    begin = roster.Roster._begin_world

    def starting_over(self: roster.Roster, *args: Any) -> None:
        begin(self, *args)
        self.next_incarnation = 1
        self._oldest.clear()

    patch(roster.Roster, "_begin_world", starting_over)


def take_calls_of_the_superseded(patch: Callable[..., None]) -> None:
    find = roster.Roster.find

    def trusting(self: roster.Roster, worker_id: str, incarnation: int) -> Any:
        member = self.by_id.get(worker_id)
        return member if member and member.live else find(self, worker_id, incarnation)

    patch(roster.Roster, "find", trusting)


def count_retries_in_the_next_round(patch: Callable[..., None]) -> None:
    arrive = barriers.Barriers.arrive

    def forgetful(self: barriers.Barriers, c: Arrive, member: Any, out: Any) -> Any:
        done = self.completed.pop(c.barrier_id, None)
        reply = arrive(self, c, member, out)
        if done:
            self.completed.setdefault(c.barrier_id, done)
        return reply

    patch(barriers.Barriers, "arrive", forgetful)


def answer_some_waiters_otherwise(patch: Callable[..., None]) -> None:
    release = effects.Outbox.release

    def lying(self: effects.Outbox, call: int, reply: Any) -> None:
        if isinstance(reply, Passed) and call % 7 == 0:
            reply = msgspec.structs.replace(reply, round=reply.round + 1)
        release(self, call, reply)

    patch(effects.Outbox, "release", lying)


def fail_waits_for_ghosts(patch: Callable[..., None]) -> None:
    lose = barriers.Barriers.lose

    def nervous(self: barriers.Barriers, losses: list[Any], out: Any) -> None:
        lose(self, [msgspec.structs.replace(x, last_heard=10**9) for x in losses], out)

    patch(barriers.Barriers, "lose", nervous)


def mix_up_values(patch: Callable[..., None]) -> None:
    values = barriers.Round.values

    def mixed(self: barriers.Round) -> Any:
        found = values(self)
        return found and {rank: next(iter(found.values())) for rank in found}

    patch(barriers.Round, "values", mixed)


def keep_values_of_the_withdrawn(patch: Callable[..., None]) -> None:
    withdraw = barriers.Barriers._withdraw

    def keeping(self: barriers.Barriers, call: int) -> None:
        round_ = self._calls[call][0]
        before = dict(round_.payloads)
        withdraw(self, call)
        round_.payloads.update(before)

    patch(barriers.Barriers, "_withdraw", keeping)


def number_actions_anew(patch: Callable[..., None]) -> None:
    record = roster.Roster.record
    patch(
        roster.Roster,
        "record",
        lambda self: msgspec.structs.replace(record(self), actions_requested=0),
    )


MACHINE_BUGS: dict[str, Callable[[Callable[..., None]], None]] = {
    "duplicate arrivals count": count_duplicate_arrivals,
    "incarnations are reused": reuse_incarnations,
    "no fence": take_calls_of_the_superseded,
    "retries count in the next round": count_retries_in_the_next_round,
    "two answers to one round": answer_some_waiters_otherwise,
    "ghosts fail waits": fail_waits_for_ghosts,
    "losses are not told": lambda patch: patch(roster.Roster, "losses_since", lambda *args: ()),
    "ranks stay lost": lambda patch: patch(roster.Roster, "_reopen_ranks", lambda *args: None),
    "old sessions return": lambda patch: patch(roster.Roster, "_check_session", lambda *_: None),
    "hang-ups still count": lambda patch: patch(barriers.Barriers, "hang_up", lambda *_: None),
    "parts of the lost are awaited": lambda patch: patch(
        attempts.PendingCheckpoints, "lose", lambda *args: None
    ),
    "values are mixed up": mix_up_values,
    "values of the withdrawn stay": keep_values_of_the_withdrawn,
    "values are forgotten": lambda patch: patch(barriers.Round, "values", lambda self: None),
    "actions are numbered anew": number_actions_anew,
    "actions outlive their workers": lambda patch: patch(
        operator_requests.Actions, "lose", lambda *args: None
    ),
    "heartbeats do not tell of actions": lambda patch: patch(
        roster.Roster, "show_actions", lambda *args: None
    ),
    "deaths come early": lambda patch: patch(
        machine.Machine, "deadline", lambda self, member: member.last_seen + 2.5
    ),
    "deaths come late": lambda patch: patch(
        machine.Machine, "deadline", lambda self, member: member.last_seen + 4.0
    ),
}
