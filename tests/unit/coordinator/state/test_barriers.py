"""Barriers: rounds, outcomes, retries."""

import time

from dtruntime.coordinator.state import Refused
from dtruntime.coordinator.state import commands as c
from dtruntime.coordinator.state.barriers import NAMES_CUT, TIMEOUTS_KEPT
from dtruntime.coordinator.state.members import LOSSES_KEPT
from tests.support.machine_bench import TICK, TIMEOUT, Bench, refusal


def test_round_completes_when_the_last_expected_member_arrives(bench: Bench) -> None:
    members = bench.world(3)
    calls = [bench.arrive(m) for m in members]
    assert {call.reply for call in calls} == {c.Passed(round=1, generation=1, participants=3)}
    again = [bench.arrive(m) for m in members]
    assert {call.reply.round for call in again} == {2}


def test_round_of_a_fixed_world_waits_for_ranks_that_have_not_registered(bench: Bench) -> None:
    call = bench.arrive(bench.register(world_size=2))
    assert call.held
    bench.arrive(bench.register(world_size=2))
    assert isinstance(call.reply, c.Passed)


def test_arriving_twice_in_a_round_counts_once_and_both_calls_are_answered(bench: Bench) -> None:
    a, b, d = bench.world(3)
    first, again, other = bench.arrive(a), bench.arrive(a), bench.arrive(b)
    assert first.held
    assert again.held
    assert other.held
    bench.arrive(d)
    assert first.reply == again.reply == other.reply
    assert first.reply.participants == 3


def test_barriers_of_different_names_do_not_mix(bench: Bench) -> None:
    a, b = bench.world(2)
    left, right = bench.arrive(a, "left"), bench.arrive(b, "right")
    assert left.held
    assert right.held
    bench.arrive(b, "left")
    assert isinstance(left.reply, c.Passed)
    assert right.held


def test_retry_after_completion_passes_again_and_is_not_counted_in_the_next_round(
    bench: Bench,
) -> None:
    a, b = bench.world(2)
    bench.arrive(a, ticket=1)
    passed = bench.arrive(b, ticket=1).reply
    assert bench.arrive(a, ticket=1).reply == passed
    next_round = bench.arrive(b, ticket=2)
    assert next_round.held, "the retry of round 1 is no arrival in round 2"
    assert bench.arrive(a, ticket=1).reply == passed


def test_retry_after_completion_passes_also_after_a_restart_and_a_loss(bench: Bench) -> None:
    a, b = bench.world(2)
    bench.arrive(a, ticket=1)
    passed = bench.arrive(b, ticket=1).reply
    bench.restart()
    bench.leave(b)
    assert bench.arrive(a, ticket=1).reply == passed
    assert isinstance(bench.arrive(a, ticket=2).reply, c.MembershipChanged)


def test_waits_are_rebuilt_by_retries_after_a_restart(bench: Bench) -> None:
    a, b = bench.world(2)
    bench.arrive(a, ticket=1)
    bench.restart()
    assert bench.arrive(b, ticket=1).held
    assert isinstance(bench.arrive(a, ticket=1).reply, c.Passed)


def test_dead_worker_fails_waiting_barrier_within_detection_time(bench: Bench) -> None:
    a, b, dead = bench.world(3)
    bench.beat(dead)
    call = bench.arrive(a, timeout=1000.0)
    died_at = bench.now
    while call.held:
        bench.beat(a, b)
        bench.tick()
    assert bench.now - died_at <= TIMEOUT + TICK
    reply = call.reply
    assert isinstance(reply, c.MembershipChanged)
    assert [lost.worker_id for lost in reply.lost] == [dead.worker_id]
    assert reply.survivors == (0, 1)
    assert reply.generation == bench.roster.generation


def test_member_that_leaves_or_is_replaced_fails_the_waits_at_once(bench: Bench) -> None:
    a, b, d = bench.world(3)
    bench.beat(a, b, d)
    call = bench.arrive(a)
    bench.leave(b)
    assert isinstance(call.reply, c.MembershipChanged)
    call = bench.arrive(a, told=call.reply.generation)
    bench.register(world_size=3, rank=2)
    assert isinstance(call.reply, c.MembershipChanged)


