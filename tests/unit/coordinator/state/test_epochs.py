"""The ledger of an epoch: claims, commits, changes of members, and the end."""

import pytest

from dtruntime.coordinator.state import commands as c
from dtruntime.coordinator.state.records import TakenBack
from tests.support.epoch_bench import begin, bench_with_dataset, finish, ledger_of
from tests.support.machine_bench import DATASET, JOB, Bench, digest_of, refusal


@pytest.fixture
def bench() -> Bench:
    return bench_with_dataset()


def test_first_claim_opens_a_segment_of_the_present_ranks(bench: Bench) -> None:
    first = bench.register(world_size=3, rank=1)
    reply = bench.claim(first, 0).reply
    assert isinstance(reply, c.Moved)
    (segment,) = reply.segments
    assert (reply.slot, segment.slot_count, segment.dead, segment.taken) == (1, 3, (), ())
    assert (segment.weights, segment.taken_back, reply.reader) == ((), (), None)
    assert bench.kinds_of_events()[-1] == "epoch.began"


def test_claim_of_an_epoch_that_was_not_begun_is_refused(bench: Bench) -> None:
    m = bench.register()
    assert refusal(bench.claim, m, 1, 5, 10).reason == "unknown_epoch"
    assert refusal(bench.claim, m, 0, dataset_id="other").reason == "unknown_dataset"
    assert refusal(bench.commit, m, 1, 0, 0).reason == "unknown_epoch"
    assert bench.job.epochs.ledgers == {}


def test_workers_with_different_plans_cannot_share_an_epoch(bench: Bench) -> None:
    first, second = bench.world(2)
    bench.claim(first, 0, plan="seed 1")
    found = refusal(bench.claim, second, 0, plan="seed 2")
    assert found.reason == "plan_conflict"
    assert "'seed 1'" in str(found)


@pytest.mark.parametrize(
    ("segment", "upto", "length", "reason"),
    [
        (2, 5, 10, "invalid"),
        (1, 11, 10, "invalid"),
        (1, 20, 31, "lane_conflict"),
        (1, 30, 101, "lane_conflict"),
    ],
)
def test_claim_that_makes_no_sense_is_refused(
    bench: Bench, segment: int, upto: int, length: int, reason: str
) -> None:
    first, _ = begin(bench, 2, upto=10, length=30)
    assert refusal(bench.claim, first, segment, upto, length).reason == reason


def test_lanes_cannot_have_more_samples_than_the_dataset(bench: Bench) -> None:
    first, second = begin(bench, 2)
    bench.claim(first, 1, 60, 60)
    assert refusal(bench.claim, second, 1, 10, 41).reason == "lane_conflict"
    assert isinstance(bench.claim(second, 1, 40, 40).reply, c.Granted)


def test_repeated_and_late_claims_change_nothing(bench: Bench) -> None:
    first, _ = begin(bench, 2, upto=20)
    for upto in (20, 5, 0):
        assert isinstance(bench.claim(first, 1, upto, 50).reply, c.Granted)
        assert bench.effects == []
    assert ledger_of(bench).readers[first.incarnation].claim == 20


def test_only_live_members_claim_and_commit(bench: Bench) -> None:
    _, second = begin(bench, 2, upto=20)
    bench.leave(second)
    assert refusal(bench.claim, second, 1, 30, 50).reason == "superseded"
    assert refusal(bench.commit, second, 1, 5, 5).reason == "superseded"


# Commits


def test_commit_counts_what_was_taken_in_all_segments(bench: Bench) -> None:
    first, second = begin(bench, 2, upto=20)
    bench.leave(second)
    assert isinstance(bench.claim(first, 1, 30, 50).reply, c.Moved)
    bench.claim(first, 2, 10, 80)
    assert bench.commit(first, 2, 5, 25).segment == 2
    reader = ledger_of(bench).readers[first.incarnation]
    assert (reader.count, reader.committed_segment, reader.committed_position) == (25, 2, 5)


@pytest.mark.parametrize(
    ("segment", "position", "count", "reason"),
    [
        (1, 21, 21, "lane_conflict"),
        (2, 0, 20, "lane_conflict"),
        (0, 0, 0, ""),
        (1, 10, 9, "digest_conflict"),
        (1, 10, 11, "digest_conflict"),
    ],
)
def test_commit_must_fit_what_was_claimed(
    bench: Bench, segment: int, position: int, count: int, reason: str
) -> None:
    first, _ = begin(bench, 2, upto=20)
    if reason:
        assert refusal(bench.commit, first, segment, position, count).reason == reason
    else:
        bench.commit(first, segment, position, count)
        assert bench.effects == []


def test_commit_without_a_claim_is_refused_unless_it_is_of_nothing(bench: Bench) -> None:
    first, second = begin(bench, 2)
    assert refusal(bench.commit, first, 1, 1, 1).reason == "lane_conflict"
    assert refusal(bench.commit, first, 2, 0, 0).reason == "lane_conflict"
    bench.commit(second, 1, 0, 0)
    assert bench.effects == []


