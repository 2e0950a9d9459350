"""Saves by some of the members, and saves that a member gives up."""

from dtruntime.coordinator.state import commands as c
from tests.support.machine_bench import Bench


def test_member_that_gives_up_ends_what_waits_for_its_part(bench: Bench) -> None:
    a, b = bench.world(2)
    begun = bench.begin(a, 7)
    waiting = bench.save(a, begun.checkpoint_id, step=7)
    assert bench.abandon(b) == 1
    assert isinstance(waiting.reply, c.Aborted)
    assert b.worker_id in waiting.reply.detail
    assert bench.abandon(b) == 0


def test_giving_up_ends_also_what_one_has_sent_a_part_of(bench: Bench) -> None:
    """Or else somebody who waits for a stranger's part would wait for ever."""
    a, b = bench.world(2)
    begun = bench.begin(a, 7)
    bench.begin(b, 7)
    waiting = bench.save(a, begun.checkpoint_id, step=7)
    assert bench.abandon(a) == 1
    assert isinstance(waiting.reply, c.Aborted)
    assert isinstance(bench.save(b, begun.checkpoint_id, step=7).reply, c.Aborted)


def test_what_is_committed_cannot_be_given_up(bench: Bench) -> None:
    a, b = bench.world(2)
    begun = bench.begin(a, 7)
    bench.begin(b, 7)
    bench.save(a, begun.checkpoint_id, step=7)
    bench.save(b, begun.checkpoint_id, step=7)
    assert bench.abandon(a) == 0
    assert isinstance(bench.save(a, begun.checkpoint_id, step=7).reply, c.Committed)


def test_what_was_given_up_stays_so_after_a_restart(bench: Bench) -> None:
    a, b = bench.world(2)
    begun = bench.begin(a, 7)
    bench.abandon(b)
    bench.restart()
    assert isinstance(bench.save(a, begun.checkpoint_id, step=7).reply, c.Aborted)


def test_newcomer_is_not_waited_for_when_the_ranks_are_named(bench: Bench) -> None:
    a, b, newcomer = bench.elastic(3)
    ranks = (a.rank, b.rank)
    begun = bench.begin(a, 7, ranks=ranks)
    assert begun.ranks == ranks
    assert bench.begin(b, 7, ranks=ranks) == begun
    bench.save(a, begun.checkpoint_id, step=7)
    assert isinstance(bench.save(b, begun.checkpoint_id, step=7).reply, c.Committed)
    assert newcomer.rank not in ranks


def test_named_rank_that_is_gone_ends_the_attempt_at_once(bench: Bench) -> None:
    a, b, lost = bench.elastic(3)
    bench.leave(lost)
    begun = bench.begin(a, 7, ranks=(a.rank, b.rank, lost.rank))
    reply = bench.save(a, begun.checkpoint_id, step=7).reply
    assert isinstance(reply, c.Aborted)
    assert f"rank {lost.rank}" in reply.detail


def test_other_ranks_are_another_attempt(bench: Bench) -> None:
    a, b, _ = bench.elastic(3)
    everybody = bench.begin(a, 7)
    pair = bench.begin(b, 7, ranks=(a.rank, b.rank))
    assert pair.checkpoint_id != everybody.checkpoint_id
    assert isinstance(bench.save(a, everybody.checkpoint_id, step=7).reply, c.Aborted)


def test_heartbeats_tell_losses_from_arrivals(bench: Bench) -> None:
    a, b = bench.elastic(2)
    before = bench.beat(a)
    bench.register()
    grown = bench.beat(a)
    assert grown.generation > before.generation
    assert grown.lost_generation == before.lost_generation
    bench.leave(b)
    shrunk = bench.beat(a)
    assert shrunk.lost_generation == shrunk.generation > grown.generation
