"""A whole cluster in one thread and virtual time: a coordinator, workers, a bad network.

Everything random comes from one seed, so a run can be repeated exactly. A step is one command
applied to the machine; after each, `Promises` checks the state and what was promised before.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from dtruntime.coordinator.state import Machine, Refused
from dtruntime.coordinator.state import commands as c
from dtruntime.coordinator.state.effects import (
    JOURNAL_LENGTH,
    Delete,
    DeleteJob,
    Emit,
    Put,
    Release,
)
from dtruntime.coordinator.state.records import CRASH_SAFE_KINDS, Event
from tests.support.machine_invariants import Rows, durable_rows
from tests.support.promises.promises import PromiseBroken, Promises
from tests.support.simulation.simulated_removal import PassingJobs
from tests.support.simulation.simulated_worker import Attempt, Launcher, Process

HEARTBEAT_TIMEOUT = 3.0
TICK = 0.25
HEALING = 90.0
"""Virtual seconds after the last fault within which all workers must have met at a barrier."""


@dataclass(frozen=True)
class Weather:
    """How bad this run is; drawn from the seed."""

    loss: float
    duplication: float
    breaks: float
    slow: float
    flush_seconds: float
    seconds_between_faults: float

    @classmethod
    def draw(cls, rng: random.Random) -> Weather:
        rough = rng.random()
        return cls(
            loss=rng.choice([0.0, 0.02, 0.1]) * rough,
            duplication=rng.choice([0.0, 0.05, 0.2]) * rough,
            breaks=rng.choice([0.0, 0.02, 0.1]) * rough,
            slow=rng.choice([0.0, 0.05, 0.2]) * rough,
            flush_seconds=rng.choice([0.0, 0.01, 0.2]),
            seconds_between_faults=rng.choice([2.0, 5.0, 15.0]),
        )

    def calmed(self) -> Weather:
        return Weather(0.0, 0.0, 0.0, 0.0, self.flush_seconds, float("inf"))


class Simulation:
    """One run."""

    replayed_by = "test_simulation.py"

    def __init__(
        self,
        seed: int,
        machine_type: Callable[..., Machine] = Machine,
        replies_wait_for_store: bool = True,
        launcher_type: Callable[..., Launcher] = Launcher,
        removals: bool = False,
    ) -> None:
        """With ``removals`` there are also jobs that are removed and begun again."""
        self.seed = seed
        self.rng = random.Random(seed)
        self.now = 1000.0
        self.steps = 0
        self.calm = False
        self.weather = Weather.draw(self.rng)
        self.trace: deque[str] = deque(maxlen=60)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._scheduled = 0
        self.promises = Promises(HEARTBEAT_TIMEOUT, TICK)
        self.coordinator = Coordinator(self, machine_type, replies_wait_for_store)
        names = ["alpha", "beta"][: self.rng.choice([1, 1, 2])]
        self.launchers = [launcher_type(self, name) for name in names]
        self.passing = PassingJobs(self) if removals else None

    def run(self, steps: int) -> int:
        """Run ``steps`` steps of chaos, then heal; returns all steps. Raises `PromiseBroken`."""
        try:
            self.coordinator.start()
            for launcher in self.launchers:
                launcher.start()
            if self.passing is not None:
                self.passing.start()
            self._schedule_fault()
            while self.steps < steps and self._events:
                self._next()
            self._heal()
        except PromiseBroken as broken:
            lines = "\n  ".join(self.trace)
            raise PromiseBroken(
                f"{broken}\nseed {self.seed}, removals={self.passing is not None}, "
                f"step {self.steps}, t={self.now:.3f}; the last commands were\n  {lines}\n"
                f"replay: STRATA_SIM_SEED={self.seed} STRATA_SIM_STEPS="
                f"{steps} .venv/bin/pytest tests/unit/coordinator/simulation/{self.replayed_by}"
            ) from broken
        return self.steps

    def after(self, seconds: float, action: Callable[..., None], *args: Any) -> None:
        """Do something later."""
        self._scheduled += 1
        heapq.heappush(self._events, (self.now + seconds, self._scheduled, action, args))

    def _next(self) -> None:
        self.now, _, action, args = heapq.heappop(self._events)
        action(*args)

    # The network

    def send(self, attempt: Attempt) -> None:
        """Carry a request to the coordinator, or lose it."""
        weather, rng = self.weather, self.rng
        if not self._loses(attempt.process):
            self.after(self._delay(), self.coordinator.receive, attempt)
        if rng.random() < weather.duplication:
            self.after(
                rng.choice([0.01, 1.0, 8.0]) * rng.random(), self.coordinator.receive, attempt
            )
        if rng.random() < weather.breaks:
            self.after(rng.uniform(0.0, 2.0), attempt.break_off)
        elif weather.loss or weather.slow:
            self.after(attempt.hold + rng.uniform(1.0, 3.0), attempt.break_off)
        else:
            self.after(attempt.hold + 10.0, attempt.break_off)

    def answer(self, attempt: Attempt, reply: Any) -> None:
        """Carry an answer to the process that waits for it, or lose it."""
        if not self._loses(attempt.process):
            self.after(self._delay(), attempt.answered, reply)

    def _loses(self, process: Process) -> bool:
        return process.partitioned or self.rng.random() < self.weather.loss

    def _delay(self) -> float:
        if self.rng.random() < self.weather.slow:
            return self.rng.uniform(0.0, 2.0)
        return self.rng.uniform(0.0005, 0.01)

    # Faults

    def _schedule_fault(self) -> None:
        if not self.calm:
            mean = self.weather.seconds_between_faults
            self.after(self.rng.expovariate(1.0 / mean), self._fault)

    def _fault(self) -> None:
        if self.calm:
            return
        self._schedule_fault()
        rng = self.rng
        kind = rng.choices(
            ["worker", "crash", "power", "stall", "disk", "group"],
            [0.60, 0.14, 0.04, 0.10, 0.06, 0.06],
        )[0]
        if kind in ("crash", "power"):
            self.coordinator.crash(rng.choice([0.1, 1.0, 6.0]), power_loss=kind == "power")
        elif kind == "stall":
            self.coordinator.stall(rng.choice([0.5, 1.5, 8.0]))
        elif kind == "disk":
            self.coordinator.keep_disk_busy(rng.choice([0.5, 2.0, 8.0]))
        elif kind == "group":
            rng.choice(self.launchers).restart_group()
        else:
            rng.choice(self.launchers).hurt_one()

    def _heal(self) -> None:
        self.calm = True
        self.weather = self.weather.calmed()
        for launcher in self.launchers:
            launcher.heal()
        deadline = self.now + HEALING
        waiting = list(self.launchers)
        while waiting and self._events and self.now < deadline:
            self._next()
            waiting = [x for x in waiting if not (x.met() and x.has_read())]
        for launcher in waiting:
            raise PromiseBroken(
                f"{launcher.describe()}: the live workers did not meet at a barrier, or did not "
                f"read an epoch, within {HEALING} s after the last fault"
            )


@dataclass
class Batch:
    """Effects that are stored together, and what leaves once they are."""

    effects: list[Put | Delete | DeleteJob]
    leaving: list[tuple[Attempt, Any]]
    checks: list[Callable[[], None]]


class Coordinator:
    """The process around the machine: a store with delayed writes, held calls, ticks."""

    def __init__(
        self,
        sim: Simulation,
        machine_type: Callable[..., Machine],
        replies_wait_for_store: bool,
    ) -> None:
        self.sim = sim
        self.term = 0
        self.machine: Machine | None = None
        self.rows: Rows = {}
        self.synced_rows: Rows = {}
        self.applied_rows: Rows = {}
        self.journal: list[Event] = []
        self._machine_type = machine_type
        self._waits = replies_wait_for_store
        self._queue: deque[Batch] = deque()
        self._calls: dict[int, Attempt] = {}
        self._next_call = 1
        self._stalled_until = 0.0
        self._disk_busy_until = 0.0
        self._flush_began = 0.0
        self._backlog: list[Attempt] = []

    def start(self) -> None:
        """Come up with what is stored."""
        self.term += 1
        self.journal = self.journal[-JOURNAL_LENGTH:]
        machine = self._machine_type(HEARTBEAT_TIMEOUT, self.journal)
        machine.restore([(*key, record) for key, record in self.rows.items()], self.sim.now)
        self.machine = machine
        self.applied_rows = dict(self.rows)
        self.sim.promises.restarted(machine, self.rows, self.sim.now)
        self.sim.trace.append(f"{self.sim.now:.3f} coordinator starts, term {self.term}")
        self.sim.after(TICK, self._tick, self.term)

    def crash(self, down_for: float, power_loss: bool) -> None:
        """Lose everything that is not stored; with power loss, what is not on the disk."""
        if self.machine is None:
            return
        self.machine = None
        self.term += 1
        if power_loss:
            self.sim.promises.lost_power(self.rows, self.synced_rows)
            self.rows = dict(self.synced_rows)
        for attempt in [*self._calls.values(), *self._backlog, *self._unanswered()]:
            self.sim.after(self.sim.rng.uniform(0.0, 1.0), attempt.break_off)
        self._queue.clear()
        self._calls.clear()
        self._backlog.clear()
        self._stalled_until = 0.0
        self.sim.trace.append(f"{self.sim.now:.3f} coordinator crashes {power_loss=}")
        self.sim.after(down_for, self.start)

    def _unanswered(self) -> list[Attempt]:
        return [attempt for batch in self._queue for attempt, _ in batch.leaving]

    def stall(self, seconds: float) -> None:
        """Stand still; requests pile up."""
        self._stalled_until = max(self._stalled_until, self.sim.now + seconds)

    def keep_disk_busy(self, seconds: float) -> None:
        """Whatever is written from now on is not stored earlier."""
        self._disk_busy_until = self.sim.now + seconds

    def receive(self, attempt: Attempt) -> None:
        """A request comes in."""
        if self.machine is None or attempt.term != self.term:
            self.sim.after(self.sim.rng.uniform(0.0, 0.5), attempt.break_off)
            return
        if self.sim.now < self._stalled_until:
            if not self._backlog:
                self.sim.after(self._stalled_until - self.sim.now, self._catch_up, self.term)
            self._backlog.append(attempt)
            return
        call = self._next_call
        self._next_call += 1
        command = attempt.command
        if isinstance(command, c.Arrive | c.NotifyCheckpoint | c.Claim):
            command = msgspec.structs.replace(command, call=call, timeout=attempt.hold)
        reply = self._apply(command, attempt)
        if reply is c.HELD:
            self._calls[call] = attempt
            attempt.calls.append(call)

    def obey(self, command: c.Command) -> Any:
        """Apply a command of somebody beside the network; none while nothing can be heard."""
        if self.machine is None or self.sim.now < self._stalled_until:
            return None
        return self._apply(command)

    def _catch_up(self, term: int) -> None:
        if term == self.term:
            backlog, self._backlog = self._backlog, []
            for attempt in backlog:
                self.receive(attempt)

    def hang_up(self, attempt: Attempt) -> None:
        """The connection of an attempt is seen to be gone."""
        if self.machine is None or attempt.term != self.term:
            return
        for call in attempt.calls:
            if self._calls.pop(call, None) is not None:
                self._apply(c.Hangup(attempt.command.job, call))

    def _tick(self, term: int) -> None:
        if term != self.term:
            return
        late = self._stalled_until - self.sim.now
        if late > 0:
            self.sim.after(late, self._tick, term)
            return
        assert self.machine is not None
        if not self._queue or self.sim.now - self._flush_began <= self.machine.stall:
            self._apply(c.Tick())
        self.sim.after(TICK, self._tick, term)

    def _apply(self, command: c.Command, attempt: Attempt | None = None) -> Any:
        sim, machine = self.sim, self.machine
        assert machine is not None
        sim.steps += 1
        sim.promises.before(machine, command)
        reply: Any
        effects: Any
        try:
            reply, effects = machine.apply(command, sim.now)
        except Refused as refusal:
            reply, effects = refusal, ()
        if not isinstance(command, c.Tick | c.Heartbeat):
            sim.trace.append(f"{sim.now:.3f} {_brief(command)} -> {_brief(reply)}")
        self._check(machine, command, reply, effects)
        self._carry_out(machine, effects, reply, attempt)
        return reply

    def _check(self, machine: Machine, command: c.Command, reply: Any, effects: Any) -> None:
        apply_to(self.applied_rows, effects)
        self.sim.promises.after(machine, command, reply, effects, self.sim.now)
        if self.applied_rows != durable_rows(machine):
            raise PromiseBroken(_row_difference(self.applied_rows, durable_rows(machine)))

    def _carry_out(
        self, machine: Machine, effects: Any, reply: Any, attempt: Attempt | None
    ) -> None:
        leaving: list[tuple[Attempt, Any]] = []
        if attempt is not None and reply is not c.HELD:
            leaving.append((attempt, reply))
        leaving.extend(
            (self._calls.pop(effect.call), effect.reply)
            for effect in effects
            if isinstance(effect, Release) and effect.call in self._calls
        )
        durable = [e for e in effects if isinstance(e, Put | Delete | DeleteJob)]
        self.journal.extend(e.event for e in effects if isinstance(e, Emit))
        stored = self.sim.promises.to_be_stored(machine, effects)
        if not self._waits or (isinstance(reply, Refused) and not effects):
            for who, what in leaving:
                self.sim.answer(who, what)
            leaving = []
        self._store(Batch(durable, leaving, [stored] if durable else []))

    def _store(self, batch: Batch) -> None:
        needs_disk = any(
            isinstance(e, DeleteJob) or e.kind not in CRASH_SAFE_KINDS for e in batch.effects
        )
        if self._queue or needs_disk:
            self._queue.append(batch)
            if len(self._queue) == 1:
                self._begin_flush()
        else:
            apply_to(self.rows, batch.effects)
            self._leave(batch)

    def _begin_flush(self) -> None:
        self._flush_began = self.sim.now
        seconds = self.sim.rng.uniform(0.0, self.sim.weather.flush_seconds)
        busy = max(0.0, self._disk_busy_until - self.sim.now)
        self.sim.after(busy + seconds, self._flush, self.term)

    def _flush(self, term: int) -> None:
        if term != self.term:
            return
        taken = self.sim.rng.randint(1, len(self._queue))
        batches = [self._queue.popleft() for _ in range(taken)]
        for batch in batches:
            apply_to(self.rows, batch.effects)
        self.synced_rows = dict(self.rows)
        for batch in batches:
            self._leave(batch)
        if self._queue:
            self._begin_flush()

    def _leave(self, batch: Batch) -> None:
        for check in batch.checks:
            check()
        for attempt, reply in batch.leaving:
            self.sim.promises.leaves(attempt.command, reply)
            self.sim.answer(attempt, reply)


def apply_to(rows: Rows, effects: Any) -> None:
    """Do to ``rows`` what a store does."""
    for effect in effects:
        if isinstance(effect, Put):
            rows[effect.kind, effect.job, effect.key] = effect.record
        elif isinstance(effect, Delete):
            rows.pop((effect.kind, effect.job, effect.key), None)
        elif isinstance(effect, DeleteJob):
            for key in [key for key in rows if key[1] == effect.job]:
                del rows[key]


def _row_difference(stored: Rows, wanted: Rows) -> str:
    keys = [k for k in {**stored, **wanted} if stored.get(k) != wanted.get(k)]
    shown = [f"{k}: stored {stored.get(k)}, in memory {wanted.get(k)}" for k in keys[:3]]
    return "the store and the machine differ: " + "; ".join(shown)


def _brief(value: Any) -> str:
    if isinstance(value, Refused):
        return f"Refused({value.reason})"
    fields = getattr(value, "__struct_fields__", ())
    shown = [f"{f}={getattr(value, f)!r}" for f in fields if getattr(value, f) not in ("", 0, {})]
    return f"{type(value).__name__}({', '.join(shown)})"
