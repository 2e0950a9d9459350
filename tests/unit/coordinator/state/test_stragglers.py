"""Who is slow, and how many members a job has lost lately."""

import pytest

from dtruntime.coordinator.state import commands as c
from dtruntime.coordinator.state.members import TIMES_KEPT
from tests.support.machine_bench import JOB, TIMEOUT, Bench


def run_at(bench: Bench, members: list[c.Registered], *seconds: float) -> None:
    """Let everybody report a step time, and time pass until it is measured."""
    for member, taken in zip(members, seconds, strict=True):
        bench.beat(member, step_seconds=taken)
    bench.tick(1.0)


def slow(bench: Bench) -> list[int]:
    return [m.rank for m in bench.roster.slots if m and bench.job.stragglers.is_straggler(m)]


def speed_events(bench: Bench) -> list[tuple[str, str]]:
    kinds = ("worker.slow", "worker.recovered_speed")
    return [(e.kind, e.fields["worker"]) for e in bench.events if e.kind in kinds]


def test_one_slow_rank_is_named_and_what_it_takes_compared(bench: Bench) -> None:
    members = bench.world(4)
    run_at(bench, members, 1.0, 1.02, 0.98, 2.0)
    assert slow(bench) == [3]
    assert speed_events(bench) == [("worker.slow", "worker-3")]
    last = bench.roster.slots[3]
    assert bench.job.stragglers.slowness(last) == pytest.approx(2.0 / 1.01)
    assert bench.events[-1].fields["median_seconds"] == "1.01"


def test_slow_rank_recovers_only_when_it_is_well_below_the_threshold(bench: Bench) -> None:
    members = bench.world(4)
    for taken, expected in ((1.3, [3]), (1.16, [3]), (1.13, [3]), (1.1, []), (1.16, [])):
        run_at(bench, members, 1.0, 1.0, 1.0, taken)
        assert slow(bench) == expected, taken
    assert [kind for kind, _ in speed_events(bench)] == ["worker.slow", "worker.recovered_speed"]


def test_wide_spread_is_not_slowness(bench: Bench) -> None:
    members = bench.world(6)
    run_at(bench, members, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5)
    assert slow(bench) == []


def test_little_above_many_that_are_alike_is_not_slowness(bench: Bench) -> None:
    run_at(bench, bench.world(4), 1.0, 1.0, 1.0, 1.2)
    assert slow(bench) == []


@pytest.mark.parametrize("seconds", [(1.0, 9.0), (1.0, 9.0, 0.0)])
def test_fewer_than_three_reports_say_nothing(bench: Bench, seconds: tuple[float, ...]) -> None:
    run_at(bench, bench.world(len(seconds)), *seconds)
    assert slow(bench) == []
    assert bench.job.stragglers.median == 5.0


def test_many_can_be_slow_at_once(bench: Bench) -> None:
    run_at(bench, bench.world(7), 1.0, 1.0, 1.0, 1.0, 1.0, 4.0, 5.0)
    assert slow(bench) == [5, 6]


def test_those_who_are_gone_are_neither_measured_nor_slow(bench: Bench) -> None:
    members = bench.world(5)
    run_at(bench, members, 1.0, 1.0, 1.0, 1.0, 9.0)
    bench.leave(members[4])
    bench.tick(1.0)
    assert slow(bench) == []
    assert speed_events(bench) == [("worker.slow", "worker-4")]


def test_report_that_is_too_old_does_not_count(bench: Bench) -> None:
    """Its other calls show that the worker lives, but not how fast it is."""
    members = bench.world(4)
    run_at(bench, members, 1.0, 1.0, 1.0, 9.0)
    for _ in range(8):
        for m in members[:3]:
            bench.beat(m, step_seconds=1.0)
        bench.begin(members[3], 7)
        bench.tick(TIMEOUT / 6)
    assert bench.is_live(members[3])
    assert slow(bench) == []
    assert speed_events(bench)[-1] == ("worker.recovered_speed", "worker-3")


def test_measured_at_most_once_a_second(bench: Bench) -> None:
    members = bench.world(4)
    bench.tick(1.0)
    for m, taken in zip(members, (1.0, 1.0, 1.0, 9.0), strict=True):
        bench.beat(m, step_seconds=taken)
    bench.tick(0.5)
    assert slow(bench) == []
    bench.tick(0.5)
    assert slow(bench) == [3]


def test_new_world_begins_without_stragglers(bench: Bench) -> None:
    run_at(bench, bench.world(4), 1.0, 1.0, 1.0, 9.0)
    members = bench.world(4, attempt=1)
    assert slow(bench) == []
    run_at(bench, members, 0.0, 0.0, 0.0, 0.0)
    assert bench.job.stragglers.median == 0.0


def test_one_of_ten_thousand_is_found() -> None:
    bench = Bench(checked=False)
    members = bench.world(10_000)
    for m in members:
        bench.beat(m, step_seconds=1.0 + m.rank % 7 / 100)
    bench.beat(members[5], step_seconds=3.0)
    bench.tick(1.0)
    assert slow(bench) == [5]


# Losses


def losses(bench: Bench, seconds: float) -> int:
    return sum(bench.now - at <= seconds for at in bench.roster.losses.times)


def test_those_who_die_are_counted_and_those_who_leave_are_not(bench: Bench) -> None:
    a, b, d = bench.elastic(3)
    bench.leave(a)
    assert losses(bench, 60) == 0
    bench.kill(b, among=[b, d])
    assert losses(bench, 60) == 1
    bench.wait(10.0, d)
    assert (losses(bench, 5), losses(bench, 60)) == (0, 1)


def test_member_that_is_replaced_is_lost(bench: Bench) -> None:
    bench.world(2)
    bench.register(world_size=2, rank=1)
    assert losses(bench, 60) == 1


def test_whole_new_attempt_loses_only_those_that_were_declared_dead(bench: Bench) -> None:
    members = bench.world(3)
    bench.kill(members[2], among=members)
    bench.world(3, attempt=1)
    assert losses(bench, 60) == 1


def test_losses_are_remembered_across_a_restart_and_bounded(bench: Bench) -> None:
    bench.elastic(1)
    for _ in range(TIMES_KEPT + 6):
        bench.register(rank=0)
    bench.restart()
    assert losses(bench, 60) == TIMES_KEPT
    assert bench.rows["job", JOB, ""].lost_at == (bench.now,) * TIMES_KEPT  # type: ignore[attr-defined]
