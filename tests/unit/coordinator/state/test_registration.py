"""Ranks, incarnations, generations: who is a member, and who no longer is."""

import pytest

from dtruntime.coordinator.state import Refused
from dtruntime.coordinator.state import commands as c
from dtruntime.coordinator.state.roster import SUPERSEDED_KEPT
from dtruntime.types import Membership
from tests.support.machine_bench import JOB, TICK, TIMEOUT, Bench, refusal


def test_ranks_of_a_fixed_world_are_present_before_they_register(bench: Bench) -> None:
    first = bench.register(world_size=4)
    assert (first.rank, first.worker_id, first.world_size) == (0, "worker-0", 4)
    assert list(bench.roster.present_ranks()) == [0, 1, 2, 3]
    assert bench.roster.view() == (4, frozenset())


def test_first_registration_of_a_fixed_rank_changes_neither_generation_nor_waits(
    bench: Bench,
) -> None:
    first = bench.register(world_size=3)
    waiting = bench.arrive(first)
    others = [bench.register(world_size=3) for _ in range(2)]
    assert {m.generation for m in (first, *others)} == {1}
    assert waiting.held


def test_elastic_world_counts_live_members_and_each_join_and_leave(bench: Bench) -> None:
    first, second, third = bench.elastic(3)
    assert [m.generation for m in (first, second, third)] == [1, 2, 3]
    assert list(bench.roster.present_ranks()) == [0, 1, 2]
    bench.leave(second)
    assert list(bench.roster.present_ranks()) == [0, 2]
    assert bench.beat(first).generation == 4
    assert bench.register().rank == 1
    assert bench.beat(first).generation == 5


def test_newcomer_without_rank_takes_the_lowest_free_one(bench: Bench) -> None:
    members = bench.world(4)
    bench.leave(members[2])
    bench.leave(members[1])
    assert [bench.register().rank for _ in range(2)] == [1, 2]


def test_full_fixed_world_refuses_and_says_when_to_ask_again(bench: Bench) -> None:
    bench.world(2)
    refused = refusal(bench.register)
    assert refused.reason == "job_full"
    assert refused.retry_after


def test_explicit_rank_takes_over_from_its_live_holder(bench: Bench) -> None:
    old = bench.world(2)[1]
    new = bench.register(world_size=2, rank=1)
    assert (new.rank, new.worker_id) == (1, "worker-1")
    assert new.generation == old.generation + 2
    assert refusal(bench.beat, old).reason == "superseded"
    bench.beat(new)


def test_same_worker_id_takes_over_its_rank(bench: Bench) -> None:
    bench.register()
    old = bench.register(worker_id="node-b")
    new = bench.register(worker_id="node-b")
    assert new.rank == old.rank == 1
    assert refusal(bench.beat, old).reason == "superseded"


def test_worker_id_moving_to_another_rank_replaces_both_holders(bench: Bench) -> None:
    members = [bench.register(world_size=3, rank=r, worker_id=f"node-{r}") for r in range(3)]
    bench.beat(*members)
    moved = bench.register(world_size=3, rank=2, worker_id="node-0")
    assert moved.rank == 2
    assert list(bench.roster.present_ranks()) == [1, 2]
    for old in (members[0], members[2]):
        assert refusal(bench.beat, old).reason == "superseded"
    assert bench.register().rank == 0


def test_repeated_session_gets_the_same_identity_and_changes_nothing(bench: Bench) -> None:
    first = bench.register(session="one", world_size=2)
    assert bench.register(session="one", world_size=2) == first
    assert bench.effects == []
    bench.restart()
    assert bench.register(session="one", world_size=2) == first


def test_late_copy_of_a_registration_does_not_displace_the_successor(bench: Bench) -> None:
    bench.register(session="old", world_size=2, rank=0)
    new = bench.register(session="new", world_size=2, rank=0)
    late = refusal(bench.register, session="old", world_size=2, rank=0)
    assert late.reason == "superseded"
    bench.beat(new)