def test_goodbye_shows_that_one_was_alive_to_those_who_registered_since(bench: Bench) -> None:
    first = bench.register(world_size=2)
    second = bench.register(world_size=2)
    call = bench.arrive(second)
    bench.leave(first)
    assert isinstance(call.reply, c.MembershipChanged)


def test_waiter_that_is_replaced_is_refused(bench: Bench) -> None:
    a, _ = bench.world(2)
    call = bench.arrive(a)
    bench.register(world_size=2, rank=0)
    assert isinstance(call.reply, Refused)
    assert call.reply.reason == "superseded"


def test_untold_member_hears_of_the_loss_at_its_next_arrival_instead_of_waiting(
    bench: Bench,
) -> None:
    a, b, d = bench.world(3)
    bench.beat(a, b, d)
    bench.leave(d)
    reply = bench.arrive(a).reply
    assert isinstance(reply, c.MembershipChanged)
    assert bench.arrive(a, told=reply.generation).held
    assert bench.arrive(a, told=0).held, "0 means that nothing is to be checked"


def test_heartbeats_do_not_tell_the_program_of_a_loss(bench: Bench) -> None:
    a, b = bench.world(2)
    bench.leave(b)
    assert bench.beat(a).generation > a.generation
    assert isinstance(bench.arrive(a).reply, c.MembershipChanged)


def test_join_does_not_interrupt_anybody(bench: Bench) -> None:
    a, b = bench.elastic(2)
    call = bench.arrive(a)
    bench.register()
    assert call.held
    assert isinstance(bench.arrive(b).reply, c.Passed)


def test_newcomer_does_not_hold_up_an_open_round_unless_it_arrives(bench: Bench) -> None:
    a, b = bench.elastic(2)
    bench.arrive(a)
    newcomer = bench.register()
    assert bench.arrive(b).reply.participants == 2
    bench.arrive(a)
    late = bench.register()
    bench.arrive(newcomer)
    bench.arrive(late)
    assert bench.arrive(b).reply.participants == 4


def test_ghost_does_not_fail_those_who_registered_after_it_was_last_heard(bench: Bench) -> None:
    ghost = bench.register()
    bench.now += 1.0
    a, b = bench.elastic(2)
    call = bench.arrive(a, timeout=1000.0)
    bench.kill(ghost, among=[ghost, a, b])
    assert call.held
    assert bench.arrive(b).reply.participants == 2, "and is not waited for any more"


def test_round_of_those_who_wait_without_knowing_the_lost_completes_without_it(
    bench: Bench,
) -> None:
    ghost = bench.register()
    member = bench.register()
    call = bench.arrive(member, timeout=1000.0)
    bench.kill(ghost, among=[ghost, member])
    assert call.reply.participants == 1


def test_group_restart_before_detection_passes_the_start_barrier_undisturbed(
    bench: Bench,
) -> None:
    """No attempt number, ghosts still live: every newcomer replaces one, none is disturbed."""
    old = bench.world(4)
    for member in old:
        bench.beat(*old)
        bench.arrive(member, "step")
    bench.arrive(old[0], "step")
    bench.tick(1.0)
    calls = []
    for rank in (2, 0, 3, 1):
        assert all(call.held for call in calls)
        calls.append(bench.arrive(bench.register(world_size=4, rank=rank), "start"))
    assert {type(call.reply) for call in calls} == {c.Passed}


def test_group_restart_larger_than_the_memory_of_losses_is_undisturbed_too() -> None:
    bench = Bench(checked=False)
    size = 2 * LOSSES_KEPT
    bench.world(size)
    bench.now += 1.0
    members = bench.world(size)
    calls = [bench.arrive(m, "start") for m in members]
    assert {type(call.reply) for call in calls} == {c.Passed}
    bench.check()


