"""A machine on the test bench: short words for commands, every state checked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from dtruntime.coordinator.state import HELD, Machine, Refused
from dtruntime.coordinator.state import commands as c
from dtruntime.coordinator.state.effects import Delete, DeleteJob, Effect, Emit, Put, Release
from dtruntime.coordinator.state.records import READ_ON_DEMAND, Event
from dtruntime.sharding.coverage_digest import Digest
from tests.support.machine_invariants import Rows, durable_rows, snapshot, violations

TIMEOUT = 3.0
TICK = 0.25
JOB = "job"
DATASET = "corpus"
SAMPLES = 100


def digest_of(samples: Iterable[int], total: int = SAMPLES) -> bytes:
    """The digest of some samples of the dataset."""
    digest = Digest(total)
    digest.add(np.fromiter(samples, np.int64))
    return digest.to_bytes()


class Bench:
    """Applies commands, stores what is to be stored, and checks the invariants each time."""

    def __init__(self, *, checked: bool = True) -> None:
        self.machine = Machine(TIMEOUT)
        self.now = 100.0
        self.rows: Rows = {}
        self.events: list[Event] = []
        self.effects: list[Effect] = []
        """Of the newest command."""
        self.answers: dict[int, Any] = {}
        self._checked = checked
        self._calls = 0
        self._sessions = 0

    @property
    def job(self) -> Any:
        return self.machine.jobs[JOB]

    @property
    def roster(self) -> Any:
        return self.job.roster

    def apply(self, command: c.Command) -> Any:
        """The reply; a refusal must change nothing."""
        before = snapshot(self.machine) if self._checked else None
        try:
            reply, effects = self.machine.apply(command, self.now)
        except Refused:
            if self._checked:
                assert snapshot(self.machine) == before, "a refused command changed the state"
            raise
        self.effects = list(effects)
        for effect in effects:
            if isinstance(effect, Put):
                if effect.kind != READ_ON_DEMAND:
                    self.rows[effect.kind, effect.job, effect.key] = effect.record
            elif isinstance(effect, Delete):
                self.rows.pop((effect.kind, effect.job, effect.key), None)
            elif isinstance(effect, DeleteJob):
                self.rows = {key: r for key, r in self.rows.items() if key[1] != effect.job}
            elif isinstance(effect, Release):
                assert effect.call not in self.answers, "a call was answered twice"
                self.answers[effect.call] = effect.reply
            elif isinstance(effect, Emit):
                self.events.append(effect.event)
        if self._checked:
            self.check()
        return reply

    def check(self) -> None:
        assert violations(self.machine) == []
        assert durable_rows(self.machine) == self.rows

    def restart(self) -> None:
        """Crash and come back with what is stored."""
        self.machine = Machine(TIMEOUT, self.events)
        assert self.machine.restore([(*k, r) for k, r in self.rows.items()], self.now) == []
        self.check()

    # Members

    def register(self, **fields: Any) -> c.Registered:
        self._sessions += 1
        fields = {"job": JOB, "session": f"s{self._sessions}", **fields}
        reply = self.apply(c.Register(**fields))
        assert isinstance(reply, c.Registered)
        return reply

    def world(self, size: int, **fields: Any) -> list[c.Registered]:
        """A fixed world with everybody registered."""
        return [self.register(world_size=size, rank=rank, **fields) for rank in range(size)]

    def elastic(self, count: int) -> list[c.Registered]:
        return [self.register() for _ in range(count)]

    def beat(self, *members: c.Registered, **fields: Any) -> c.Pulse:
        for m in members:
            pulse = self.apply(c.Heartbeat(m.job, m.worker_id, m.incarnation, **fields))
        assert isinstance(pulse, c.Pulse)
        return pulse

    def leave(self, m: c.Registered) -> None:
        self.apply(c.Deregister(m.job, m.worker_id, m.incarnation))

    # Held calls

    def arrive(
        self,
        m: c.Registered,
        barrier: str = "b",
        *,
        told: int | None = None,
        ticket: int = 0,
        timeout: float = 30.0,
        payload: bytes | None = None,
        ranks: tuple[int, ...] = (),
    ) -> Call:
        self._calls += 1
        told = m.generation if told is None else told
        command = c.Arrive(
            m.job,
            m.worker_id,
            m.incarnation,
            barrier,
            self._calls,
            timeout,
            told,
            ticket,
            payload,
            ranks,
        )
        return Call(self, self._calls, self.apply(command))

    def request(self, kind: str, worker_id: str = "", **fields: Any) -> str:
        reply = self.apply(c.RequestAction(JOB, kind, worker_id, **fields))
        assert isinstance(reply, c.Requested)
        return reply.action.action_id

    def complete(self, action_id: str, outcome: str = "", **fields: Any) -> None:
        assert self.apply(c.CompleteAction(JOB, action_id, outcome, **fields)) is c.DONE

    def abandon(self, m: c.Registered) -> int:
        reply = self.apply(c.AbandonCheckpoints(JOB, m.worker_id, m.incarnation))
        assert isinstance(reply, c.Abandoned)
        return reply.count

    def begin(
        self, m: c.Registered, step: int = 1, ticket: int = 1, ranks: tuple[int, ...] = ()
    ) -> c.Begun:
        reply = self.apply(
            c.BeginCheckpoint(m.job, m.worker_id, m.incarnation, step, ticket, ranks)
        )
        assert isinstance(reply, c.Begun)
        return reply

    def save(
        self,
        m: c.Registered,
        checkpoint_id: str = "ckpt",
        *,
        partial: bool = True,
        told: int | None = None,
        timeout: float = 30.0,
        **fields: Any,
    ) -> Call:
        self._calls += 1
        fields = {"step": 1, "size_bytes": 10, **fields}
        told = m.generation if told is None else told
        command = c.NotifyCheckpoint(
            m.job,
            m.worker_id,
            m.incarnation,
            checkpoint_id,
            partial=partial,
            generation=told,
            call=self._calls,
            timeout=timeout,
            **fields,
        )
        return Call(self, self._calls, self.apply(command))

    def claim(
        self,
        m: c.Registered,
        segment: int,
        upto: int = 0,
        length: int = 0,
        *,
        timeout: float = 0.0,
        **fields: Any,
    ) -> Call:
        self._calls += 1
        fields = {"dataset_id": DATASET, "epoch": 0, **fields}
        command = c.Claim(
            m.job,
            m.worker_id,
            m.incarnation,
            segment=segment,
            upto=upto,
            length=length,
            call=self._calls,
            timeout=timeout,
            **fields,
        )
        return Call(self, self._calls, self.apply(command))

    def commit(
        self, m: c.Registered, segment: int, position: int, count: int, **fields: Any
    ) -> c.Consumed:
        """Commit with a digest of ``count`` samples, unless another one is given."""
        fields = {"dataset_id": DATASET, "epoch": 0, "digest": digest_of(range(count)), **fields}
        command = c.Commit(
            m.job, m.worker_id, m.incarnation, segment=segment, position=position, **fields
        )
        reply = self.apply(command)
        assert isinstance(reply, c.Consumed)
        return reply

    def hang_up(self, call: Call) -> None:
        self.apply(c.Hangup(JOB, call.number))

    # Time

    def tick(self, seconds: float = TICK) -> None:
        self.now += seconds
        self.apply(c.Tick())

    def wait(self, seconds: float, *alive: c.Registered) -> None:
        """Let time pass tick by tick while ``alive`` keep beating."""
        end = self.now + seconds
        while self.now < end:
            if alive:
                self.beat(*alive)
            self.tick()

    def kill(self, *dead: c.Registered, among: list[c.Registered]) -> None:
        """Let time pass until ``dead`` are declared dead while the others of ``among`` beat."""
        alive = [m for m in among if m not in dead]
        self.wait(TIMEOUT, *alive)
        assert not [m for m in dead if self.is_live(m)]

    def is_live(self, m: c.Registered) -> bool:
        member = self.roster.by_id.get(m.worker_id)
        return member is not None and member.live and member.incarnation == m.incarnation

    def kinds_of_events(self) -> list[str]:
        return [event.kind for event in self.events]


class Call:
    """A call that is or was held."""

    def __init__(self, bench: Bench, number: int, reply: Any) -> None:
        self._bench = bench
        self.number = number
        self._reply = reply

    @property
    def held(self) -> bool:
        return self._reply is HELD and self.number not in self._bench.answers

    @property
    def reply(self) -> Any:
        """The answer; None while the call is held."""
        return self._bench.answers.get(self.number) if self._reply is HELD else self._reply


def refusal(action: Any, *args: Any, **kwargs: Any) -> Refused:
    """The refusal that an action ends in."""
    with pytest.raises(Refused) as caught:
        action(*args, **kwargs)
    return caught.value