def test_late_copy_of_a_registration_does_not_bring_back_one_who_left(bench: Bench) -> None:
    member = bench.register(session="gone")
    bench.leave(member)
    assert refusal(bench.register, session="gone").reason == "superseded"
    assert bench.roster.live_count == 0


def test_registration_retried_after_being_declared_dead_gets_a_new_incarnation(
    bench: Bench,
) -> None:
    """The answer was lost and the network was away: the retry must not fail for ever."""
    other = bench.register(world_size=2, rank=0)
    first = bench.register(session="slow", world_size=2, rank=1)
    bench.kill(first, among=[other, first])
    again = bench.register(session="slow", world_size=2, rank=1)
    assert (again.rank, again.incarnation) == (1, first.incarnation + 1)


def test_ended_sessions_are_remembered_within_a_bound(bench: Bench) -> None:
    bench = Bench(checked=False)
    for number in range(SUPERSEDED_KEPT + 10):
        bench.register(rank=0, worker_id=f"w{number}")
    assert len(bench.roster._ended_sessions) == SUPERSEDED_KEPT
    assert len(bench.roster._superseded) == SUPERSEDED_KEPT


def test_incarnations_rise_and_are_never_reused_across_restarts_and_worlds(bench: Bench) -> None:
    seen = [m.incarnation for m in bench.world(2)]
    bench.restart()
    seen.append(bench.register(world_size=2, rank=0).incarnation)
    seen.append(bench.register(world_size=3, rank=0, attempt=1).incarnation)
    bench.restart()
    seen.append(bench.register(world_size=3, rank=1, attempt=1).incarnation)
    assert seen == sorted(set(seen))


def test_generation_never_decreases_and_every_loss_and_refill_raises_it(bench: Bench) -> None:
    a, b, _ = bench.world(3)
    seen = [bench.beat(a).generation]
    bench.leave(b)
    seen.append(bench.beat(a).generation)
    seen.append(bench.register(world_size=3).generation)
    bench.restart()
    seen.append(bench.register(world_size=3, rank=2).generation)
    assert seen == [1, 2, 3, 5]


@pytest.mark.parametrize("how", ["superseded", "dead", "left"])
def test_one_who_is_no_member_is_refused_everywhere(bench: Bench, how: str) -> None:
    a, b = bench.world(2)
    if how == "superseded":
        bench.register(world_size=2, rank=1)
    elif how == "dead":
        bench.kill(b, among=[a, b])
    else:
        bench.leave(b)
    calls = [
        lambda: bench.beat(b),
        lambda: bench.leave(b),
        lambda: bench.arrive(b),
        lambda: bench.save(b),
        lambda: bench.save(b, partial=False),
    ]
    assert [refusal(call).reason for call in calls] == ["superseded"] * len(calls)


def test_one_who_was_a_member_of_an_older_world_is_told_so_also_after_a_restart(
    bench: Bench,
) -> None:
    old = bench.world(2)[1]
    bench.register(world_size=1, rank=0, attempt=1)
    assert refusal(bench.beat, old).reason == "superseded"
    bench.restart()
    assert refusal(bench.beat, old).reason == "superseded"


def test_stranger_is_unknown(bench: Bench) -> None:
    bench.world(1)
    for job, incarnation in ((JOB, 99), (JOB, 0), ("other", 1)):
        command = c.Heartbeat(job, "nobody", incarnation)
        assert refusal(bench.apply, command).reason == "unknown_worker"


def test_higher_attempt_replaces_the_whole_world_and_expects_all_ranks_anew(bench: Bench) -> None:
    old = bench.world(3)
    bench.leave(old[1])
    new = bench.register(world_size=3, rank=0, attempt=1)
    assert list(bench.roster.present_ranks()) == [0, 1, 2]
    assert bench.roster.live_count == 1
    for member in (old[0], old[2]):
        assert refusal(bench.beat, member).reason == "superseded"
    assert bench.register(world_size=3, rank=1, attempt=1).generation == new.generation


