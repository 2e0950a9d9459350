"""Any sequence of commands, chosen by hypothesis, against the invariants and a model."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dtruntime.coordinator.state import Machine, Refused
from dtruntime.coordinator.state import commands as c
from dtruntime.coordinator.state.effects import Put
from tests.support.machine_bench import DATASET, JOB, SAMPLES, TIMEOUT, Bench, Call, digest_of
from tests.support.machine_invariants import durable_rows

IDS = st.sampled_from(["", "", "x", "y", "worker-1"])
RANKS = st.sampled_from([None, None, 0, 1, 2])
SIZES = st.sampled_from([0, 0, 3])
BARRIERS = st.sampled_from(["b", "c"])
STEPS = st.sampled_from([1, 2])
CHECKPOINTS = st.sampled_from(["k1", "k2", "k3"])
SMALL = st.integers(0, 7)
TENS = st.sampled_from([0, 5, 10, 20, 50])


class AnyCommands(RuleBasedStateMachine):
    """All commands, from members, ex-members and strangers, over time and restarts."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench()
        self.members: list[c.Registered] = []
        self.calls: list[Call] = []
        self.incarnations: dict[int, str] = {}
        self.generation = 0
        self.views: dict[int, tuple[int, ...]] = {}
        self.commits: dict[str, Any] = {}
        self.tickets: dict[int, int] = {}
        self.arrived: dict[tuple[int, int], str] = {}
        self.counted: set[tuple[int, int]] = set()
        self.handed: dict[tuple[int, int], set[bool]] = {}
        """Whether the calls of a ticket handed something round."""
        self.saves: dict[int, int] = {}
        self.told_ids: dict[tuple[int, int, int], str] = {}
        self.tickets_of: dict[tuple[str, int], int] = {}
        self.ranks_of: dict[str, tuple[int, ...]] = {}
        self.over_ids: set[str] = set()
        self.finished: set[str] = set()
        self.asked: set[str] = set()
        self.over_actions: set[str] = set()

    @initialize(size=SIZES)
    def first_member(self, size: int) -> None:
        self._apply(c.RegisterDataset(JOB, DATASET, SAMPLES, 10))
        self.register("", None, size, 0, 0)

    @rule(worker_id=IDS, rank=RANKS, size=SIZES, attempt=st.sampled_from([0, 0, 0, 1]), old=SMALL)
    def register(self, worker_id: str, rank: int | None, size: int, attempt: int, old: int) -> None:
        session = f"s{len(self.members) - old}" if old < 2 else f"s{len(self.members)}"
        command = c.Register(JOB, worker_id, session, rank=rank, world_size=size, attempt=attempt)
        reply = self._apply(command)
        if reply is None:
            return
        assert isinstance(reply, c.Registered)
        known = self.incarnations.setdefault(reply.incarnation, session)
        assert known == session, "an incarnation was given twice"
        if reply.incarnation == max(self.incarnations):
            self.members.append(reply)

    @precondition(lambda self: self.members)
    @rule(who=SMALL, epoch=st.integers(0, 3), seconds=st.sampled_from([0.0, 1.0, 9.0]))
    def beat(self, who: int, epoch: int, seconds: float) -> None:
        m = self._member(who)
        beat = c.Heartbeat(
            JOB, m.worker_id, m.incarnation, step=1, epoch=epoch, step_seconds=seconds
        )
        pulse = self._apply(beat)
        if pulse is not None:
            assert {action.action_id for action in pulse.actions} == self.asked

    @rule(kind=st.sampled_from(["stop", "checkpoint", "drain", "dance"]), who=SMALL)
    def request(self, kind: str, who: int) -> None:
        worker = self._member(who).worker_id if kind == "drain" and self.members else ""
        before = self.bench.job.roster.actions_requested
        reply = self._apply(c.RequestAction(JOB, kind, worker))
        if reply is None:
            return
        key = reply.action.action_id
        assert (key in self.asked) == (self.bench.job.roster.actions_requested == before)
        assert key not in self.over_actions, "an action's id was given twice"
        assert (reply.action.kind, reply.action.worker_id) == (kind, worker)

    @precondition(lambda self: self.asked or self.over_actions)
    @rule(which=SMALL)
    def complete(self, which: int) -> None:
        keys = sorted(self.asked | self.over_actions)
        self.bench.complete(keys[-1 - which % len(keys)])

    @precondition(lambda self: self.members)
    @rule(who=SMALL)
    def leave(self, who: int) -> None:
        m = self._member(who)
        self._apply(c.Deregister(JOB, m.worker_id, m.incarnation))

    @precondition(lambda self: self.members)
    @rule(
        who=SMALL,
        barrier=BARRIERS,
        told=st.sampled_from([0, 1, 2]),
        retry=st.booleans(),
        hands=st.booleans(),
        ranks=st.sampled_from([(), (), (0, 1)]),
    )
    def arrive(
        self,
        who: int,
        barrier: str,
        told: int,
        retry: bool,
        hands: bool,
        ranks: tuple[int, ...],
    ) -> None:
        m = self._member(who)
        ticket = self.tickets.get(m.incarnation, 0)
        if not (retry and ticket and self.arrived.get((m.incarnation, ticket)) == barrier):
            ticket += 1
        self.tickets[m.incarnation] = ticket
        self.arrived[m.incarnation, ticket] = barrier
        generation = [0, m.generation, self.generation][told]
        try:
            call = self.bench.arrive(
                m,
                barrier,
                told=generation,
                ticket=ticket,
                timeout=2.0,
                payload=_payload(m.incarnation, ticket) if hands else None,
                ranks=ranks,
            )
        except Refused:
            return
        self.handed.setdefault((m.incarnation, ticket), set()).add(hands)
        self.calls.append(call)

    @precondition(lambda self: self.members)
    @rule(who=SMALL, key=CHECKPOINTS, partial=st.booleans(), told=st.booleans(), wait=st.booleans())
    def save(self, who: int, key: str, partial: bool, told: bool, wait: bool) -> None:
        m = self._member(who)
        generation = self.generation if told else m.generation
        timeout = 2.0 if wait else 0.0
        try:
            call = self.bench.save(m, key, partial=partial, told=generation, timeout=timeout)
        except Refused:
            return
        self.calls.append(call)

    @precondition(lambda self: self.members)
    @rule(who=SMALL, step=STEPS, again=st.sampled_from([-1, 0, 0, 1, 1]))
    def begin(self, who: int, step: int, again: int) -> None:
        m = self._member(who)
        ticket = max(1, self.saves.get(m.incarnation, 0) + again)
        reply = self._apply(c.BeginCheckpoint(JOB, m.worker_id, m.incarnation, step, ticket))
        if reply is None:
            return
        self.saves[m.incarnation] = max(ticket, self.saves.get(m.incarnation, 0))
        known = self.told_ids.setdefault((m.incarnation, step, ticket), reply.checkpoint_id)
        assert known == reply.checkpoint_id, "a retry was told another id"
        first = self.tickets_of.setdefault((reply.checkpoint_id, m.incarnation), ticket)
        assert first == ticket, "one id for two saves of one member"
        ranks = self.ranks_of.setdefault(reply.checkpoint_id, reply.ranks)
        assert ranks == reply.ranks

    @precondition(lambda self: self.members and self.ranks_of)
    @rule(who=SMALL, which=SMALL, told=st.booleans(), wait=st.booleans())
    def save_begun(self, who: int, which: int, told: bool, wait: bool) -> None:
        ids = list(self.ranks_of)
        key = ids[-1 - which % len(ids)]
        m = self._member(who)
        generation = self.generation if told else m.generation
        step, timeout = int(key.split("-")[1]), 2.0 if wait else 0.0
        try:
            call = self.bench.save(m, key, told=generation, timeout=timeout, step=step)
        except Refused:
            return
        over = key in self.over_ids
        assert not over or isinstance(call.reply, c.Aborted | c.Committed), "an end was not final"
        self.calls.append(call)

    @precondition(lambda self: self.members)
    @rule(who=SMALL, back=st.sampled_from([0, 0, 0, 1]), upto=TENS, wait=st.booleans())
    def claim(self, who: int, back: int, upto: int, wait: bool) -> None:
        m, ledger = self._member(who), self._ledger()
        lane = SAMPLES // len(self.members) if self.members else SAMPLES
        segment = max(0, ledger.current - back) if ledger else 0
        timeout = 2.0 if wait else 0.0
        try:
            call = self.bench.claim(m, segment, min(upto, lane), lane, timeout=timeout)
        except Refused:
            return
        self.calls.append(call)

    @precondition(lambda self: self.members)
    @rule(
        who=SMALL, back=st.sampled_from([0, 0, 1]), position=TENS, wrong=st.sampled_from([0, 0, 1])
    )
    def commit(self, who: int, back: int, position: int, wrong: int) -> None:
        m, ledger = self._member(who), self._ledger()
        reader = ledger.readers.get(m.incarnation) if ledger else None
        if reader is None:
            return
        segment = max(reader.committed_segment, ledger.current - back)
        count = reader.count + position - reader.committed_position + wrong
        for number in range(reader.committed_segment, segment):
            count += ledger.taken(reader, number)
        try:
            self.bench.commit(m, segment, position, min(SAMPLES, max(0, count)))
        except Refused:
            return

    @rule(rank=SMALL, weight=st.sampled_from([0, 30, 100]), measured=st.booleans())
    def rebalance(self, rank: int, weight: int, measured: bool) -> None:
        self._apply(c.Rebalance(JOB, DATASET, 0, {} if measured else {rank: weight}))

    @precondition(lambda self: self.members)
    @rule(who=SMALL, base=st.sampled_from([0, 10]), count=TENS, world=SMALL, loads=SMALL)
    def report(self, who: int, base: int, count: int, world: int, loads: int) -> None:
        m = self._member(who)
        self._apply(
            c.ReportCoverage(
                JOB,
                m.worker_id,
                m.incarnation,
                DATASET,
                epoch=1,
                base=digest_of(range(base)),
                digest=digest_of(range(count)),
                world_size=world,
                generation=m.generation,
                loads=loads,
            )
        )

    @precondition(lambda self: self.calls)
    @rule(which=SMALL)
    def hang_up(self, which: int) -> None:
        self.bench.hang_up(self.calls.pop(-1 - which % len(self.calls)))

    @rule(name=CHECKPOINTS, samples=st.sampled_from([10, 20]))
    def register_dataset(self, name: str, samples: int) -> None:
        self._apply(c.RegisterDataset(JOB, name, samples, 10))

    @rule(seconds=st.sampled_from([0.0, 0.25, 0.25, 0.5, 2.0, 60.0]))
    def pass_time(self, seconds: float) -> None:
        self.bench.tick(seconds)

    @rule()
    def fall_silent(self) -> None:
        self.bench.wait(TIMEOUT)

    @rule()
    def restart(self) -> None:
        self.bench.restart()
        self.calls.clear()

    @invariant()
    def promises_hold(self) -> None:
        if JOB not in self.bench.machine.jobs:
            return
        job = self.bench.job
        assert job.roster.generation >= self.generation, "the generation went back"
        self.generation = job.roster.generation
        present = tuple(job.roster.present_ranks())
        assert self.views.setdefault(self.generation, present) == present
        for key, record in self.commits.items():
            assert job.checkpoints.committed.get(key) == record, "a commit changed"
        self.commits = dict(job.checkpoints.committed)
        assert not self.over_ids & self.commits.keys() - self.finished, "an end was not final"
        self.finished |= self.commits.keys()
        self.over_ids |= self.ranks_of.keys() - job.checkpoints.pending.keys()
        for key in self.finished & self.ranks_of.keys():
            assert self.commits[key].parts == len(self.ranks_of[key]), "parts are missing"
        assert {call.number for call in self.calls if call.held} == job.held_calls

    @invariant()
    def rounds_count_every_call_once(self) -> None:
        for effect in self.bench.effects:
            if not isinstance(effect, Put) or effect.kind != "round":
                continue
            record: Any = effect.record
            pairs = set(record.tickets.items())
            assert all(self.arrived[pair] == effect.key for pair in pairs)
            assert not pairs & self.counted, "one call was counted in two rounds"
            self.counted |= pairs
            self._check_values(effect.record)
        self.bench.effects = []

    @invariant()
    def actions_end_for_good(self) -> None:
        if JOB not in self.bench.machine.jobs:
            return
        pending = set(self.bench.job.actions.pending)
        assert not pending & self.over_actions, "an action that was over is pending"
        self.over_actions |= self.asked - pending
        self.asked = pending

    @invariant()
    def a_restored_machine_is_the_same(self) -> None:
        restored = Machine(TIMEOUT)
        restored.restore([(*k, r) for k, r in self.bench.rows.items()], self.bench.now)
        assert durable_rows(restored) == self.bench.rows

    def _check_values(self, record: Any) -> None:
        """Values are those of the calls that were counted, as far as they handed something round.

        Where calls of one ticket differ, either may count.
        """
        brought = {
            value
            for pair in record.tickets.items()
            for hands in self.handed[pair]
            for value in [_payload(*pair) if hands else b""]
        }
        if record.values is None:
            assert all(self.handed[pair] != {True} for pair in record.tickets.items())
        else:
            assert set(record.values.values()) <= brought
            assert len(record.values) == len(record.tickets)

    def _ledger(self) -> Any:
        job = self.bench.machine.jobs.get(JOB)
        ledger = job.epochs.ledgers.get(DATASET, {}).get(0) if job else None
        return ledger if ledger and not ledger.record.complete else None

    def _member(self, who: int) -> c.Registered:
        return self.members[-1 - who % len(self.members)]

    def _apply(self, command: c.Command) -> Any:
        try:
            return self.bench.apply(command)
        except Refused:
            return None


def _payload(incarnation: int, ticket: int) -> bytes:
    return f"{incarnation}/{ticket}".encode()


AnyCommands.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
TestAnyCommands = AnyCommands.TestCase