def test_forgotten_losses_are_reported_to_those_who_may_have_known() -> None:
    bench = Bench(checked=False)
    members = bench.world(LOSSES_KEPT + 5)
    bench.beat(*members)
    for member in members[1:]:
        bench.leave(member)
    reply = bench.arrive(members[0]).reply
    assert isinstance(reply, c.MembershipChanged)
    assert len(reply.lost) <= NAMES_CUT
    assert bench.arrive(members[0], told=reply.generation).reply.participants == 1


def test_losses_before_a_restart_are_reported_after_it(bench: Bench) -> None:
    a, b, d = bench.world(3)
    bench.beat(a, b, d)
    bench.leave(d)
    bench.restart()
    reply = bench.arrive(a).reply
    assert isinstance(reply, c.MembershipChanged)
    assert reply.generation == bench.roster.generation
    newcomer = bench.register(world_size=3)
    assert bench.arrive(newcomer).held


def test_timeout_says_who_is_missing_and_the_step_each_reported(bench: Bench) -> None:
    a, b, d = bench.world(3)
    bench.beat(b, step=17)
    call, other = bench.arrive(a, timeout=1.0), bench.arrive(d, timeout=1.0)
    bench.wait(1.0, a, d)
    bench.beat(b, step=17)
    reply = call.reply
    assert isinstance(reply, c.TimedOut)
    assert reply.missing == (c.Missing(b.worker_id, 1, 17, registered=True),)
    assert (reply.missing_count, reply.participants) == (1, 2)
    assert other.reply == reply, "those who give up together do not miss each other"


def test_those_who_gave_up_earlier_are_not_the_ones_that_are_missing(bench: Bench) -> None:
    a, b, d = bench.world(3)
    early, late = bench.arrive(a, timeout=1.0), bench.arrive(b, timeout=2.0)
    bench.wait(2.0, a, b, d)
    for reply in (early.reply, late.reply):
        assert [m.worker_id for m in reply.missing] == [d.worker_id]
    assert bench.kinds_of_events().count("barrier.timed_out") == 2


def test_only_those_who_gave_up_are_named_when_nobody_else_is_missing(bench: Bench) -> None:
    a, b, d = bench.world(3)
    bench.arrive(a, timeout=1.0)
    bench.arrive(b, timeout=2.0)
    bench.wait(1.0, a, b, d)
    late = bench.arrive(d, timeout=1.5)
    bench.wait(2.0, a, b, d)
    assert [m.worker_id for m in late.reply.missing] == [a.worker_id, b.worker_id]


def test_timeout_withdraws_the_arrival(bench: Bench) -> None:
    a, b = bench.world(2)
    bench.arrive(a, timeout=0.5)
    bench.wait(0.5, a, b)
    assert bench.arrive(b).held


def test_call_that_timed_out_gets_the_same_answer_again_and_never_counts(bench: Bench) -> None:
    a, b = bench.world(2)
    call = bench.arrive(a, timeout=0.5, ticket=1)
    bench.wait(0.5, a, b)
    assert bench.arrive(a, ticket=1).reply == call.reply
    other = bench.arrive(b, ticket=1)
    assert bench.arrive(a, ticket=1).reply == call.reply
    assert other.held
    assert isinstance(bench.arrive(a, ticket=2).reply, c.Passed)


def test_timeout_of_one_attempt_ends_all_attempts_of_the_same_call(bench: Bench) -> None:
    """The first connection hangs half open while the retry times out."""
    a, b = bench.world(2)
    stuck = bench.arrive(a, timeout=100.0, ticket=1)
    retry = bench.arrive(a, timeout=0.5, ticket=1)
    bench.wait(0.5, a, b)
    assert isinstance(retry.reply, c.TimedOut)
    assert stuck.reply == retry.reply
    assert bench.arrive(b).held


