"""The checks of the simulation can fail: a machine that is broken is noticed."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from dtruntime.coordinator.state import barriers, effects, machine, records, roster
from tests.support.promises import promises
from tests.support.promises.promises import PromiseBroken
from tests.support.simulation import simulation
from tests.support.simulation.attempt_bugs import ATTEMPT_BUGS, join_attempts_given_up
from tests.support.simulation.ledger_bugs import LEDGER_BUGS
from tests.support.simulation.machine_bugs import MACHINE_BUGS
from tests.support.simulation.simulation import Simulation

SEEN_AT = {
    "actions outlive their workers": 5,
    "commits go back": 4,
    "old sessions return": 27,
    "ranks stay lost": 4,
    "retries begin again": 2,
    "segments are replaced in place": 5,
    "those who went past are awaited": 5,
}
"""Where the search for bugs that show seldom begins; what is found does not depend on it."""


RARE = {*SEEN_AT, "actions are numbered anew", "hang-ups still count", "the ended are revived"}
"""Bugs that take seconds to find: they are searched for in `make test-long`."""


def each(bugs: Iterable[str]) -> list[Any]:
    """The bugs as parameters of a test."""
    return [pytest.param(bug, marks=pytest.mark.long) if bug in RARE else bug for bug in bugs]


def first_breach(seeds: int = 60, first: int = 0, **options: Any) -> PromiseBroken:
    """The first broken promise of a machine that was tampered with."""
    for seed in range(first, first + seeds):
        try:
            Simulation(seed, **options).run(1500)
        except PromiseBroken as broken:
            return broken
    pytest.fail("the simulation did not notice")


def test_simulation_catches_replies_that_leave_before_their_effects_are_stored() -> None:
    first_breach(replies_wait_for_store=False)


def test_failure_names_the_seed_and_how_to_replay_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(barriers.Barriers, "lose", lambda *args: None)
    message = str(first_breach(seeds=40))
    assert "STRATA_SIM_SEED=" in message
    assert "the last commands were" in message


STORED = [
    "job",
    "worker",
    "round",
    "checkpoint",
    "part",
    "attempt",
    "ask",
    "action",
    "dataset",
    "epoch",
    "segment",
    "reader",
]


@pytest.mark.parametrize("kind", STORED)
def test_simulation_catches_a_record_that_is_not_stored(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    put = effects.Outbox.put

    def forgetful(self: effects.Outbox, job: str, record: records.Record, key: str = "") -> None:
        if records.place_of(record)[0] != kind:
            put(self, job, record, key)

    monkeypatch.setattr(effects.Outbox, "put", forgetful)
    assert "the store and the machine differ" in str(first_breach())


@pytest.mark.parametrize("bug", each(ATTEMPT_BUGS))
def test_simulation_catches_attempts_where(monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    ATTEMPT_BUGS[bug](monkeypatch.setattr)
    first_breach(first=SEEN_AT.get(bug, 0))


def test_simulation_catches_attempts_that_are_joined_after_a_sender_gave_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sound machine passes where the search begins."""
    Simulation(33).run(1500)
    join_attempts_given_up(monkeypatch.setattr)
    assert "several passes" in str(first_breach(first=33))


@pytest.mark.parametrize("bug", each(LEDGER_BUGS))
def test_simulation_catches_ledger_where(monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    LEDGER_BUGS[bug](monkeypatch.setattr)
    first_breach(first=SEEN_AT.get(bug, 0))


def test_simulation_catches_claims_that_a_power_failure_takes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unsafe = records.CRASH_SAFE_KINDS | {"reader"}
    monkeypatch.setattr(simulation, "CRASH_SAFE_KINDS", unsafe)
    monkeypatch.setattr(promises, "CRASH_SAFE_KINDS", unsafe)
    first_breach()


@pytest.mark.parametrize("bug", each(MACHINE_BUGS))
def test_simulation_catches(monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    MACHINE_BUGS[bug](monkeypatch.setattr)
    first_breach(first=SEEN_AT.get(bug, 0))


def give_numbers_again(patch: Any) -> None:
    begin = roster.Roster.begin
    patch(roster.Roster, "begin", lambda self, now, removed: begin(self, now, None))


def keep_calls_waiting(patch: Any) -> None:
    patch(machine.Machine, "_propagate_losses", lambda self, job, lost: None)


def remove_under_live_members(patch: Any) -> None:
    patch(machine.Machine, "_check_removable", lambda self, job, force, again: None)


def keep_records(patch: Any) -> None:
    patch(effects.Outbox, "delete_job", lambda self, job: None)


@pytest.mark.parametrize(
    "break_it",
    [give_numbers_again, keep_calls_waiting, remove_under_live_members, keep_records],
)
def test_simulation_catches_removals_that(
    monkeypatch: pytest.MonkeyPatch, break_it: Callable[[Any], None]
) -> None:
    break_it(monkeypatch.setattr)
    first_breach(removals=True)