def test_straggler_of_a_lower_attempt_is_refused_until_nobody_is_live(bench: Bench) -> None:
    member = bench.register(world_size=1, attempt=2)
    refused = refusal(bench.register, world_size=1, attempt=1)
    assert refused.reason == "superseded"
    assert refused.retry_after
    bench.wait(TIMEOUT + TICK)
    assert not bench.is_live(member)
    assert bench.register(world_size=1, attempt=0).rank == 0


def test_world_of_another_size_begins_when_all_have_left(bench: Bench) -> None:
    members = bench.world(3)
    refused = refusal(bench.register, world_size=2)
    assert refused.reason == "world_size_conflict"
    assert refused.retry_after
    for member in members:
        bench.leave(member)
    first = bench.register(world_size=2)
    assert (first.rank, first.world_size) == (0, 2)
    assert list(bench.roster.present_ranks()) == [0, 1]
    bench.restart()
    assert list(bench.roster.present_ranks()) == [0, 1]


def test_larger_world_with_ghosts_is_asked_to_wait_and_not_told_of_a_wrong_rank(
    bench: Bench,
) -> None:
    bench.world(2)
    refused = refusal(bench.register, world_size=4, rank=3)
    assert refused.reason == "world_size_conflict"
    assert refused.retry_after


def test_rank_outside_the_world_is_invalid(bench: Bench) -> None:
    assert refusal(bench.register, world_size=2, rank=2).reason == "invalid"
    bench.world(2)
    assert refusal(bench.register, rank=2).reason == "invalid"


def test_membership_is_a_function_of_the_generation(bench: Bench) -> None:
    views: dict[int, set[tuple[int, ...]]] = {}

    def note() -> None:
        views.setdefault(bench.roster.generation, set()).add(tuple(bench.roster.present_ranks()))

    members = bench.world(2)
    for member in members:
        note()
        bench.leave(member)
    note()
    for member in bench.world(3):
        note()
        bench.leave(member)
    note()
    for _ in range(3):
        bench.register()
        note()
    assert all(len(view) == 1 for view in views.values())


def test_rank_lost_before_anybody_live_registered_is_expected_again(bench: Bench) -> None:
    """A group restarts while its ghosts are being declared dead: the new world is whole."""
    ghosts = bench.world(3)
    bench.beat(*ghosts)
    bench.kill(ghosts[1], among=ghosts)
    assert list(bench.roster.present_ranks()) == [0, 2]
    first = bench.register(world_size=3, rank=0)
    assert list(bench.roster.present_ranks()) == [0, 2]
    start = bench.arrive(first)
    second = bench.register(world_size=3, rank=2)
    assert list(bench.roster.present_ranks()) == [0, 1, 2]
    bench.arrive(second)
    assert start.held, "the start-up barrier waits for the restarted rank 1 as well"
    bench.arrive(bench.register(world_size=3, rank=1))
    assert isinstance(start.reply, c.Passed)


def test_last_member_of_a_fixed_world_stays_visible_after_its_end(bench: Bench) -> None:
    member = bench.register(world_size=1)
    bench.wait(TIMEOUT + TICK)
    assert bench.roster.slots[0].record.membership == Membership.DEAD
    assert "was declared dead" in str(refusal(bench.beat, member))


def test_assigned_id_avoids_one_that_a_live_worker_holds(bench: Bench) -> None:
    bench.register(worker_id="worker-1")
    assert bench.register().worker_id == "worker-1.2"


def test_long_lived_member_beside_a_crash_loop_does_not_make_the_roster_grow(
    bench: Bench,
) -> None:
    bench.world(2)
    for _ in range(300):
        bench.register(world_size=2, rank=1)
    roster = bench.roster
    assert max(len(roster._free), len(roster._oldest), len(roster._gone)) < 80


