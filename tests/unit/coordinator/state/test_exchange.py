"""Barriers that hand something round: who gets which values."""

import pytest

from dtruntime.coordinator.state import barriers as module
from dtruntime.coordinator.state import commands as c
from tests.support.machine_bench import Bench, refusal


def test_all_get_the_values_of_all_by_rank(bench: Bench) -> None:
    members = bench.world(3)
    calls = [bench.arrive(m, payload=b"of %d" % m.rank) for m in members]
    values = {0: b"of 0", 1: b"of 1", 2: b"of 2"}
    assert [call.reply for call in calls] == [c.Passed(1, 1, 3, values)] * 3


def test_plain_barrier_hands_nothing_round(bench: Bench) -> None:
    a, b = bench.world(2)
    bench.arrive(a)
    assert bench.arrive(b).reply == c.Passed(1, 1, 2, None)


def test_value_of_one_who_only_waits_is_empty(bench: Bench) -> None:
    a, b = bench.world(2)
    plain = bench.arrive(a)
    assert bench.arrive(b, payload=b"x").reply.values == {0: b"", 1: b"x"}
    assert plain.reply.values == {0: b"", 1: b"x"}


def test_empty_values_are_handed_round_too(bench: Bench) -> None:
    a, b = bench.world(2)
    bench.arrive(a, payload=b"")
    assert bench.arrive(b, payload=b"").reply.values == {0: b"", 1: b""}


@pytest.mark.parametrize("restart", [False, True])
def test_retry_gets_the_same_values_also_after_a_restart(bench: Bench, restart: bool) -> None:
    a, b = bench.world(2)
    bench.arrive(a, payload=b"a", ticket=1)
    passed = bench.arrive(b, payload=b"b", ticket=1).reply
    if restart:
        bench.restart()
    assert bench.arrive(a, payload=b"a", ticket=1).reply == passed


def test_round_has_the_values_of_the_calls_that_it_counts(bench: Bench) -> None:
    a, b = bench.world(2)
    bench.arrive(a, payload=b"old", ticket=1, timeout=1.0)
    bench.wait(1.0, a, b)
    bench.arrive(a, payload=b"new", ticket=2)
    assert bench.arrive(b, payload=b"b", ticket=1).reply.values == {0: b"new", 1: b"b"}


def test_value_of_one_who_gave_up_does_not_make_a_plain_round_carry_any(bench: Bench) -> None:
    a, b = bench.world(2)
    bench.hang_up(bench.arrive(a, payload=b"x", ticket=1))
    bench.arrive(a, ticket=2)
    assert bench.arrive(b, ticket=1).reply.values is None


def test_of_two_calls_of_one_member_the_newer_ticket_counts(bench: Bench) -> None:
    a, b = bench.world(2)
    bench.arrive(a, payload=b"second", ticket=2)
    bench.arrive(a, payload=b"first", ticket=1)
    assert bench.arrive(b, payload=b"b").reply.values == {0: b"second", 1: b"b"}


def test_loss_takes_the_value_of_the_lost_out_of_the_round(bench: Bench) -> None:
    a, b, d = bench.elastic(3)
    bench.arrive(a, payload=b"a")
    bench.arrive(b, payload=b"b")
    bench.leave(b)
    now = bench.roster.generation
    bench.arrive(a, payload=b"again", told=now)
    assert bench.arrive(d, payload=b"d", told=now).reply.values == {0: b"again", 2: b"d"}


def test_values_are_kept_within_a_bound(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "VALUES_KEPT", 100)
    monkeypatch.setattr("tests.support.machine_invariants.VALUES_KEPT", 100)
    a = bench.register()
    for n in range(4):
        bench.arrive(a, f"b{n}", payload=bytes(40), ticket=n + 1)
    assert list(bench.job.barriers.completed) == ["b2", "b3"]
    bench.restart()
    bench.arrive(a, "large", payload=bytes(1000), ticket=9)
    assert list(bench.job.barriers.completed) == ["large"]
    bench.arrive(a, "large", payload=b"", ticket=10)
    bench.arrive(a, "next", ticket=11)
    assert list(bench.job.barriers.completed) == ["large", "next"]


# Some of the ranks


def test_named_ranks_meet_without_the_others(bench: Bench) -> None:
    members = bench.elastic(3)
    first = bench.arrive(members[2], ranks=(0, 2), payload=b"2")
    assert first.held
    assert bench.arrive(members[0], ranks=(0, 2), payload=b"0").reply.values == {0: b"0", 2: b"2"}


def test_named_rank_that_nobody_holds_yet_is_awaited(bench: Bench) -> None:
    a, b, d = (bench.register(world_size=4, rank=rank) for rank in (0, 1, 2))
    waiting = bench.arrive(a, ranks=(0, 3))
    bench.leave(b)
    again = bench.arrive(a, ranks=(0, 3), told=bench.roster.generation)
    assert isinstance(waiting.reply, c.MembershipChanged)
    late = bench.register(world_size=4, rank=3)
    assert again.held
    assert isinstance(bench.arrive(late, ranks=(0, 3)).reply, c.Passed)
    assert bench.is_live(d)


def test_loss_of_a_named_rank_ends_the_wait_and_later_it_is_not_awaited(bench: Bench) -> None:
    a, b, _ = bench.elastic(3)
    waiting = bench.arrive(a, ranks=(0, 1))
    bench.leave(b)
    assert isinstance(waiting.reply, c.MembershipChanged)
    assert isinstance(bench.arrive(a, ranks=(0, 1), told=bench.roster.generation).reply, c.Passed)


def test_workers_that_disagree_about_who_meets_are_refused(bench: Bench) -> None:
    a, b, d = bench.elastic(3)
    bench.arrive(a, ranks=(0, 1))
    assert "ranks 0, 1 or all" in str(refusal(bench.arrive, b))
    assert "ranks 0, 1 or ranks 1, 2" in str(refusal(bench.arrive, b, ranks=(1, 2)))
    assert "which is for ranks" in str(refusal(bench.arrive, d, ranks=(0, 1)))
    assert isinstance(bench.arrive(b, ranks=(0, 1)).reply, c.Passed)