def test_repeated_and_late_commits_change_nothing(bench: Bench) -> None:
    first, _ = begin(bench, 2, upto=20)
    bench.commit(first, 1, 10, 10)
    for position in (10, 4):
        bench.commit(first, 1, position, position)
        assert bench.effects == []
    assert ledger_of(bench).readers[first.incarnation].count == 10


def test_other_samples_at_the_same_place_are_a_conflict(bench: Bench) -> None:
    first, _ = begin(bench, 2, upto=20)
    bench.commit(first, 1, 10, 10)
    other = digest_of(range(50, 60))
    assert refusal(bench.commit, first, 1, 10, 10, digest=other).reason == "digest_conflict"
    assert refusal(bench.commit, first, 1, 12, 12, digest=b"x").reason == "invalid"


# Changes of members


def test_live_keep_what_they_claimed_and_the_lost_what_they_committed(bench: Bench) -> None:
    members = begin(bench, 3, upto=20, length=30)
    bench.commit(members[0], 1, 5, 5)
    bench.commit(members[1], 1, 7, 7)
    bench.leave(members[1])
    reply = bench.claim(members[0], 1, 25, 30).reply
    assert isinstance(reply, c.Moved)
    assert [s.taken for s in reply.segments] == [(20, 7, 20), ()]
    assert (reply.segments[1].slot_count, reply.segments[1].dead) == (3, (1,))
    assert reply.reader is not None
    assert (reply.reader.committed_segment, reply.reader.committed_position) == (1, 5)
    event = bench.events[-1]
    assert event.kind == "epoch.segment"
    assert (event.fields["why"], event.fields["taken_back"]) == ("lost rank 1", "13")


def test_what_a_lost_member_took_in_earlier_segments_is_taken_back(bench: Bench) -> None:
    a, b, slow = begin(bench, 3, upto=10, length=30)
    bench.commit(slow, 1, 4, 4)
    bench.apply(c.Rebalance(JOB, DATASET, 0, {0: 50}))
    assert isinstance(bench.claim(slow, 1, 20, 30).reply, c.Moved)
    bench.claim(slow, 2, 6, 20)
    bench.apply(c.Rebalance(JOB, DATASET, 0, {0: 60}))
    bench.claim(a, 3, 1, 20)
    bench.apply(c.Rebalance(JOB, DATASET, 0, {0: 80}))
    bench.leave(slow)
    reply = bench.claim(b, 4).reply
    assert isinstance(reply, c.Moved)
    taken = [(10, 10, 10), (0, 0, 6), (1, 0, 0), (0, 0, 0), ()]
    assert [s.taken for s in reply.segments] == taken
    assert reply.segments[-1].taken_back == (TakenBack(1, 2, 4, 10), TakenBack(2, 2, 0, 6))


def test_segments_that_a_member_has_kept_are_not_sent_again(bench: Bench) -> None:
    a, b = begin(bench, 2, upto=20)
    bench.apply(c.Rebalance(JOB, DATASET, 0, {0: 50}))
    finish(bench, b, 2, 30, before=20)
    waiting = bench.claim(b, 2, 30, 30, timeout=9.0, known=1)
    bench.leave(a)
    assert [segment.number for segment in waiting.reply.segments] == [2, 3]
    moved = bench.claim(b, 2, 30, 30, known=0).reply
    assert isinstance(moved, c.Moved)
    assert [segment.number for segment in moved.segments] == [1, 2, 3]
    assert refusal(bench.claim, b, 2, 30, 30, known=2).reason == "invalid"


def test_replacement_in_the_same_slot_begins_a_segment(bench: Bench) -> None:
    _, b = begin(bench, 2, upto=20)
    bench.commit(b, 1, 8, 8)
    again = bench.register(world_size=2, rank=1)
    reply = bench.claim(again, 1, 30, 50).reply
    assert isinstance(reply, c.Moved)
    assert [s.taken for s in reply.segments] == [(20, 8), ()]
    assert reply.reader is None
    bench.claim(again, 2, 5, 40)
    bench.commit(again, 1, 20, 20)
    assert bench.effects == [], "the place of another incarnation"


def test_newcomer_of_an_elastic_job_gets_a_share(bench: Bench) -> None:
    (a,) = bench.elastic(1)
    bench.claim(a, 0)
    bench.claim(a, 1, 30, 100)
    (b,) = bench.elastic(1)
    reply = bench.claim(b, 0).reply
    assert isinstance(reply, c.Moved)
    assert [(s.slot_count, s.taken) for s in reply.segments] == [(1, (30,)), (2, ())]
    assert bench.events[-1].fields["why"] == "joined rank 1"


def test_first_registration_of_an_expected_rank_changes_nothing(bench: Bench) -> None:
    first = bench.register(world_size=2, rank=0)
    bench.claim(first, 0)
    bench.claim(first, 1, 10, 50)
    second = bench.register(world_size=2, rank=1)
    assert isinstance(bench.claim(second, 1, 10, 50).reply, c.Granted)


