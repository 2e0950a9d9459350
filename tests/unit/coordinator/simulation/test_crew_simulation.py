"""Crews form under faults: members die, return and join at every point, and nobody is left out.

Seeds and steps are chosen as in `test_simulation`.
"""

import os
from typing import Any

import msgspec
import pytest

from dtruntime.client.orchestrator import Meeting
from dtruntime.coordinator.state import barriers
from dtruntime.coordinator.state import commands as c
from dtruntime.coordinator.state.records import copied
from dtruntime.run.crew import Rendezvous
from tests.support.promises.promises import PromiseBroken
from tests.support.simulation.simulated_crew import CrewLauncher
from tests.support.simulation.simulation import Simulation
from tests.unit.coordinator.simulation.test_simulation import seeds

STEPS = int(os.environ.get("STRATA_SIM_STEPS", "1000"))


class CrewSimulation(Simulation):
    """A cluster whose jobs form crews."""

    replayed_by = "test_crew_simulation.py"

    def __init__(self, seed: int) -> None:
        super().__init__(seed, launcher_type=CrewLauncher)


@pytest.mark.parametrize("seed", seeds()[:12])
def test_every_live_member_trains_in_the_one_crew(seed: int) -> None:
    print(f"seed {seed}")
    assert CrewSimulation(seed).run(STEPS) >= STEPS


SEEN_AT = 5
"""Where the search for bugs begins; what is found does not depend on it."""


def first_breach() -> str:
    for seed in range(SEEN_AT, SEEN_AT + 40):
        try:
            CrewSimulation(seed).run(400)
        except PromiseBroken as broken:
            return str(broken)
    pytest.fail("the simulation did not notice")


def test_simulation_catches_crews_that_do_not_look_who_was_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    conclude = Rendezvous.conclude

    def careless(self: Rendezvous, meeting: Meeting) -> object:
        return conclude(self, Meeting(meeting.values, meeting.generation, 0))

    monkeypatch.setattr(Rendezvous, "conclude", careless)
    assert "does not have all members" in first_breach()


def test_simulation_catches_a_coordinator_that_miscounts_who_was_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def miscounted(record: Any, kind: type[c.Passed]) -> c.Passed:
        return copied(msgspec.structs.replace(record, left_out=0), kind)

    monkeypatch.setattr(barriers, "copied", miscounted)
    assert "does not have all members" in first_breach()