def test_timeout_leaves_another_call_of_the_same_worker_alone(bench: Bench) -> None:
    a, b = bench.world(2)
    brief = bench.arrive(a, timeout=0.5, ticket=2)
    patient = bench.arrive(a, timeout=100.0, ticket=1)
    bench.wait(0.5, a, b)
    assert isinstance(brief.reply, c.TimedOut)
    assert patient.held
    assert isinstance(bench.arrive(b).reply, c.Passed)
    assert bench.arrive(a, ticket=2).reply == brief.reply


def test_remembered_timeouts_are_bounded() -> None:
    bench = Bench(checked=False)
    bench.world(2)
    a = bench.register(world_size=2, rank=0)
    for ticket in range(1, TIMEOUTS_KEPT + 10):
        bench.arrive(a, told=0, timeout=0.0, ticket=ticket)
    bench.tick()
    assert len(bench.job.barriers._timed_out) == TIMEOUTS_KEPT


def test_hangup_withdraws_the_arrival_unless_another_attempt_waits(bench: Bench) -> None:
    a, b, d = bench.world(3)
    first, second = bench.arrive(a, ticket=1), bench.arrive(a, ticket=1)
    bench.hang_up(first)
    bench.arrive(b)
    assert isinstance(bench.arrive(d).reply, c.Passed)
    assert isinstance(second.reply, c.Passed)
    only = bench.arrive(a)
    bench.hang_up(only)
    bench.arrive(b)
    assert bench.arrive(d).held


def test_hangup_of_a_call_that_is_not_held_changes_nothing(bench: Bench) -> None:
    bench.world(1)
    before = bench.roster.generation
    bench.apply(c.Hangup("job", 99))
    bench.apply(c.Hangup("no such job", 1))
    assert bench.effects == []
    assert bench.roster.generation == before


def test_wall_clock_that_steps_back_over_a_restart_does_not_hide_a_loss(bench: Bench) -> None:
    a, b = bench.world(2)
    bench.beat(a, b)
    bench.now -= 3600.0
    bench.restart()
    bench.beat(a, b)
    call = bench.arrive(a, timeout=1000.0)
    bench.kill(b, among=[a, b])
    assert isinstance(call.reply, c.MembershipChanged)


def test_loss_of_a_thousand_members_while_others_wait_is_fast() -> None:
    bench = Bench(checked=False)
    members = bench.world(2000)
    bench.beat(*members)
    survivors, dead = members[:1000], members[1000:]
    calls = [bench.arrive(m, timeout=1000.0) for m in survivors]
    slowest = 0.0
    while calls[0].held:
        bench.beat(*survivors)
        started = time.process_time()
        bench.tick()
        slowest = max(slowest, time.process_time() - started)
    assert {type(call.reply) for call in calls} == {c.MembershipChanged}
    assert calls[0].reply.survivors == tuple(range(1000))
    assert len(calls[0].reply.lost) == NAMES_CUT
    assert slowest < 1.0
    assert not [m for m in dead if bench.is_live(m)]
    bench.check()


def test_too_many_open_barriers_are_refused_with_an_example(bench: Bench) -> None:
    bench = Bench(checked=False)
    a, _ = bench.world(2)
    for number in range(1024):
        bench.arrive(a, f"b{number}")
    refused = refusal(bench.arrive, a, "one more")
    assert refused.reason == "too_many_barriers"
    assert "'b0'" in str(refused)
    assert bench.arrive(a, "b7").held


def test_loss_of_a_participant_that_arrived_before_a_newcomer_fails_the_newcomers_next_wait(
    bench: Bench,
) -> None:
    """The victim's last call precedes the newcomer, and yet both have passed a round together."""
    victim = bench.register(world_size=2)
    assert bench.arrive(victim, "start").held
    newcomer = bench.register(world_size=2)
    assert isinstance(bench.arrive(newcomer, "start").reply, c.Passed)
    call = bench.arrive(newcomer, "step", timeout=1000.0)
    bench.kill(victim, among=[victim, newcomer])
    assert isinstance(call.reply, c.MembershipChanged)
    assert [lost.worker_id for lost in call.reply.lost] == [victim.worker_id]
