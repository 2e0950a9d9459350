"""Who is declared dead, and when."""

import pytest

from dtruntime.coordinator.state import commands as c
from tests.support.machine_bench import TICK, TIMEOUT, Bench


def test_silent_member_is_declared_dead_by_the_first_tick_after_the_timeout(bench: Bench) -> None:
    member = bench.register()
    registered_at = bench.now
    while bench.is_live(member):
        assert bench.now < registered_at + TIMEOUT
        bench.tick()
    assert bench.now == registered_at + TIMEOUT
    assert bench.kinds_of_events()[-1] == "worker.dead"


@pytest.mark.parametrize("sign", ["heartbeat", "arrival", "part", "registration"])
def test_every_accepted_call_is_a_sign_of_life(bench: Bench, sign: str) -> None:
    member = bench.register(session="one")
    bench.wait(TIMEOUT - TICK)
    if sign == "heartbeat":
        bench.beat(member)
    elif sign == "arrival":
        bench.arrive(member)
    elif sign == "part":
        bench.save(member)
    else:
        bench.register(session="one")
    bench.wait(TIMEOUT - TICK)
    assert bench.is_live(member)
    bench.tick()
    assert not bench.is_live(member)


def test_held_call_alone_does_not_keep_a_member_alive(bench: Bench) -> None:
    member = bench.register(world_size=2)
    bench.arrive(member, timeout=1000.0)
    bench.wait(TIMEOUT)
    assert not bench.is_live(member)


def test_stalled_coordinator_does_not_kill_members_that_could_not_be_heard(bench: Bench) -> None:
    members = bench.elastic(3)
    bench.wait(1.0, *members)
    bench.tick(60.0)
    assert all(bench.is_live(m) for m in members)
    bench.beat(*members[:2])
    bench.wait(TIMEOUT, *members[:2])
    assert [bench.is_live(m) for m in members] == [True, True, False]
    assert "coordinator.stalled" in bench.kinds_of_events()


def test_member_heard_at_the_end_of_a_stall_is_not_given_the_stall_again(bench: Bench) -> None:
    member = bench.register()
    bench.tick()
    bench.now += 60.0 - TICK
    bench.beat(member)
    bench.tick()
    bench.wait(TIMEOUT)
    assert not bench.is_live(member)


def test_coordinator_that_is_always_late_still_detects_deaths(bench: Bench) -> None:
    alive, dead = bench.elastic(2)
    for _ in range(10):
        bench.beat(alive)
        bench.tick(1.5)
    assert bench.is_live(alive)
    assert not bench.is_live(dead)


def test_first_tick_that_comes_late_kills_nobody(bench: Bench) -> None:
    member = bench.register()
    bench.tick(60.0)
    assert bench.is_live(member)
    bench.restart()
    bench.tick(60.0)
    assert bench.is_live(member)


def test_restart_gives_every_member_a_whole_timeout_to_be_heard_again(bench: Bench) -> None:
    member = bench.register()
    bench.wait(TIMEOUT - TICK)
    bench.now += 100.0
    bench.restart()
    bench.wait(TIMEOUT - TICK)
    assert bench.is_live(member)
    bench.tick()
    assert not bench.is_live(member)


def test_deaths_of_one_tick_are_told_in_one_answer(bench: Bench) -> None:
    members = bench.elastic(4)
    bench.beat(*members)
    call = bench.arrive(members[0], timeout=1000.0)
    bench.kill(*members[1:], among=members)
    assert [lost.rank for lost in call.reply.lost] == [1, 2, 3]
    assert bench.kinds_of_events().count("worker.dead") == 3


def test_epoch_counters_follow_live_members(bench: Bench) -> None:
    a, b = bench.elastic(2)
    bench.beat(a, b, epoch=1)
    assert (bench.roster.epoch, bench.roster.completed_epochs) == (1, 1)
    bench.beat(a, epoch=3)
    assert (bench.roster.epoch, bench.roster.completed_epochs) == (3, 1)
    bench.restart()
    assert (bench.roster.epoch, bench.roster.completed_epochs) == (3, 1)
    bench.beat(a, epoch=3)
    bench.leave(b)
    bench.beat(a, epoch=4)
    assert (bench.roster.epoch, bench.roster.completed_epochs) == (4, 4)
    completed = [e.fields["epoch"] for e in bench.events if e.kind == "epoch.completed"]
    assert completed == ["0", "3"]


def test_heartbeats_of_one_generation_share_one_answer_without_effects(bench: Bench) -> None:
    a, b = bench.elastic(2)
    bench.beat(a, b, epoch=1)
    first = bench.beat(a, epoch=1, step=1)
    assert bench.beat(b, epoch=1, step=1) is first
    assert bench.effects == []
    assert first == c.Pulse(2, 2)
