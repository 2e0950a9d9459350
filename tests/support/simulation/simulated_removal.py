"""Jobs that are used for a while and removed, again and again under the same names.

They share the coordinator of the simulation, with its crashes, stalls and delayed writes. Their
ghosts go on calling. `RemovalPromises` follows what M13 says, over all lives of a name.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dtruntime.coordinator.state import Machine, Refused
from dtruntime.coordinator.state import commands as c
from dtruntime.coordinator.state.effects import DeleteJob, Release
from tests.support.promises.promise_model import demand

if TYPE_CHECKING:
    from tests.support.simulation.simulation import Simulation

NAMES = ("passing-0", "passing-1")
SECONDS = 0.15
"""Between two commands, on average."""
FIRST_CALL = 10**9
MEMBERS_KEPT = 12


class RemovalPromises:
    """The checks."""

    def __init__(self) -> None:
        self.removals = 0
        self._life: dict[str, int] = defaultdict(int)
        self._stored_life: dict[str, int] = defaultdict(int)
        self._given: dict[tuple[str, str], int] = {}
        """The life of a job in which it gave a number or id that is stored."""
        self._held: dict[str, set[int]] = defaultdict(set)

    def restarted(self) -> None:
        """The coordinator starts again with what is stored."""
        self._life = defaultdict(int, self._stored_life)
        self._held.clear()

    def after(
        self, machine: Machine, command: Any, reply: Any, effects: Any, live: bool
    ) -> Callable[[], None]:
        """A command was applied; returns what to do when its effects are stored.

        ``live`` says whether the job had live members before.
        """
        released = {effect.call for effect in effects if isinstance(effect, Release)}
        for calls in self._held.values():
            calls -= released
        job = getattr(command, "job", "")
        if job not in NAMES:
            return lambda: None
        if isinstance(reply, c.Held):
            self._held[job].add(command.call)
        elif isinstance(command, c.Hangup):
            self._held[job].discard(command.call)
        if isinstance(command, c.RemoveJob):
            self._check_removal(machine, command, reply, effects, live)
        return self._to_be_stored(job, reply)

    def _check_removal(
        self, machine: Machine, command: c.RemoveJob, reply: Any, effects: Any, live: bool
    ) -> None:
        if isinstance(reply, Refused):
            lives = reply.reason == "job_is_live" and live and not command.force
            demand(lives or command.job not in machine.jobs, "not removed", command, reply)
            return
        demand(command.force or not live, "removed under its members", command)
        demand(command.job not in machine.jobs, "removed, and still there", command)
        demand(not self._held[command.job], "removed, and calls wait", self._held[command.job])
        gone = [effect for effect in effects if isinstance(effect, DeleteJob)]
        demand([x.job for x in gone] == [command.job], "other records were removed", gone)
        self.removals += 1
        self._life[command.job] += 1

    def _to_be_stored(self, job: str, reply: Any) -> Callable[[], None]:
        life, given = self._life[job], _given(reply)
        if given:
            known = self._given.get((job, given), life)
            demand(known == life, "given again after a removal", job, given)
        is_new = isinstance(reply, c.Registered) and (job, given) in self._given
        demand(not is_new, "an incarnation was given twice", reply)

        def stored() -> None:
            self._stored_life[job] = life
            if given:
                self._given[job, given] = life

        return stored


def _given(reply: Any) -> str:
    """The number or id that an answer gives, which no other life of the job may give."""
    if isinstance(reply, c.Registered):
        return f"incarnation {reply.incarnation}"
    if isinstance(reply, c.Begun):
        return f"checkpoint {reply.checkpoint_id}"
    return f"action {reply.action.action_id}" if isinstance(reply, c.Requested) else ""


class PassingJobs:
    """What happens to these jobs; everything random comes from a generator of their own."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self._rng = random.Random(f"{sim.seed}/removal")
        self._members: dict[str, list[c.Registered]] = {name: [] for name in NAMES}
        """Those of the last lives, ghosts too."""
        self._numbers = 0

    def start(self) -> None:
        """Begin."""
        self._sim.after(self._rng.expovariate(1 / SECONDS), self._act)

    def _act(self) -> None:
        if self._sim.calm:
            return
        self.start()
        self._numbers += 1
        job = self._rng.choice(NAMES)
        reply = self._sim.coordinator.obey(self._command(job))
        if isinstance(reply, c.Registered):
            members = self._members[job]
            members.append(reply)
            del members[:-MEMBERS_KEPT]

    def _command(self, job: str) -> Any:
        rng, number, members = self._rng, self._numbers, self._members[job]
        chance = rng.random()
        if chance < 0.06:
            return c.RemoveJob(job, force=rng.random() < 0.8)
        if chance < 0.10:
            return c.RequestAction(job, rng.choice(["checkpoint", "stop"]))
        if chance < 0.15:
            return c.RegisterDataset(job, "data", 40, 4)
        if chance < 0.17:
            return c.RemoveDataset(job, "data", force=rng.random() < 0.5)
        if not members or chance < 0.3:
            return c.Register(job=job, session=f"s{number}", world_size=rng.choice([0, 0, 3]))
        return self._of_member(job, rng.choice(members))

    def _of_member(self, job: str, member: c.Registered) -> Any:
        rng, number = self._rng, self._numbers
        who = job, member.worker_id, member.incarnation
        call = FIRST_CALL + number
        kind = rng.choice(["beat", "beat", "arrive", "claim", "begin", "part", "save", "leave"])
        if kind == "arrive":
            barrier, told = rng.choice(["a", "b"]), member.generation
            return c.Arrive(*who, barrier, call, 2.0, told, ticket=number)
        if kind == "claim":
            return c.Claim(*who, "data", 0, plan="p", call=call, timeout=2.0)
        if kind == "begin":
            return c.BeginCheckpoint(*who, rng.randint(0, 2), number)
        if kind in ("part", "save"):
            partial, name = kind == "part", f"{kind}-{number % 40}"
            rest: dict[str, Any] = {
                "generation": member.generation,
                "partial": partial,
                "call": call,
            }
            return c.NotifyCheckpoint(*who, name, 1, path=f"/{name}", timeout=2.0, **rest)
        if kind == "leave" and rng.random() < 0.3:
            return c.Deregister(*who)
        return c.Heartbeat(*who, step=number)
