"""The promises of docs/state-machine.md across time, checked against a model of their own.

The model sees commands, replies and effects, what has been stored, and what programs were
told. It draws its own conclusions; of the machine it reads only who is a member now.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from dtruntime.coordinator.state import Machine, Refused
from dtruntime.coordinator.state import commands as c
from dtruntime.coordinator.state.invariants import Rows, durable_rows, snapshot, violations
from dtruntime.coordinator.state.records import (
    CheckpointRecord,
    Delete,
    Emit,
    JobRecord,
    Put,
    Release,
    RoundRecord,
)

ROUNDING = 1e-6


class PromiseBroken(AssertionError):
    """The machine did what it promised not to do."""


def demand(holds: object, what: str, *details: object) -> None:
    if not holds:
        raise PromiseBroken(f"{what}: {', '.join(map(repr, details))}" if details else what)


class Waiter:
    """A held barrier call, as the model knows it."""

    def __init__(self, command: c.Arrive) -> None:
        self.command = command
        self.incarnation = command.incarnation


class JobModel:
    """What is known of one job since the beginning."""

    def __init__(self) -> None:
        self.live: dict[int, int] = {}
        """Incarnation to rank."""
        self.registered: dict[int, int] = {}
        """Incarnation to the number of the step in which it registered."""
        self.heard: dict[int, int] = {}
        self.heard_at: dict[int, float] = {}
        self.losses: list[tuple[int, int, int]] = []
        """Generation, incarnation, step in which it was last heard."""
        self.forgotten = 0
        """Losses up to this generation may be reported to anybody who was there."""
        self.waiting: dict[str, dict[int, Waiter]] = defaultdict(dict)
        self.present_at_open: dict[str, set[int]] = {}
        self.counted: set[tuple[int, int]] = set()
        self.last_round: dict[str, RoundRecord] = {}
        self.ended: set[tuple[Any, ...]] = set()
        """Sessions, barrier calls and parts that have ended since the coordinator started."""
        self.saving: dict[int, c.NotifyCheckpoint] = {}
        self.session_of: dict[int, str] = {}
        self.begun: dict[str, dict[int, int]] = {}
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
        return self.heard[lost] >= self.registered[incarnation]


class Promises:
    """The checks; `PromiseBroken` says which one failed."""

    def __init__(self, heartbeat_timeout: float, tick: float) -> None:
        self.jobs: dict[str, JobModel] = defaultdict(JobModel)
        self._timeout = heartbeat_timeout
        self._tick = tick
        self._step = 0
        self._last_tick = 0.0
        self._last_stall = 0.0
        self._fenced: dict[str, Any] | None = None
        # What programs did and were told, by (job, incarnation, ticket).
        self._entered: dict[tuple[str, int, int], str] = {}
        self._outcomes: dict[tuple[str, int, int], Any] = {}
        self._last_round: dict[tuple[str, int, str], int] = {}
        self._bits: dict[tuple[str, str], list[int]] = defaultdict(list)
        self._aborted: dict[tuple[str, str], int] = defaultdict(int)

    # What the coordinator does

    def restarted(self, machine: Machine, rows: Rows, now: float) -> None:
        """A machine was made from what is stored."""
        demand(durable_rows(machine) == rows, "a restored machine differs from what was stored")
        self._check_state(machine)
        self._step += 1
        self._last_tick = self._last_stall = now
        for name, model in self.jobs.items():
            job = machine.jobs.get(name)
            demand(job is not None or not model.generation, "a job was forgotten", name)
            model.waiting.clear()
            model.present_at_open.clear()
            model.losses.clear()
            model.ended.clear()
            model.saving.clear()
            model.counted = set(model.stored_counted)
            model.last_round = {key[0]: model.stored_rounds[key] for key in model.stored_rounds}
            model.commits = dict(model.stored_commits)
            model.live = _live(machine, name)
            if job is None:
                continue
            model.forgotten = job.roster.losses.newest_generation
            model.begun = {
                key: dict(pending.record.expected)
                for key, pending in job.checkpoints.pending.items()
            }
            for incarnation in model.live:
                model.registered.setdefault(incarnation, self._step)
                model.heard[incarnation], model.heard_at[incarnation] = self._step, now
            demand(job.roster.generation >= model.generation, "the generation went back", name)
            demand(
                set(job.checkpoints.committed) == set(model.commits), "commits were forgotten", name
            )

    def lost_power(self, rows: Rows, synced: Rows) -> None:
        """What is in ``rows`` and not in ``synced`` is gone: only what may be."""
        for key, record in rows.items():
            if synced.get(key) == record:
                continue
            demand(key[0] in ("round", "part", "pending"), "power loss took", key)
            if isinstance(record, RoundRecord):
                self._forget_rounds(key[1], record.barrier_id, synced.get(key))

    def _forget_rounds(self, job: str, barrier_id: str, kept: Any) -> None:
        model = self.jobs[job]
        last = kept.round if kept else 0
        for key in [k for k in model.stored_rounds if k[0] == barrier_id and k[1] > last]:
            record = model.stored_rounds.pop(key)
            model.stored_counted -= set(record.tickets.items())
            model.unlearned_rounds.append((barrier_id, record))
        for who in [k for k in self._last_round if k[0] == job and k[2] == barrier_id]:
            self._last_round[who] = min(self._last_round[who], last)

    def before(self, machine: Machine, command: Any) -> None:
        """A command is about to be applied."""
        incarnation = getattr(command, "incarnation", 0)
        fenced = incarnation and incarnation not in self.jobs[command.job].live
        self._fenced = snapshot(machine) if fenced else None

    def after(self, machine: Machine, command: Any, reply: Any, effects: Any, now: float) -> None:
        """A command was applied."""
        self._step += 1
        if self._fenced is not None:
            demand(isinstance(reply, Refused), "a call of one who is no member was taken", command)
        if isinstance(reply, Refused):
            demand(not effects, "a refusal has effects", command)
            demand(
                self._fenced is None or snapshot(machine) == self._fenced,
                "a refused call changed the state",
                command,
            )
        else:
            self._hear(command, reply, now)
        self._check_state(machine)
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
        job = getattr(command, "job", None)
        if job is None:
            return
        model = self.jobs[job]
        who = getattr(command, "incarnation", 0)
        if isinstance(reply, c.Registered):
            who = reply.incarnation
            if who not in model.live:
                model.registered[who] = self._step
                model.session_of[who] = command.session
        if who:
            model.heard[who], model.heard_at[who] = self._step, now

    def _after_in_job(
        self, machine: Machine, name: str, command: Any, reply: Any, effects: Any, now: float
    ) -> None:
        model = self.jobs[name]
        before, model.live = model.live, _live(machine, name)
        lost = [who for who in before if who not in model.live]
        self._note_losses(model, name, lost, effects)
        if lost and model.present_at_open:
            roster = machine.jobs[name].roster
            present, vacant = set(roster.present_ranks()), roster.vacant_ranks()
            for ranks in model.present_at_open.values():
                ranks &= present
                ranks.update(vacant)
        if isinstance(command, c.Tick):
            for who in lost:
                silent = now - model.heard_at[who]
                demand(silent > self._timeout - ROUNDING, "declared dead too early", who, silent)
        self._check_ended(model, command, reply, effects, lost)
        if isinstance(command, c.Arrive) and not isinstance(reply, Refused):
            self._check_arrival(machine, model, command, reply, lost)
        self._check_rounds(machine, model, name, command, effects, lost)
        self._check_releases(model, command, effects, lost)
        self._check_checkpoints(model, name, effects)

    def _check_ended(
        self, model: JobModel, command: Any, reply: Any, effects: Any, lost: list[int]
    ) -> None:
        """What has ended does not begin again when an old request comes late."""
        if isinstance(command, c.Register) and isinstance(reply, c.Registered):
            left = ("left", command.session) in model.ended
            dead = ("dead", command.session) in model.ended
            demand(not (left or (dead and lost)), "an ended session displaced others", command)
        elif isinstance(command, c.Arrive):
            key = "call", command.incarnation, command.ticket
            again = isinstance(reply, c.Held) and key in model.ended
            demand(not again, "a call that has timed out waits again", command)
        elif isinstance(command, c.NotifyCheckpoint):
            again = isinstance(reply, c.Held) and _part(command) in model.ended
            demand(not again, "a part that was aborted is taken again", command)
            if isinstance(reply, c.Held):
                model.saving[command.call] = command
        for who in lost:
            how = "left" if isinstance(command, c.Deregister) else "dead"
            model.ended.add((how, model.session_of.get(who, "")))
        for effect in effects:
            if _releases(effect, c.Aborted) and effect.call in model.saving:
                model.ended.add(_part(model.saving[effect.call]))

    # Losses and barriers

    def _note_losses(self, model: JobModel, name: str, lost: list[int], effects: Any) -> None:
        told = {
            int(e.event.fields["incarnation"]): int(e.event.fields["generation"])
            for e in effects
            if isinstance(e, Emit)
            and e.event.job == name
            and e.event.kind in ("worker.dead", "worker.left")
        }
        demand(set(told) == set(lost), "losses and their events differ", lost, told)
        for who in sorted(lost, key=lambda x: told[x]):
            model.losses.append((told[who], who, model.heard[who]))
        del model.losses[:-200]

    def _check_arrival(
        self, machine: Machine, model: JobModel, command: c.Arrive, reply: Any, lost: list[int]
    ) -> None:
        me = command.incarnation
        since = model.registered[me]
        untold = [x for x in model.losses if x[0] > command.generation and x[2] >= since]
        forgotten = command.generation < model.forgotten
        key = command.job, me, command.ticket
        if isinstance(reply, c.MembershipChanged):
            demand(untold or forgotten, "told of a change that does not concern it", command, reply)
        elif isinstance(reply, c.TimedOut) or self._is_stale(model, command):
            demand(not isinstance(reply, c.Held), "a call that has ended waits again", command)
        else:
            demand(not untold, "waits although a companion was lost", command, untold)
        if isinstance(reply, c.TimedOut):
            demand(key in self._entered, "a timeout of a call never made", command)
        if isinstance(reply, c.Held):
            waiting = model.waiting[command.barrier_id]
            if not waiting:
                present = machine.jobs[command.job].roster.present_ranks()
                model.present_at_open[command.barrier_id] = set(present)
            waiting[command.call] = Waiter(command)

    def _is_stale(self, model: JobModel, command: c.Arrive) -> bool:
        """Whether its member has passed the barrier by this call, or by a later one."""
        last = model.last_round.get(command.barrier_id)
        return last is not None and command.ticket <= last.tickets.get(command.incarnation, 0)

    def _check_rounds(
        self,
        machine: Machine,
        model: JobModel,
        name: str,
        command: Any,
        effects: Any,
        lost: list[int],
    ) -> None:
        for effect in effects:
            if isinstance(effect, Put) and effect.kind == "round":
                assert isinstance(effect.record, RoundRecord)
                passed = {e.call for e in effects if _releases(e, c.Passed)}
                self._check_completed(machine, model, name, command, effect.record, passed)

    def _check_completed(
        self,
        machine: Machine,
        model: JobModel,
        name: str,
        command: Any,
        record: RoundRecord,
        passed: set[int],
    ) -> None:
        waiting = model.waiting[record.barrier_id]
        arrived = {w.incarnation for call, w in waiting.items() if call in passed}
        if isinstance(command, c.Arrive):
            arrived.add(command.incarnation)
        who = set(record.tickets)
        demand(who == arrived, "participants are not those who wait", record, sorted(arrived))
        demand(len(who) == record.participants, "wrong number of participants", record)
        for pair in record.tickets.items():
            key = name, *pair
            demand(
                self._entered.get(key) == record.barrier_id, "counted without a call", key, record
            )
            demand(pair not in model.counted, "one call counted in two rounds", key, record)
            told = self._outcomes.get(key)
            demand(
                not isinstance(told, c.TimedOut | c.MembershipChanged),
                "counted after its program was told otherwise",
                key,
                told,
            )
        model.counted |= set(record.tickets.items())
        model.last_round[record.barrier_id] = record
        roster = machine.jobs[name].roster
        demand(not roster.vacant_ranks(), "passed without a vacant rank", record)
        ranks = {model.live[x] for x in who if x in model.live}
        opened = model.present_at_open.pop(record.barrier_id, None)
        for rank in opened if opened is not None else roster.present_ranks():
            demand(rank in ranks, "passed without one who was there", rank, record)

    def _check_releases(self, model: JobModel, command: Any, effects: Any, lost: list[int]) -> None:
        released = {e.call: e.reply for e in effects if isinstance(e, Release)}
        for barrier_id, waiting in model.waiting.items():
            for call, waiter in list(waiting.items()):
                reply = released.get(call)
                self._check_release(model, waiter, reply, lost)
                if isinstance(reply, c.TimedOut):
                    model.ended.add(("call", waiter.incarnation, waiter.command.ticket))
                if reply is not None or (isinstance(command, c.Hangup) and command.call == call):
                    del waiting[call]
            if not waiting:
                model.present_at_open.pop(barrier_id, None)

    def _check_release(self, model: JobModel, waiter: Waiter, reply: Any, lost: list[int]) -> None:
        me = waiter.incarnation
        if me in lost:
            ended = isinstance(reply, Refused | c.TimedOut)
            demand(ended, "one who is lost still waits, or passed", waiter.command, reply)
            return
        known = [x for x in lost if model.knew(me, x)]
        if known:
            demand(
                isinstance(reply, c.MembershipChanged | c.TimedOut),
                "a companion was lost and the wait goes on or passed",
                waiter.command,
                reply,
                known,
            )
        elif isinstance(reply, c.MembershipChanged):
            demand(False, "a stranger's loss failed a wait", waiter.command, reply)

    # Detection

    def _check_detection(self, now: float) -> None:
        if now - self._last_tick > 2 * self._tick:
            self._last_stall = now
        self._last_tick = now
        for name, model in self.jobs.items():
            for who in model.live:
                silent = now - max(model.heard_at[who], self._last_stall)
                in_time = silent < self._timeout + ROUNDING
                demand(in_time, "not declared dead in time", name, who, silent)

    # Checkpoints

    def _check_checkpoints(self, model: JobModel, name: str, effects: Any) -> None:
        for effect in effects:
            if isinstance(effect, Delete) and effect.kind == "checkpoint":
                demand(False, "a commit disappeared", effect.key)
            if not isinstance(effect, Put):
                continue
            if effect.kind == "pending":
                demand(effect.key not in model.begun, "begun twice", effect.key)
                model.begun[effect.key] = dict(model.live)
            elif effect.kind == "checkpoint":
                assert isinstance(effect.record, CheckpointRecord)
                demand(effect.key not in model.commits, "committed twice", effect.key)
                model.commits[effect.key] = effect.record
                self._check_commit(model, name, effect.record)
        for effect in effects:
            if isinstance(effect, Delete) and effect.kind == "pending":
                model.begun.pop(effect.key, None)

    def _check_commit(self, model: JobModel, name: str, record: CheckpointRecord) -> None:
        key = name, record.checkpoint_id
        parts = [who for n, who in enumerate(self._bits[key]) if record.size_bytes >> n & 1]
        writers = set(parts)
        demand(len(parts) == len(writers), "two parts of one writer", record, parts)
        expected = model.begun.get(record.checkpoint_id)
        if not record.newest_part:
            demand(len(writers) == 1 and expected is None, "not one writer", record, writers)
        else:
            demand(
                expected is not None and writers == set(expected), "wrong parts", record, writers
            )
        demand(record.parts == len(writers), "wrong number of parts", record)
        demand(not record.size_bytes & self._aborted[key], "an aborted part was committed", record)

    # What is stored, and what leaves

    def to_be_stored(self, machine: Machine, effects: Iterable[Any]) -> Callable[[], None]:
        """Remember what these effects mean once they are stored."""
        puts = [e for e in effects if isinstance(e, Put)]
        views = {
            e.job: tuple(machine.jobs[e.job].roster.present_ranks())
            for e in puts
            if e.kind == "job"
        }
        return lambda: self._stored(puts, views)

    def _stored(self, puts: list[Put], views: dict[str, tuple[int, ...]]) -> None:
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
        for name, view in views.items():
            model = self.jobs[name]
            known = model.views.setdefault(model.generation, view)
            demand(known == view, "one generation, two memberships", model.generation, known, view)

    def leaves(self, attempt: Any, reply: Any) -> None:
        """An answer leaves the coordinator."""
        command = attempt.command
        model = self.jobs[command.job]
        if isinstance(reply, c.Registered):
            session = model.sessions.setdefault(reply.incarnation, command.session)
            demand(session == command.session, "an incarnation was given twice", reply)
            demand(reply.generation <= model.generation, "an unstored generation left", reply)

    # What programs do and are told

    def entered(self, command: c.Arrive) -> None:
        """A program reaches a barrier."""
        key = command.job, command.incarnation, command.ticket
        self._entered[key] = command.barrier_id

    def gave_up(self, command: c.Arrive) -> None:
        """A program was told that the coordinator is away, or that it is fenced."""
        self._outcomes[command.job, command.incarnation, command.ticket] = None

    def came_out(self, command: c.Arrive, outcome: Any) -> None:
        """A program is told the outcome of a barrier."""
        key = command.job, command.incarnation, command.ticket
        self._outcomes[key] = outcome
        model = self.jobs[command.job]
        if not isinstance(outcome, c.Passed):
            demand(key[1:] not in model.stored_counted, "counted, and told otherwise", key, outcome)
            return
        if any(
            barrier_id == command.barrier_id and record.tickets.get(key[1]) == key[2]
            for barrier_id, record in model.unlearned_rounds
        ):
            return
        record = model.stored_rounds.get((command.barrier_id, outcome.round))
        demand(record is not None, "passed a round that is not stored", key, outcome)
        assert record is not None
        demand(
            (record.generation, record.participants) == (outcome.generation, outcome.participants),
            "told of another round",
            record,
            outcome,
        )
        demand(record.tickets.get(key[1]) == key[2], "passed without being counted", key, record)
        last = self._last_round.get((command.job, command.incarnation, command.barrier_id), 0)
        demand(outcome.round > last, "rounds do not rise", key, outcome)
        self._last_round[command.job, command.incarnation, command.barrier_id] = outcome.round

    def part_bit(self, job: str, checkpoint_id: str, incarnation: int) -> int:
        """A size in bytes that shows in the sum who wrote a part."""
        writers = self._bits[job, checkpoint_id]
        writers.append(incarnation)
        return 1 << len(writers) - 1

    def saved(self, command: c.NotifyCheckpoint, outcome: Any) -> None:
        """A program is told the outcome of a save."""
        record = self.jobs[command.job].stored_commits.get(command.checkpoint_id)
        included = bool(record and record.size_bytes & command.size_bytes)
        if isinstance(outcome, c.Committed):
            demand(included, "told of a commit that does not hold its part", command, record)
        elif isinstance(outcome, c.Aborted):
            demand(not included, "told of an abort, and committed", command, record)
            self._aborted[command.job, command.checkpoint_id] |= command.size_bytes

    def final_rounds(self, job: str) -> list[set[int]]:
        """The incarnations that passed each of the newest rounds of the final barrier."""
        rounds = self.jobs[job].stored_rounds
        finals = sorted((key[1], record) for key, record in rounds.items() if key[0] == "final")
        return [set(record.tickets) for _, record in finals[-3:]]


def _part(command: c.NotifyCheckpoint) -> tuple[Any, ...]:
    return "part", command.checkpoint_id, command.incarnation, command.generation


def _releases(effect: Any, kind: type[Any]) -> bool:
    return isinstance(effect, Release) and isinstance(effect.reply, kind)


def _live(machine: Machine, job: str) -> dict[int, int]:
    known = machine.jobs.get(job)
    members = known.roster.slots if known else []
    return {m.incarnation: m.rank for m in members if m is not None and m.live}