def test_failure_inside_a_command_leaves_no_effects_to_the_next(bench: Bench) -> None:
    bench.world(2)
    with pytest.raises(KeyError):
        bench.machine.apply(c.Command(), bench.now)
    with pytest.raises(Refused):
        bench.register()
    assert bench.machine.apply(c.Tick(), bench.now)[1] == ()


def on(bench: Bench, machine: str, pid: int, **fields: object) -> c.Registered:
    return bench.register(machine=machine, pid=pid, process_started=7, **fields)


def ended(bench: Bench, machine: str, *members: c.Registered) -> int:
    told = c.ReportEnded(JOB, machine, tuple(m.incarnation for m in members))
    reply = bench.apply(told)
    assert isinstance(reply, c.Ended)
    return reply.count


def test_member_whose_process_is_gone_is_dead_at_once(bench: Bench) -> None:
    ghost = on(bench, "m", 1)
    survivor = on(bench, "m", 2)
    bench.beat(ghost, survivor)
    waiting = bench.arrive(survivor)
    assert ended(bench, "m", ghost) == 1
    assert isinstance(waiting.reply, c.MembershipChanged)
    assert bench.events[-1].kind == "worker.dead"
    assert "has ended" in bench.events[-1].fields["reason"]
    assert on(bench, "m", 3).rank == 0
    assert list(bench.roster.present_ranks()) == [0, 1]


def test_only_exact_incarnations_of_the_same_machine_are_declared_dead(bench: Bench) -> None:
    here, there = on(bench, "m", 1), on(bench, "other", 1)
    unknown = bench.register()
    stranger = c.Registered(JOB, "x", 9, 99, 1, 0, 0)
    assert ended(bench, "other", here) == 0
    assert ended(bench, "m", there, unknown, stranger) == 0
    assert bench.roster.live_count == 3
    assert bench.apply(c.ReportEnded("no such job", "m", (1,))) == c.Ended(0)


def test_report_that_comes_late_does_not_reach_the_successor(bench: Bench) -> None:
    ghost = on(bench, "m", 1)
    assert ended(bench, "m", ghost) == 1
    successor = on(bench, "m", 2)
    assert ended(bench, "m", ghost) == 0
    assert bench.beat(successor).live_workers == 1


def test_machines_of_members_are_known_after_a_restart(bench: Bench) -> None:
    ghost = on(bench, "m", 1)
    bench.restart()
    assert [m.record.pid for m in bench.roster.on_machine("m")] == [1]
    assert ended(bench, "m", ghost) == 1
    assert bench.roster.on_machine("m") == []


def test_members_not_heard_since_one_registered_are_silent_for_it(bench: Bench) -> None:
    ghost, other = bench.elastic(2)
    newcomer = bench.register()
    bench.beat(other, newcomer)
    member = bench.roster.by_id[newcomer.worker_id]
    assert [m.worker_id for m in bench.roster.silent_for(member)] == [ghost.worker_id]
    bench.beat(ghost)
    assert bench.roster.silent_for(member) == []


@pytest.mark.parametrize("world_size", [0, 2])
@pytest.mark.parametrize("restarted", [False, True])
def test_members_of_a_lost_state_go_on_above_it_and_are_told_of_the_loss(
    bench: Bench, world_size: int, restarted: bool
) -> None:
    first = bench.register(
        world_size=world_size, previous_incarnation=7, previous_generation=30, previous_attempts=12
    )
    second = bench.register(
        world_size=world_size, previous_incarnation=5, previous_generation=30, previous_attempts=9
    )
    assert [m.incarnation for m in (first, second)] == [8, 9]
    assert 30 < first.generation <= second.generation
    if restarted:
        bench.restart()
    assert bench.beat(first).lost_generation > 30
    assert bench.begin(first).checkpoint_id.endswith("-000013")
    for member in (first, second):
        told = bench.arrive(member, told=30).reply
        assert isinstance(told, c.MembershipChanged)
        assert list(told.survivors) == [0, 1]
    newcomer = bench.register(world_size=world_size, rank=1)
    assert bench.arrive(newcomer).held, "it was no member of what was lost"
