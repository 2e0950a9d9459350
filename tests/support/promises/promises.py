"""The promises of docs/state-machine.md across time, checked against a model of their own.

The model sees commands, replies and effects, what has been stored, and what programs were
told. It draws its own conclusions; of the machine it reads only who is a member now and which
calls are held.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from dtruntime.coordinator.state import Machine, Refused
from dtruntime.coordinator.state import commands as c
from dtruntime.coordinator.state.effects import Delete, Put
from dtruntime.coordinator.state.records import (
    CRASH_SAFE_KINDS,
    AskRecord,
    CheckpointRecord,
    JobRecord,
    RoundRecord,
)
from tests.support.machine_invariants import Rows, durable_rows, snapshot, violations
from tests.support.promises import report_promises
from tests.support.promises.action_promises import ActionPromises
from tests.support.promises.attempt_promises import AttemptPromises
from tests.support.promises.barrier_promises import BarrierPromises
from tests.support.promises.epoch_promises import EpochPromises, Readings
from tests.support.promises.program_promises import Programs
from tests.support.promises.promise_model import (
    Applied,
    JobModel,
    PromiseBroken,
    demand,
    live_members,
)
from tests.support.simulation.simulated_removal import NAMES, RemovalPromises

__all__ = ["PromiseBroken", "Promises"]

ROUNDING = 1e-6
LOSSES_KEPT = 200


class Promises:
    """The checks; `PromiseBroken` says which one failed."""

    def __init__(self, heartbeat_timeout: float, tick: float) -> None:
        self.jobs: dict[str, JobModel] = defaultdict(JobModel)
        self.programs = Programs(self.jobs)
        self.readings = Readings(self.jobs)
        self._barriers = BarrierPromises(self.programs)
        self._epochs = EpochPromises(self.readings)
        self._attempts = AttemptPromises()
        self._actions = ActionPromises()
        self.removals = RemovalPromises()
        self._once_stored: Callable[[], None] = lambda: None
        self._timeout = heartbeat_timeout
        self._tick = tick
        self._step = 0
        self._last_tick = 0.0
        self._last_stall = 0.0
        self._before: dict[str, Any] | None = None

    # Restarts

    def restarted(self, machine: Machine, rows: Rows, now: float) -> None:
        """A machine was made from what is stored."""
        demand(durable_rows(machine) == rows, "a restored machine differs from what was stored")
        self._check_state(machine)
        self._epochs.check(rows)
        self._attempts.restarted(rows)
        self._actions.restarted(machine)
        self.removals.restarted()
        self._step += 1
        self._last_tick = self._last_stall = now
        for name, model in self.jobs.items():
            model.forget_what_was_not_stored()
            model.live = live_members(machine, name)
            for incarnation in model.live:
                model.registered.setdefault(incarnation, self._step)
                model.heard[incarnation], model.heard_at[incarnation] = self._step, now
            if name not in NAMES:
                self._check_restarted(machine, name, model)

    def _check_restarted(self, machine: Machine, name: str, model: JobModel) -> None:
        job = machine.jobs.get(name)
        if job is None:
            demand(not model.generation, "a job was forgotten", name)
            return
        model.forgotten = job.roster.losses.newest_generation
        pending = job.checkpoints.pending
        model.begun = {key: dict(one.record.expected) for key, one in pending.items()}
        demand(job.roster.generation >= model.generation, "the generation went back", name)
        committed = set(job.checkpoints.committed)
        demand(committed == set(model.commits), "commits were forgotten", name)
        newest = report_promises.newest_there(model)
        demand(job.checkpoints.latest == newest, "the newest commit is not the latest", newest)

    def lost_power(self, rows: Rows, synced: Rows) -> None:
        """What is in ``rows`` and not in ``synced`` is gone: only what may be."""
        for key, record in rows.items():
            kept = synced.get(key)
            if kept == record:
                continue
            demand(key[0] in CRASH_SAFE_KINDS, "power loss took", key)
            if isinstance(record, RoundRecord):
                last = kept.round if isinstance(kept, RoundRecord) else 0
                self.jobs[key[1]].unlearn_rounds(record.barrier_id, last)
                self.programs.unlearn_rounds(key[1], record.barrier_id, last)
            elif isinstance(record, AskRecord):
                self._attempts.lost_power(key[1], record)

    # Commands

    def before(self, machine: Machine, command: Any) -> None:
        """A command is about to be applied."""
        incarnation = getattr(command, "incarnation", 0)
        fenced = incarnation and incarnation not in self.jobs[command.job].live
        self._before = snapshot(machine) if fenced else None

    def after(self, machine: Machine, command: Any, reply: Any, effects: Any, now: float) -> None:
        """A command was applied."""
        self._step += 1
        if isinstance(reply, Refused):
            demand(not effects, "a refusal has effects", command)
            same = self._before is None or snapshot(machine) == self._before
            demand(same, "a refused call changed the state", command)
        else:
            demand(self._before is None, "a call of one who is no member was taken", command)
            self._hear(command, reply, now)
        self._check_state(machine)
        self._epochs.after(machine, effects)
        lived = bool(self.jobs[command.job].live) if isinstance(command, c.RemoveJob) else False
        self._once_stored = self.removals.after(machine, command, reply, effects, lived)
        job = getattr(command, "job", None)
        for name in [job] if job else list(self.jobs):
            own = [e for e in effects if not isinstance(e, Put | Delete) or e.job == name]
            self._after_in_job(machine, name, command, reply, own, now)
        if isinstance(command, c.Tick):
            self._check_detection(now)

    def _check_state(self, machine: Machine) -> None:
        found = violations(machine)
        demand(not found, "the state is wrong", *found)

    def _hear(self, command: Any, reply: Any, now: float) -> None:
        who = getattr(command, "incarnation", 0)
        model = self.jobs[command.job] if hasattr(command, "job") else None
        if isinstance(reply, c.Registered) and model is not None:
            who = reply.incarnation
            if who not in model.live:
                model.registered[who] = self._step
                model.session_of[who] = command.session
        if who and model is not None:
            model.heard[who], model.heard_at[who] = self._step, now

    def _after_in_job(
        self, machine: Machine, name: str, command: Any, reply: Any, effects: Any, now: float
    ) -> None:
        model = self.jobs[name]
        before, model.live = model.live, live_members(machine, name)
        if name in NAMES:
            return
        lost = [who for who in before if who not in model.live]
        applied = Applied(machine, name, command, reply, effects, lost)
        self._note_losses(model, applied, now)
        self._check_ended(model, applied)
        self._barriers.after(model, applied)
        for effect in effects:
            if isinstance(effect, Put) and isinstance(effect.record, RoundRecord):
                model.heard.update(dict.fromkeys(effect.record.tickets, self._step))
        self._check_checkpoints(model, applied)
        self._attempts.after(model.live, applied)
        self._actions.after(applied)

    # Losses

    def _note_losses(self, model: JobModel, applied: Applied, now: float) -> None:
        lost, generations = applied.lost, applied.generations_of_losses()
        demand(set(generations) == set(lost), "losses and their events differ", lost, generations)
        for who in sorted(lost, key=lambda x: generations[x]):
            model.losses.append((generations[who], who, model.heard[who]))
        del model.losses[:-LOSSES_KEPT]
        if isinstance(applied.command, c.ReportEnded):
            told = set(applied.command.incarnations)
            demand(told.issuperset(lost), "declared dead, and nobody said so", lost, told)
        if isinstance(applied.command, c.Tick):
            for who in lost:
                silent = now - model.heard_at[who]
                demand(silent > self._timeout - ROUNDING, "declared dead too early", who, silent)

    def _check_detection(self, now: float) -> None:
        if now - self._last_tick > 2 * self._tick:
            self._last_stall = now
        self._last_tick = now
        for name, model in self.jobs.items():
            for who in model.live:
                silent = now - max(model.heard_at[who], self._last_stall)
                in_time = silent < self._timeout + ROUNDING
                demand(in_time, "not declared dead in time", name, who, silent)

    def _check_ended(self, model: JobModel, applied: Applied) -> None:
        """What has ended does not begin again when an old request comes late."""
        command, lost = applied.command, applied.lost
        if isinstance(command, c.Register) and isinstance(applied.reply, c.Registered):
            left = ("left", command.session) in model.ended
            dead = ("dead", command.session) in model.ended
            demand(not (left or (dead and lost)), "an ended session displaced others", command)
        elif isinstance(command, c.NotifyCheckpoint) and isinstance(applied.reply, c.Held):
            demand(_part(command) not in model.ended, "an aborted part is taken again", command)
            model.saving[command.call] = command
        for who in lost:
            how = "left" if isinstance(command, c.Deregister) else "dead"
            model.ended.add((how, model.session_of.get(who, "")))
        for call, reply in applied.released.items():
            if isinstance(reply, c.Aborted) and call in model.saving:
                model.ended.add(_part(model.saving[call]))

    # Checkpoints

    def _check_checkpoints(self, model: JobModel, applied: Applied) -> None:
        for effect in applied.effects:
            if isinstance(effect, Delete):
                demand(effect.kind != "checkpoint", "a commit disappeared", effect)
            elif isinstance(effect, Put) and effect.kind == "pending":
                demand(effect.key not in model.begun, "begun twice", effect)
                model.begun[effect.key] = dict(model.live)
            elif isinstance(effect, Put) and isinstance(effect.record, CheckpointRecord):
                if effect.key in model.commits:
                    report_promises.check_change(model, applied, effect.record)
                    continue
                model.commits[effect.key] = effect.record
                self._check_commit(model, applied.job, effect.record)
        for effect in applied.effects:
            if isinstance(effect, Delete) and effect.kind == "pending":
                model.begun.pop(effect.key, None)

    def _check_commit(self, model: JobModel, job: str, record: CheckpointRecord) -> None:
        parts = self.programs.writers(job, record)
        writers = set(parts)
        demand(len(parts) == len(writers) == record.parts, "wrong parts", record, parts)
        expected = model.begun.get(record.checkpoint_id)
        if record.newest_part:
            complete = expected is not None and writers == set(expected)
            demand(complete, "not the parts of all who were live", record, writers, expected)
        else:
            demand(len(writers) == 1 and expected is None, "not one writer", record, writers)
        if self._attempts.was_begun(job, record.checkpoint_id):
            passes = self.programs.passes(job, record)
            demand(len(passes) == 1, "parts of several passes were committed", record, passes)
        aborted = self.programs.aborted_parts[job, record.checkpoint_id]
        demand(not record.size_bytes & aborted, "an aborted part was committed", record)

    # What is stored, and what leaves

    def to_be_stored(self, machine: Machine, effects: Iterable[Any]) -> Callable[[], None]:
        """Remember what these effects mean once they are stored."""
        puts = [e for e in effects if isinstance(e, Put)]
        deletes = [e for e in effects if isinstance(e, Delete)]
        puts = [put for put in puts if put.job not in NAMES]
        changed = [e.job for e in puts if e.kind == "job"]
        views = {job: tuple(machine.jobs[job].roster.present_ranks()) for job in changed}
        once = self._once_stored

        def stored() -> None:
            once()
            self._stored(puts, deletes, views)

        return stored

    def _stored(
        self, puts: list[Put], deletes: list[Delete], views: dict[str, tuple[int, ...]]
    ) -> None:
        self._actions.stored(deletes)
        for put in puts:
            model, record = self.jobs[put.job], put.record
            if isinstance(record, JobRecord):
                demand(record.generation >= model.generation, "the generation went back", put)
                model.generation = record.generation
            elif isinstance(record, RoundRecord):
                model.stored_rounds[put.key, record.round] = record
                model.stored_counted |= set(record.tickets.items())
            elif isinstance(record, CheckpointRecord):
                model.stored_commits[put.key] = record
            self._attempts.stored(put)
        for job, view in views.items():
            model = self.jobs[job]
            known = model.views.setdefault(model.generation, view)
            demand(known == view, "one generation, two memberships", model.generation, known, view)

    def leaves(self, command: Any, reply: Any) -> None:
        """An answer leaves the coordinator."""
        if isinstance(reply, c.Registered):
            model = self.jobs[command.job]
            session = model.sessions.setdefault(reply.incarnation, command.session)
            demand(session == command.session, "an incarnation was given twice", reply)
            demand(reply.generation <= model.generation, "an unstored generation left", reply)
        elif isinstance(command, c.BeginCheckpoint):
            self._attempts.leaves(command, reply)
        elif isinstance(command, c.RequestAction):
            self._actions.leaves(command, reply)
        elif isinstance(command, c.ReportCheckpoints):
            report_promises.check_answer(self.jobs[command.job], command, reply)

    def final_rounds(self, job: str) -> list[set[int]]:
        """The incarnations that passed each of the newest rounds of the final barrier."""
        rounds = self.jobs[job].stored_rounds
        finals = sorted(key[1] for key in rounds if key[0] == "final")
        return [set(rounds["final", number].tickets) for number in finals[-3:]]


def _part(command: c.NotifyCheckpoint) -> tuple[Any, ...]:
    return "part", command.checkpoint_id, command.incarnation, command.generation
