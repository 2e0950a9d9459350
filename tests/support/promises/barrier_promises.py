"""What is promised to those who wait at barriers, checked after every command."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dtruntime.coordinator.state import Refused
from dtruntime.coordinator.state import commands as c
from dtruntime.coordinator.state.effects import Put
from dtruntime.coordinator.state.records import RoundRecord
from tests.support.promises.program_promises import Programs
from tests.support.promises.promise_model import Applied, JobModel, demand


class BarrierPromises:
    """The checks for one coordinator's barriers."""

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self._ranks: dict[tuple[str, str], tuple[int, ...]] = {}
        """Who meets at a barrier, where not all do."""

    def after(self, model: JobModel, applied: Applied) -> None:
        """A command was applied and its losses are noted."""
        self._follow_presence(model, applied)
        command, reply = applied.command, applied.reply
        if isinstance(command, c.Arrive) and not isinstance(reply, Refused):
            self._check_arrival(model, applied, command, reply)
        for effect in applied.effects:
            if isinstance(effect, Put) and isinstance(effect.record, RoundRecord):
                self._check_completed(model, applied, effect.record)
        self._check_releases(model, applied)

    def _follow_presence(self, model: JobModel, applied: Applied) -> None:
        """A rank that was there when a round opened is awaited as long as it is present."""
        if applied.lost and model.present_at_open:
            roster = applied.machine.jobs[applied.job].roster
            present, vacant = set(roster.present_ranks()), roster.vacant_ranks()
            for barrier_id, ranks in model.present_at_open.items():
                ranks &= present
                ranks.update(self._concerned(applied.job, barrier_id, vacant))

    def _concerned(self, job: str, barrier_id: str, ranks: Iterable[int]) -> set[int]:
        only = self._ranks.get((job, barrier_id), ())
        return {rank for rank in ranks if not only or rank in only}

    def _check_arrival(
        self, model: JobModel, applied: Applied, command: c.Arrive, reply: Any
    ) -> None:
        self._ranks[applied.job, command.barrier_id] = command.ranks
        since = model.registered[command.incarnation]
        untold = [x for x in model.losses if x[0] > command.generation and x[2] >= since]
        if isinstance(reply, c.MembershipChanged):
            forgotten = command.generation < model.forgotten
            demand(untold or forgotten, "told of a change that does not concern it", command, reply)
        elif isinstance(reply, c.TimedOut) or self._is_stale(model, command):
            demand(not isinstance(reply, c.Held), "a call that has ended waits again", command)
        else:
            demand(not untold, "waits although a companion was lost", command, untold)
        if isinstance(reply, c.Held):
            self._begin_to_wait(model, applied, command)

    def _is_stale(self, model: JobModel, command: c.Arrive) -> bool:
        """Whether its member has passed the barrier by this call, or by a later one."""
        last = model.last_round.get(command.barrier_id)
        return last is not None and command.ticket <= last.tickets.get(command.incarnation, 0)

    def _begin_to_wait(self, model: JobModel, applied: Applied, command: c.Arrive) -> None:
        key = "call", command.incarnation, command.ticket
        demand(key not in model.ended, "a call that has timed out waits again", command)
        waiting = model.waiting[command.barrier_id]
        if not waiting:
            present = applied.machine.jobs[applied.job].roster.present_ranks()
            awaited = self._concerned(applied.job, command.barrier_id, present)
            model.present_at_open[command.barrier_id] = awaited
        waiting[command.call] = command

    def _check_completed(self, model: JobModel, applied: Applied, record: RoundRecord) -> None:
        waiting, released = model.waiting[record.barrier_id], applied.released
        arrived = {
            waiter.incarnation
            for call, waiter in waiting.items()
            if isinstance(released.get(call), c.Passed)
        }
        if isinstance(applied.command, c.Arrive):
            arrived.add(applied.command.incarnation)
        who = set(record.tickets)
        demand(who == arrived, "participants are not those who wait", record, sorted(arrived))
        demand(len(who) == record.participants, "wrong number of participants", record)
        left_out = len(model.live.keys() - who)
        demand(left_out == record.left_out, "wrong number of members left out", record, left_out)
        for pair in record.tickets.items():
            self._check_counted(model, applied.job, pair, record)
        model.counted |= set(record.tickets.items())
        model.last_round[record.barrier_id] = record
        self._check_nobody_is_missing(model, applied, record)

    def _check_counted(
        self, model: JobModel, job: str, pair: tuple[int, int], record: RoundRecord
    ) -> None:
        key = job, *pair
        at = self._programs.entered_at.get(key)
        demand(at == record.barrier_id, "counted without a call", key, record)
        demand(pair not in model.counted, "one call counted in two rounds", key, record)
        told = self._programs.outcomes.get(key)
        otherwise = isinstance(told, c.TimedOut | c.MembershipChanged)
        demand(not otherwise, "counted after its program was told otherwise", key, told)

    def _check_nobody_is_missing(
        self, model: JobModel, applied: Applied, record: RoundRecord
    ) -> None:
        roster = applied.machine.jobs[applied.job].roster
        vacant = self._concerned(applied.job, record.barrier_id, roster.vacant_ranks())
        demand(not vacant, "passed without a vacant rank", record)
        ranks = {model.live[x] for x in record.tickets if x in model.live}
        opened = model.present_at_open.pop(record.barrier_id, None)
        present = self._concerned(applied.job, record.barrier_id, roster.present_ranks())
        for rank in opened if opened is not None else present:
            demand(rank in ranks, "passed without one who was there", rank, record)

    def _check_releases(self, model: JobModel, applied: Applied) -> None:
        command, released = applied.command, applied.released
        hung_up = command.call if isinstance(command, c.Hangup) else 0
        for barrier_id, waiting in model.waiting.items():
            for call, waiter in list(waiting.items()):
                reply = released.get(call)
                self._check_release(model, waiter, reply, applied.lost)
                if isinstance(reply, c.TimedOut):
                    model.ended.add(("call", waiter.incarnation, waiter.ticket))
                if reply is not None or call == hung_up:
                    del waiting[call]
            if not waiting:
                model.present_at_open.pop(barrier_id, None)
        job = applied.machine.jobs.get(applied.job)
        held = job.barriers.held_calls if job else set()
        calls = {call for waiting in model.waiting.values() for call in waiting}
        demand(calls == held, "other calls are held than those that wait", calls, held)

    def _check_release(
        self, model: JobModel, waiter: c.Arrive, reply: Any, lost: list[int]
    ) -> None:
        if waiter.incarnation in lost:
            ended = isinstance(reply, Refused | c.TimedOut)
            demand(ended, "one who is lost still waits, or passed", waiter, reply)
            return
        known = [x for x in lost if model.knew(waiter.incarnation, x)]
        if known:
            ended = isinstance(reply, c.MembershipChanged | c.TimedOut)
            demand(ended, "a companion was lost: the wait goes on, or passed", waiter, reply, known)
        else:
            changed = isinstance(reply, c.MembershipChanged)
            demand(not changed, "a stranger's loss failed a wait", waiter, reply)
