"""Simulated processes that form crews as runs do, and the launcher that disturbs them.

The forming itself is the product's: `Rendezvous`. Here are only the calls around it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dtruntime.client.orchestrator import Meeting
from dtruntime.coordinator.state import commands as c
from dtruntime.run.crew import Formed, Rendezvous, Waits
from dtruntime.run.recovery import Recovery
from tests.support.promises.promise_model import demand
from tests.support.simulation.simulated_worker import Launcher, Process, Task

if TYPE_CHECKING:
    from tests.support.simulation.simulation import Simulation

CHANGED, SAME = b"changed", b"same"


class CrewProcess(Process):
    """A process that trains with all others there are."""

    def __init__(self, launcher: CrewLauncher, *rest: Any) -> None:
        super().__init__(launcher, *rest)
        self.crew: frozenset[int] = frozenset()
        """The incarnations that it trains with."""
        self._roll_call = Rendezvous(launcher.world_size, launcher.recovery, self.sim.now)
        self._formed = 0
        """The generation of its last crew."""

    def _train(self) -> Task:
        while True:
            formed, self.crew = yield from self._assemble()
            self._formed = formed.generation
            self._roll_call.begin(len(formed.ranks))
            yield from self._train_together(formed)
            self.crew = frozenset()
            if self.sim.rng.random() < self.launcher.leaving:
                yield from self._leave()
                return

    def _assemble(self) -> Task:
        while True:
            yield from self._beat()
            # Any number that tells one loss from another will do.
            lost = {self.lost} if self.lost > self._formed else set()
            self._roll_call.hear(lost, self.sim.now)
            brought = self._roll_call.bring(self.sim.now)
            outcome = yield from self._barrier("assemble", brought)
            if not isinstance(outcome, c.Passed):
                continue
            called = Meeting(outcome.values or {}, outcome.generation, outcome.left_out)
            concluded = self._roll_call.conclude(called)
            if isinstance(concluded, Formed):
                return concluded, self._incarnations(outcome)
            if isinstance(concluded, Waits):
                yield from self._wait(concluded)

    def _wait(self, wanted: Waits) -> Task:
        lost = self.lost
        until = float("inf") if wanted.seconds is None else self.sim.now + wanted.seconds
        while self.sim.now < until and self.lost == lost and self.live < wanted.workers:
            yield 0.2
            yield from self._beat()

    def _beat(self) -> Task:
        self._hear((yield from self._call(self._heartbeat(self._me()))))

    def _incarnations(self, outcome: c.Passed) -> frozenset[int]:
        """Those who were there, as the coordinator has stored it."""
        model = self.sim.promises.jobs[self.launcher.job]
        record = model.stored_rounds.get(("assemble", outcome.round))
        if record is None:
            return frozenset()
        # Whoever is not in it is seen only by a generation that begins later.
        demand(not record.left_out, "a crew that does not have all members of its time", record)
        return frozenset(record.tickets)

    def _train_together(self, crew: Formed) -> Task:
        """Train until somebody is lost, or until all know that somebody has come."""
        name = f"crew-{crew.generation}"
        while self.lost <= crew.generation:
            yield self.sim.rng.uniform(0.01, 0.4)
            seen = SAME if self.heard <= crew.generation else CHANGED
            outcome = yield from self._barrier(name, seen, crew.ranks)
            if isinstance(outcome, c.MembershipChanged):
                return
            if isinstance(outcome, c.Passed):
                demand(len(outcome.values or {}) == len(crew.ranks), "a step without one", outcome)
                if CHANGED in (outcome.values or {}).values():
                    return


class CrewLauncher(Launcher):
    """Starts such processes; an elastic job gets more of them."""

    process_type = CrewProcess

    def __init__(self, sim: Simulation, job: str) -> None:
        super().__init__(sim, job)
        rng = sim.rng
        self.recovery = Recovery(
            wait_seconds=rng.choice([0.0, 1.0, 6.0]), min_workers=rng.randint(1, self.size)
        )

    def hurt_one(self) -> None:
        """Also let one more join an elastic job."""
        if not self.world_size and self.sim.rng.random() < 0.3:
            self.size += 1
            self.slots.append(None)
            self._launch(self.size - 1)
        else:
            super().hurt_one()

    def restart_group(self) -> None:
        """Never with fewer than the run wants at least."""
        super().restart_group()
        missing = self.recovery.min_workers - self.size
        for _ in range(missing):
            self.size += 1
            self.slots.append(None)
            self._launch(self.size - 1)
        self.world_size = self.size if self.world_size else 0

    def met(self) -> bool:
        """Whether all live processes train together: nobody is left out, nobody is gone."""
        live = [p for p in self.slots if p is not None and p.alive]
        incarnations = {p.identity.incarnation for p in live if p.identity is not None}
        return len(incarnations) == len(live) and all(
            isinstance(p, CrewProcess) and p.crew == incarnations for p in live
        )