def test_nothing_is_dealt_while_nobody_is_live(bench: Bench) -> None:
    a, b = begin(bench, 2, upto=20)
    bench.commit(a, 1, 3, 3)
    bench.leave(a)
    bench.leave(b)
    assert ledger_of(bench).current == 1
    assert refusal(bench.apply, c.Rebalance(JOB, DATASET, 0)).reason == "not_ready"
    (late,) = bench.world(1)
    reply = bench.claim(late, 0).reply
    assert isinstance(reply, c.Moved)
    assert [(s.slot_count, s.taken) for s in reply.segments] == [(2, (3, 0)), (1, ())]


def test_restart_in_the_middle_forgets_nothing(bench: Bench) -> None:
    a, b, late = begin(bench, 3, upto=20, length=30)
    bench.commit(a, 1, 5, 5)
    bench.restart()
    assert isinstance(bench.claim(a, 1, 20, 30).reply, c.Granted)
    assert bench.effects == []
    bench.leave(b)
    bench.restart()
    reply = bench.claim(a, 1, 21, 30).reply
    assert isinstance(reply, c.Moved)
    assert reply.segments[0].taken == (20, 0, 20)
    bench.restart()
    assert isinstance(bench.claim(late, 2, 10, 60).reply, c.Granted)


# The end


def test_epoch_is_complete_when_everybody_has_committed_everything(bench: Bench) -> None:
    a, b = begin(bench, 2)
    finish(bench, a, 1, 50)
    waiting = bench.claim(a, 1, 50, 50, timeout=30.0)
    assert waiting.held
    assert isinstance(bench.claim(b, 1, 50, 50, timeout=30.0).reply, c.Granted)
    bench.commit(b, 1, 50, 50, digest=digest_of(range(50, 100)))
    assert isinstance(waiting.reply, c.Complete)
    assert isinstance(bench.claim(b, 1, 50, 50, timeout=30.0).reply, c.Complete)
    assert bench.events[-1].kind == "epoch.completed"
    assert bench.events[-1].fields["samples"] == "100"
    record = ledger_of(bench).record
    assert (record.count, record.gone, record.complete) == (100, 2, True)
    assert record.digest == digest_of(range(100))
    assert {key[0] for key in bench.rows} == {"job", "worker", "dataset", "epoch"}


def test_empty_lane_is_finished_once_it_is_claimed(bench: Bench) -> None:
    a, b = begin(bench, 2)
    finish(bench, a, 1, 100)
    waiting = bench.claim(a, 1, 100, 100, timeout=30.0)
    assert waiting.held
    assert isinstance(bench.claim(b, 1, 0, 0, timeout=30.0).reply, c.Complete)
    assert isinstance(waiting.reply, c.Complete)


def test_complete_epoch_is_closed_to_everything(bench: Bench) -> None:
    a, b = begin(bench, 2)
    finish(bench, a, 1, 100)
    bench.claim(b, 1, 0, 0)
    bench.leave(b)
    bench.restart()
    for segment in (0, 1):
        assert isinstance(bench.claim(a, segment, 100, 100, timeout=9.0).reply, c.Complete)
    bench.commit(a, 1, 100, 100)
    assert bench.effects == []
    assert refusal(bench.apply, c.Rebalance(JOB, DATASET, 0)).reason == "epoch_complete"


def test_wait_at_the_end_says_who_still_reads(bench: Bench) -> None:
    a, b, d = begin(bench, 3)
    finish(bench, a, 1, 30)
    assert bench.claim(a, 1, 30, 30).reply == c.Waiting(bench.roster.generation, 0, (1, 2))
    waiting = bench.claim(a, 1, 30, 30, timeout=1.0)
    finish(bench, d, 1, 30)
    bench.wait(1.0, a, b, d)
    assert waiting.reply == c.Waiting(bench.roster.generation, 0, (1,))


def test_loss_sends_those_who_wait_to_the_next_segment(bench: Bench) -> None:
    a, b, d = members = begin(bench, 3)
    finish(bench, a, 1, 30)
    finish(bench, d, 1, 30)
    waits = [bench.claim(m, 1, 30, 30, timeout=60.0) for m in (a, a, d)]
    assert all(wait.held for wait in waits)
    bench.kill(b, d, among=members)
    assert all(isinstance(wait.reply, c.Moved) for wait in waits[:2])
    assert waits[2].reply.reason == "superseded"
    assert waits[0].reply.segments[-1].dead == ()
    assert waits[0].reply.segments[-1].slot_count == 1


def test_caller_that_hung_up_is_not_answered(bench: Bench) -> None:
    a, b = begin(bench, 2)
    finish(bench, a, 1, 50)
    waiting = bench.claim(a, 1, 50, 50, timeout=30.0)
    bench.hang_up(waiting)
    finish(bench, b, 1, 50)
    assert waiting.reply is None
    assert ledger_of(bench).record.complete


def test_finished_member_that_is_lost_does_not_keep_the_others(bench: Bench) -> None:
    a, b = begin(bench, 2)
    bench.claim(a, 1, 50, 50)
    finish(bench, b, 1, 50)
    bench.leave(b)
    bench.commit(a, 1, 50, 50)
    assert ledger_of(bench).record.complete
