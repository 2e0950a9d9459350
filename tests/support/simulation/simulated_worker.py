"""Simulated processes that behave like the real client, and the launcher that runs them.

A process has three tasks, written as generators: its program, its heartbeats and its reader. A
task yields what it waits for, a number of seconds or an `Attempt`, and is resumed with the outcome.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from dtruntime.coordinator.state import Refused
from dtruntime.coordinator.state import commands as c
from dtruntime.types import CheckpointCondition
from tests.support.simulation.simulated_reader import Unreachable, reading

if TYPE_CHECKING:
    from tests.support.simulation.simulation import Simulation

HEARTBEAT_INTERVAL = 1.0
BARRIER_SECONDS = 4.0
COMMIT_SECONDS = 3.0
PATIENCE = 15.0
"""How long a call is retried while the coordinator is away."""

BROKEN = object()
"""The outcome of an attempt whose connection broke."""

Task = Generator[Any, Any, Any]


class Attempt:
    """One try of one call, over one connection."""

    def __init__(
        self, process: Process, command: Any, hold: float, done: Callable[[Any], None]
    ) -> None:
        self.process = process
        self.command = command
        self.hold = hold
        self.term = process.sim.coordinator.term
        self.calls: list[int] = []
        self._done: Callable[[Any], None] | None = done

    def answered(self, reply: Any) -> None:
        """An answer has come back."""
        if self._done is not None:
            done, self._done = self._done, None
            done(reply)

    def break_off(self) -> None:
        """The connection breaks; the coordinator notices later, or never."""
        if self._done is None:
            return
        sim = self.process.sim
        if sim.rng.random() < 0.8:
            sim.after(sim.rng.uniform(0.0, 3.0), sim.coordinator.hang_up, self)
        self.answered(BROKEN)


class Process:
    """One worker process: registers, beats, trains, recovers."""

    def __init__(self, launcher: Launcher, number: int, rank: int | None, attempt: int) -> None:
        self.sim: Simulation = launcher.sim
        self.launcher = launcher
        self.name = f"{launcher.job}/p{number}"
        self.machine = f"host-{number % 3}" if number % 3 else ""
        self.rank = rank
        self.attempt = attempt
        self.alive = True
        self.partitioned = False
        self.identity: c.Registered | None = None
        self.told = 0
        self.actions: list[str] = []
        self.heard = self.lost = self.live = 0
        """What the last heartbeat told: generations, and how many live."""
        self._step = 0
        self._tickets = 0
        self._saves = 0
        self._registrations = 0
        self._paused = False
        self._backlog: list[tuple[Task, Any]] = []

    # Running

    def start(self) -> None:
        self._resume(self._program(), None)

    def kill(self) -> None:
        self.alive = False

    def pause(self, seconds: float) -> None:
        """Stop like a process that got SIGSTOP: nothing goes out, what comes in piles up."""
        if not self._paused:
            self._paused = True
            self.sim.after(seconds, self._unpause)

    def _unpause(self) -> None:
        self._paused = False
        backlog, self._backlog = self._backlog, []
        for task, value in backlog:
            self._resume(task, value)

    def _resume(self, task: Task, value: Any) -> None:
        if not self.alive:
            return
        if self._paused:
            self._backlog.append((task, value))
            return
        try:
            wish = task.send(value)
        except StopIteration:
            return
        if isinstance(wish, float):
            self.sim.after(wish, self._resume, task, None)
        else:
            command, hold = wish
            self.sim.send(Attempt(self, command, hold, lambda x: self._resume(task, x)))

    # The client

    def _call(self, command: Any, hold: float = 0.0) -> Task:
        """Call until there is an answer, like the real client: the same request again."""
        rng = self.sim.rng
        trying_since = self.sim.now
        delay = 0.1
        while True:
            started = self.sim.now
            outcome = yield command, hold
            if outcome is BROKEN:
                hold = max(0.0, hold - (self.sim.now - started))
            elif not isinstance(outcome, Refused):
                return outcome
            elif outcome.retry_after is None:
                raise outcome
            delay = min(2.0, delay * 2)
            if self.sim.now - trying_since > PATIENCE:
                raise Unreachable
            yield rng.uniform(delay / 2, delay)

    def _register(self) -> Task:
        self._registrations += 1
        launcher = self.launcher
        gone = launcher.ended_on(self.machine)
        if gone:
            yield from self._call(c.ReportEnded(launcher.job, self.machine, gone))
        command = c.Register(
            job=launcher.job,
            worker_id=f"node-{self.rank}" if launcher.named and self.rank is not None else "",
            session=f"{self.name}.{self._registrations}",
            rank=self.rank if launcher.ranked else None,
            world_size=launcher.world_size,
            attempt=self.attempt,
            process=self.name,
            machine=self.machine,
        )
        self.identity = yield from self._call(command)
        self.told = self.identity.generation
        self._tickets = 0
        self._saves = 0
        self._resume(self._heartbeats(self.identity), None)
        self._resume(reading(self, self.identity), None)

    def _heartbeats(self, identity: c.Registered) -> Task:
        self._step = 0
        while self.identity is identity:
            self._step += 1
            outcome = yield self._heartbeat(identity), 0.0
            if isinstance(outcome, c.Pulse):
                self._hear(outcome)
            if isinstance(outcome, Refused):
                return
            yield HEARTBEAT_INTERVAL * self.sim.rng.uniform(0.8, 1.0)

    def _heartbeat(self, identity: c.Registered) -> c.Heartbeat:
        return c.Heartbeat(
            identity.job,
            identity.worker_id,
            identity.incarnation,
            step=self._step,
            epoch=self._step // 40,
            step_seconds=9.0 if self._step // 10 % 5 == identity.rank else 1.0,
        )

    def _hear(self, pulse: c.Pulse) -> None:
        self.actions = [action.action_id for action in pulse.actions]
        self.heard = max(self.heard, pulse.generation)
        self.lost = max(self.lost, pulse.lost_generation)
        self.live = pulse.live_workers

    def _barrier(
        self, barrier_id: str, payload: bytes | None = None, ranks: tuple[int, ...] = ()
    ) -> Task:
        """The outcome of a barrier, as the program gets it."""
        me = self._me()
        self._tickets += 1
        command = c.Arrive(
            me.job,
            me.worker_id,
            me.incarnation,
            barrier_id,
            0,
            0.0,
            self.told,
            self._tickets,
            payload or self._something_to_hand_round(barrier_id),
            ranks,
        )
        programs = self.sim.promises.programs
        programs.entered(command)
        outcome = yield from self._call(command, BARRIER_SECONDS)
        programs.came_out(command, outcome)
        self.told = max(self.told, outcome.generation)
        return outcome

    def _something_to_hand_round(self, barrier_id: str) -> bytes | None:
        """All hand something round when they recover, and some do at other times."""
        if barrier_id == "recover" or self._tickets % 4 == 0:
            return f"{self._me().incarnation}/{self._tickets}".encode()
        return None

    def _save_together(self, step: int, round_: int) -> Task:
        """Agree on an id, write for a while, send the part; again if that was in vain."""
        rng, me = self.sim.rng, self._me()
        if rng.random() < 0.1:
            return
        for _ in range(rng.choice([1, 1, 2])):
            self._saves += 1
            command = c.BeginCheckpoint(me.job, me.worker_id, me.incarnation, step, self._saves)
            begun = yield from self._call(command)
            yield rng.choice([0.0, 0.1, 1.0]) * rng.random()
            if rng.random() < 0.05:
                return
            outcome = yield from self._save(begun.checkpoint_id, step, True, round_)
            if isinstance(outcome, c.Committed):
                return

    def _save(self, checkpoint_id: str, step: int, partial: bool, round_: int = 0) -> Task:
        me = self._me()
        programs = self.sim.promises.programs
        command = c.NotifyCheckpoint(
            me.job,
            me.worker_id,
            me.incarnation,
            checkpoint_id,
            step,
            path=f"/{checkpoint_id}",
            size_bytes=programs.part_size(me.job, checkpoint_id, me.incarnation, round_),
            generation=self.told,
            partial=partial,
        )
        try:
            outcome = yield from self._call(command, COMMIT_SECONDS)
        except Refused as refusal:
            if refusal.reason != "checkpoint_conflict":
                raise
        else:
            programs.saved(command, outcome)
            return outcome

    def _me(self) -> c.Registered:
        assert self.identity is not None
        return self.identity

    # The program

    def _program(self) -> Task:
        yield self.sim.rng.uniform(0.0, 1.0)
        while True:
            try:
                if self.identity is None:
                    yield from self._register()
                yield from self._train()
                return
            except Unreachable:
                yield 0.5
            except Refused as refusal:
                self.identity = None
                if refusal.reason not in ("superseded", "unknown_worker", "job_full"):
                    self.sim.trace.append(f"{self.name} ends: {refusal.reason}: {refusal}")
                if not self.launcher.wants(self):
                    self.kill()
                    return
                yield self.sim.rng.uniform(0.0, 1.0)

    def _train(self) -> Task:
        yield from self._until_passed("start")
        while True:
            try:
                yield self.sim.rng.uniform(0.01, 0.4)
                if self.sim.calm:
                    yield from self._barrier("final")
                    continue
                outcome = yield from self._barrier("step")
                if isinstance(outcome, c.Passed):
                    yield from self._after_step(outcome.round)
                else:
                    yield from self._until_passed("recover")
                if self.sim.rng.random() < self.launcher.leaving:
                    yield from self._leave()
                    return
            except Unreachable:
                yield 0.2

    def _until_passed(self, barrier_id: str) -> Task:
        for _ in range(3):
            outcome = yield from self._barrier(barrier_id)
            if isinstance(outcome, c.Passed) or self.sim.calm:
                return

    def _after_step(self, step: int) -> Task:
        me = self._me()
        if step % 3 == 0:
            yield from self._save(f"all-{step}", step, partial=True)
        else:
            yield from self._save_together(step % 2, step)
        if step % 5 == 0 and me.rank == 0:
            yield from self._save(f"solo-{step}-{me.incarnation}", step, partial=False)
        if step % 4 == 0 and me.rank == 0:
            kind = ["checkpoint", "drain", "stop"][step // 4 % 3]
            worker = me.worker_id if kind == "drain" else ""
            request = c.RequestAction(me.job, kind, worker, "", me.worker_id, me.incarnation)
            yield from self._call(request)
        if step % 2 == me.rank % 2:
            yield from self._report_checkpoints()
        if self.actions and step % 3 == me.rank % 3:
            done = c.CompleteAction(me.job, self.actions[0], "", me.worker_id, me.incarnation)
            yield from self._call(done)
        if step % 7 == 0:
            dataset = c.RegisterDataset(me.job, f"data-{step % 3}", 1000, 10)
            yield from self._call(dataset)

    def _report_checkpoints(self) -> Task:
        """Say what became of some checkpoints; of what is known, and of what is not."""
        rng, me = self.sim.rng, self._me()
        known = list(self.sim.promises.jobs[me.job].commits)
        report = c.ReportCheckpoints(
            me.job,
            rng.choice(list(CheckpointCondition)),
            tuple(rng.sample(known, min(len(known), rng.choice([1, 1, 3])))),
            reported_by=me.worker_id,
            incarnation=me.incarnation,
        )
        yield from self._call(report)

    def _leave(self) -> Task:
        me = self._me()
        self.identity = None
        try:
            yield from self._call(c.Deregister(me.job, me.worker_id, me.incarnation))
        finally:
            self.kill()


class Launcher:
    """What starts the processes of one job, and starts them again."""

    process_type: type[Process] = Process

    def __init__(self, sim: Simulation, job: str) -> None:
        rng = sim.rng
        self.sim = sim
        self.job = job
        self.kind = rng.choice(["ranked", "ranked", "unranked", "elastic"])
        self.size = rng.randint(1, 6)
        self.world_size = 0 if self.kind == "elastic" else self.size
        self.ranked = self.kind == "ranked"
        self.named = rng.random() < 0.5
        self.restarts = rng.choice(["one", "one", "group", "group with attempt", "none"])
        self.leaving = rng.choice([0.0, 0.0, 0.02])
        self.samples = rng.choice([4, 40, 100, 100])
        self.weighs = rng.random() < 0.5
        self.epoch = 0
        self._epoch_when_healed = 0
        self.attempt = 0
        self.slots: list[Process | None] = [None] * self.size
        self._everyone: list[Process] = []
        self._started: deque[Process] = deque(maxlen=64)
        self._numbers = 0

    def describe(self) -> str:
        return f"job {self.job} ({self.kind}, {self.size} workers, restarts {self.restarts})"

    def start(self) -> None:
        for slot in range(self.size):
            self._launch(slot)
        self.sim.after(1.0, self._look_after)

    def wants(self, process: Process) -> bool:
        """Whether a process that lost its membership should join again."""
        return process in self.slots

    def ended_on(self, machine: str) -> tuple[int, ...]:
        """The members whose processes are gone, as somebody on their machine can see."""
        there = [p for p in self._started if machine and p.machine == machine and not p.alive]
        return tuple(p.identity.incarnation for p in there if p.identity is not None)

    def hurt_one(self) -> None:
        """Kill, pause or cut off one process."""
        rng = self.sim.rng
        victim = rng.choice(self.slots)
        if victim is None:
            return
        harm = rng.choice(["kill", "kill", "pause", "long pause", "cut off", "replace"])
        self.sim.trace.append(f"{self.sim.now:.3f} {harm} {victim.name}")
        if harm == "kill":
            victim.kill()
        elif harm == "replace":
            self._launch(self.slots.index(victim))
        elif harm == "cut off":
            victim.partitioned = True
            self.sim.after(rng.uniform(0.5, 8.0), self._reconnect, victim)
        else:
            victim.pause(rng.uniform(0.2, 2.0) if harm == "pause" else rng.uniform(3.0, 12.0))

    def restart_group(self) -> None:
        """Kill everyone and start everyone, at once or after a while; maybe in another size."""
        rng = self.sim.rng
        self.sim.trace.append(f"{self.sim.now:.3f} restart {self.describe()}")
        for process in self._everyone:
            process.kill()
        self._everyone.clear()
        self.attempt += self.restarts == "group with attempt"
        if rng.random() < 0.3:
            self.size = rng.randint(1, 6)
            self.world_size = self.size if self.world_size else 0
        self.slots = [None] * self.size
        for slot in range(self.size):
            self.sim.after(rng.uniform(0.0, rng.choice([0.5, 5.0])), self._fill, slot)

    def heal(self) -> None:
        """Let all wanted processes run freely, end all others, fill every slot."""
        for process in self._everyone:
            process.partitioned = False
            if process not in self.slots:
                process.kill()
        self.leaving = 0.0
        self._epoch_when_healed = self.epoch
        for slot in range(self.size):
            self._fill(slot)

    def met(self) -> bool:
        """Whether one round of the final barrier had exactly the live processes in it."""
        live = [p for p in self.slots if p is not None and p.alive]
        incarnations = {p.identity.incarnation for p in live if p.identity is not None}
        if len(incarnations) < len(live):
            return False
        return incarnations in self.sim.promises.final_rounds(self.job)

    def has_read(self) -> bool:
        """Whether a whole epoch was read since the last fault."""
        return self.epoch > self._epoch_when_healed

    def _look_after(self) -> None:
        rng = self.sim.rng
        dead = [slot for slot, p in enumerate(self.slots) if p is None or not p.alive]
        if dead and self.restarts.startswith("group") and not self.sim.calm:
            self.restart_group()
        elif dead and (self.restarts == "one" or self.world_size or self.sim.calm):
            for slot in dead:
                self.sim.after(rng.uniform(0.0, 2.0), self._fill, slot)
        self.sim.after(rng.uniform(1.0, 8.0), self._look_after)

    def _fill(self, slot: int) -> None:
        if slot < self.size:
            holder = self.slots[slot]
            if holder is None or not holder.alive:
                self._launch(slot)

    def _launch(self, slot: int) -> None:
        self._numbers += 1
        rank = slot if self.ranked or self.named else None
        process = self.process_type(self, self._numbers, rank, self.attempt)
        self.slots[slot] = process
        self._everyone.append(process)
        self._started.append(process)
        process.start()

    def _reconnect(self, process: Process) -> None:
        process.partitioned = False
