"""Attempts at saving a step together: who gets which id, and when an attempt is over."""

from typing import Any

import pytest

from dtruntime.coordinator.state import commands as c
from dtruntime.coordinator.state.checkpoints import attempts as module
from dtruntime.coordinator.state.effects import Delete, Put
from dtruntime.coordinator.state.records import CRASH_SAFE_KINDS
from tests.support.machine_bench import Bench, refusal

FIRST = "step-000000000007-000001"
SECOND = "step-000000000007-000002"


def parts_of(bench: Bench, checkpoint_id: str) -> int:
    record = bench.job.checkpoints.committed.get(checkpoint_id)
    return record.parts if record else 0


def test_all_who_save_a_step_get_one_id_and_the_ranks_that_save(bench: Bench) -> None:
    members = bench.world(3)
    begun = {bench.begin(m, 7) for m in members}
    assert begun == {c.Begun(FIRST, 1, (0, 1, 2))}


def test_checkpoint_commits_when_every_part_of_the_attempt_is_there(bench: Bench) -> None:
    a, b = bench.world(2)
    bench.begin(a, 7)
    first = bench.save(a, FIRST, step=7)
    assert first.held
    bench.begin(b, 7)
    assert bench.save(b, FIRST, step=7).reply == first.reply == c.Committed(FIRST, 1)
    assert parts_of(bench, FIRST) == 2


def test_retry_gets_the_same_id_also_after_a_restart_and_after_the_commit(bench: Bench) -> None:
    a = bench.register()
    first = bench.begin(a, 7)
    bench.restart()
    assert bench.begin(a, 7) == first
    bench.save(a, first.checkpoint_id, step=7)
    assert bench.begin(a, 7) == first


def test_step_saved_again_gets_another_id_that_all_share(bench: Bench) -> None:
    a, b = bench.world(2)
    for m in (a, b):
        bench.begin(m, 7)
        bench.save(m, FIRST, step=7)
    again = {bench.begin(m, 7, ticket=2).checkpoint_id for m in (b, a)}
    assert again == {SECOND}
    for m in (a, b):
        bench.save(m, SECOND, step=7)
    assert bench.job.checkpoints.latest.checkpoint_id == SECOND
    assert list(bench.job.checkpoints.committed) == [FIRST, SECOND]


def test_member_that_begins_again_ends_the_attempt_for_all(bench: Bench) -> None:
    a, b = bench.world(2)
    bench.begin(a, 7)
    bench.begin(b, 7)
    waiting = bench.save(a, FIRST, step=7)
    assert bench.begin(b, 7, ticket=2).checkpoint_id == SECOND
    assert isinstance(waiting.reply, c.Aborted)
    assert b.worker_id in waiting.reply.detail
    assert isinstance(bench.save(a, FIRST, step=7).reply, c.Aborted)
    assert bench.begin(a, 7, ticket=2).checkpoint_id == SECOND


def test_lower_ticket_for_a_step_is_refused(bench: Bench) -> None:
    a = bench.register()
    bench.begin(a, 7, ticket=1)
    bench.begin(a, 7, ticket=2)
    refused = refusal(bench.begin, a, 7, ticket=1)
    assert refused.reason == "checkpoint_conflict"
    assert "ticket 2" in str(refused)
    assert bench.begin(a, 8, ticket=1), "tickets of another step may come late"


def test_steps_have_attempts_of_their_own(bench: Bench) -> None:
    a, b = bench.world(2)
    ids = [bench.begin(m, step, ticket=step).checkpoint_id for step in (1, 2) for m in (a, b)]
    assert ids[0] == ids[1] != ids[2] == ids[3]


@pytest.mark.parametrize("asked", [True, False])
def test_lost_member_ends_the_attempt_that_expects_it(bench: Bench, asked: bool) -> None:
    a, b, d = bench.world(3)
    bench.beat(a, b, d)
    for m in (a, b, d) if asked else (a, b):
        bench.begin(m, 7)
    waiting = bench.save(a, FIRST, step=7)
    bench.leave(d)
    assert isinstance(waiting.reply, c.Aborted)
    now = bench.roster.generation
    for told in (b.generation, now):
        late = bench.save(b, FIRST, step=7, told=told)
        assert isinstance(late.reply, c.Aborted)
        assert d.worker_id in late.reply.detail


def test_ended_attempt_is_not_revived_by_those_who_were_told_of_the_loss(bench: Bench) -> None:
    """What an id of one's own choice allows (C4), the id of an attempt does not."""
    a, b, d = bench.world(3)
    bench.begin(a, 7)
    bench.kill(d, among=[a, b, d])
    bench.restart()
    now = bench.roster.generation
    for m in (a, b):
        assert isinstance(bench.save(m, FIRST, step=7, told=now).reply, c.Aborted)
    for m in (a, b):
        assert bench.begin(m, 7, ticket=2) == c.Begun(SECOND, now, (0, 1))
    bench.save(a, SECOND, step=7, told=now)
    assert isinstance(bench.save(b, SECOND, step=7, told=now).reply, c.Committed)


def test_replaced_member_ends_the_attempt(bench: Bench) -> None:
    a, b = bench.world(2)
    bench.beat(a, b)
    bench.begin(a, 7)
    bench.begin(b, 7)
    successor = bench.register(world_size=2, rank=1)
    assert bench.begin(successor, 7).checkpoint_id == SECOND
    assert isinstance(bench.save(a, FIRST, step=7).reply, c.Aborted)


def test_member_lost_after_sending_its_part_does_not_end_the_attempt(bench: Bench) -> None:
    a, b = bench.world(2)
    for m in (a, b):
        bench.begin(m, 7)
    bench.save(b, FIRST, step=7)
    bench.leave(b)
    assert isinstance(bench.save(a, FIRST, step=7).reply, c.Committed)


def test_attempt_of_a_lost_asker_is_not_joined(bench: Bench) -> None:
    """Its part is there, but whoever asks now may have recovered from the loss."""
    a, b, d = bench.world(3)
    bench.begin(d, 7)
    bench.save(d, FIRST, step=7)
    bench.begin(a, 7)
    bench.leave(d)
    assert bench.begin(b, 7) == c.Begun(SECOND, bench.roster.generation, (0, 1))
    assert isinstance(bench.save(a, FIRST, step=7).reply, c.Aborted)


def test_newcomer_does_not_join_an_attempt_that_does_not_expect_it(bench: Bench) -> None:
    a, b = bench.elastic(2)
    assert bench.begin(a, 7).ranks == (0, 1)
    newcomer = bench.register()
    assert bench.begin(newcomer, 7).ranks == (0, 1, 2)
    assert bench.begin(b, 7).checkpoint_id == SECOND
    assert isinstance(bench.save(a, FIRST, step=7).reply, c.Aborted)


def test_member_that_has_saved_something_since_does_not_join_an_old_attempt(bench: Bench) -> None:
    """Both are back at the step: one part of the first time there must not meet a second one."""
    a, b = bench.world(2)
    bench.begin(a, 7, ticket=1)
    assert bench.save(a, FIRST, step=7).held
    for m, ticket in ((a, 2), (b, 1)):
        later = bench.begin(m, 8, ticket).checkpoint_id
        bench.save(m, later, step=8)
    assert bench.begin(b, 7, ticket=2).checkpoint_id != FIRST
    assert isinstance(bench.save(b, FIRST, step=7).reply, c.Aborted)


@pytest.mark.parametrize("end", ["timeout", "no wait", "hang-up", "restart"])
def test_attempt_is_not_joined_once_a_sender_has_stopped_waiting(bench: Bench, end: str) -> None:
    """It may be back at the step by now, and its part is of the first time there."""
    a, b = bench.world(2)
    bench.begin(a, 7)
    call = bench.save(a, FIRST, step=7, timeout=0.0 if end == "no wait" else 1.0)
    if end == "timeout":
        bench.wait(1.0, a, b)
        assert isinstance(call.reply, c.Pending)
    elif end == "hang-up":
        bench.hang_up(call)
    elif end == "restart":
        bench.restart()
    assert bench.begin(b, 7).checkpoint_id == SECOND
    assert isinstance(bench.save(a, FIRST, step=7).reply, c.Aborted)


@pytest.mark.parametrize("end", ["timeout", "hang-up", "restart"])
def test_attempt_is_joined_when_its_sender_waits_again(bench: Bench, end: str) -> None:
    """Its connection broke, or the coordinator did, and it has called again."""
    a, b = bench.world(2)
    bench.begin(a, 7)
    call = bench.save(a, FIRST, step=7, timeout=1.0)
    if end == "timeout":
        bench.wait(1.0, a, b)
    elif end == "hang-up":
        bench.hang_up(call)
    else:
        bench.restart()
    again = bench.save(a, FIRST, step=7)
    assert again.held
    assert bench.begin(b, 7).checkpoint_id == FIRST
    assert isinstance(bench.save(b, FIRST, step=7).reply, c.Committed)
    assert isinstance(again.reply, c.Committed)


def test_attempt_is_joined_when_the_old_connection_of_its_sender_is_seen_to_be_gone_late(
    bench: Bench,
) -> None:
    a, b = bench.world(2)
    bench.begin(a, 7)
    first = bench.save(a, FIRST, step=7)
    again = bench.save(a, FIRST, step=7)
    bench.hang_up(first)
    assert again.held
    assert bench.begin(b, 7).checkpoint_id == FIRST


def test_attempt_is_not_joined_while_one_of_several_senders_does_not_wait(bench: Bench) -> None:
    a, b, late = bench.world(3)
    for member in (a, b):
        bench.begin(member, 7)
    assert bench.save(a, FIRST, step=7).held
    bench.hang_up(bench.save(b, FIRST, step=7))
    assert bench.begin(late, 7).checkpoint_id == SECOND


def test_those_who_asked_can_finish_after_a_sender_has_stopped_waiting(bench: Bench) -> None:
    a, b = bench.world(2)
    bench.begin(a, 7)
    bench.begin(b, 7)
    bench.save(a, FIRST, step=7, timeout=0.0)
    assert isinstance(bench.save(b, FIRST, step=7).reply, c.Committed)


def test_calls_of_one_member_that_overtake_each_other_still_join(bench: Bench) -> None:
    a, b = bench.world(2)
    for step in (7, 8):
        bench.begin(a, step, ticket=step)
    bench.begin(b, 8, ticket=2)
    assert bench.begin(b, 7, ticket=1).checkpoint_id == FIRST


def test_attempt_ends_when_a_member_begins_a_later_one_without_having_asked_for_it(
    bench: Bench,
) -> None:
    a, b = bench.world(2)
    bench.begin(a, 7)
    waiting = bench.save(a, FIRST, step=7)
    later = bench.begin(b, 8)
    assert isinstance(waiting.reply, c.Aborted)
    assert b.worker_id in waiting.reply.detail
    assert bench.begin(a, 8, ticket=2) == later


def test_joining_a_later_attempt_without_having_asked_for_an_earlier_one_ends_that_too(
    bench: Bench,
) -> None:
    a, b = bench.world(2)
    bench.begin(a, 7)
    later = bench.begin(a, 8, ticket=2)
    waiting = bench.save(a, FIRST, step=7)
    assert waiting.held
    assert bench.begin(b, 8) == later
    assert isinstance(waiting.reply, c.Aborted)


def test_member_that_has_begun_a_later_one_may_still_be_writing_the_earlier(bench: Bench) -> None:
    a, b = bench.world(2)
    for m in (a, b):
        bench.begin(m, 7)
        bench.begin(m, 8, ticket=2)
    later = bench.job.checkpoints.attempts.newest(8).record.checkpoint_id
    for m in (a, b):
        for key, step in ((FIRST, 7), (later, 8)):
            bench.save(m, key, step=step)
    assert list(bench.job.checkpoints.committed) == [FIRST, later]


@pytest.mark.parametrize("restart", [False, True])
def test_attempt_ends_when_a_member_sends_its_part_of_a_later_one(
    bench: Bench, restart: bool
) -> None:
    """Its save of the earlier one has failed, and nobody was told."""
    a, b = bench.world(2)
    for m in (a, b):
        bench.begin(m, 7)
    waiting = bench.save(a, FIRST, step=7)
    later = bench.begin(b, 8, ticket=2).checkpoint_id
    assert waiting.held
    if restart:
        bench.restart()
        waiting = bench.save(a, FIRST, step=7)
    bench.save(b, later, step=8)
    assert isinstance(waiting.reply, c.Aborted)
    assert isinstance(bench.save(b, FIRST, step=7).reply, c.Aborted)
    bench.begin(a, 8, ticket=2)
    assert isinstance(bench.save(a, later, step=8).reply, c.Committed)


def test_part_of_an_earlier_attempt_does_not_end_a_later_one(bench: Bench) -> None:
    a, b = bench.world(2)
    for m in (a, b):
        bench.begin(m, 7)
        bench.begin(m, 8, ticket=2)
    later = bench.job.checkpoints.attempts.newest(8).record.checkpoint_id
    bench.save(a, FIRST, step=7)
    waiting = bench.save(a, later, step=8)
    assert isinstance(bench.save(b, FIRST, step=7).reply, c.Committed)
    assert waiting.held


def test_own_ids_are_not_ended_by_parts_of_attempts(bench: Bench) -> None:
    a, b = bench.world(2)
    waiting = bench.save(a, "mine", step=6)
    bench.begin(b, 7)
    bench.save(b, FIRST, step=7)
    assert waiting.held


def test_attempt_survives_a_restart(bench: Bench) -> None:
    a, b = bench.world(2)
    bench.begin(a, 7)
    bench.restart()
    assert bench.begin(b, 7).checkpoint_id == FIRST
    bench.save(a, FIRST, step=7)
    bench.restart()
    assert isinstance(bench.save(b, FIRST, step=7).reply, c.Committed)


def test_beginning_and_end_of_an_attempt_wait_for_the_disk_and_joining_does_not(
    bench: Bench,
) -> None:
    def waits_for_disk() -> bool:
        changes = [e for e in bench.effects if isinstance(e, Put | Delete)]
        assert changes
        return any(e.kind not in CRASH_SAFE_KINDS for e in changes)

    a, b, d = bench.world(3)
    bench.begin(a, 7)
    assert waits_for_disk()
    bench.begin(b, 7)
    assert not waits_for_disk()
    bench.save(b, FIRST, step=7)
    assert not waits_for_disk()
    bench.begin(d, 7)
    bench.begin(d, 7, ticket=2)
    assert waits_for_disk()


def test_join_lost_with_the_power_is_joined_again(bench: Bench) -> None:
    a, b = bench.world(2)
    bench.begin(a, 7)
    synced = dict(bench.rows)
    bench.begin(b, 7)
    bench.rows = synced
    bench.restart()
    assert bench.begin(b, 7).checkpoint_id == FIRST


def test_attempt_cannot_begin_before_all_ranks_have_registered(bench: Bench) -> None:
    refused = refusal(bench.begin, bench.register(world_size=2), 7)
    assert refused.reason == "not_ready"
    assert refused.retry_after


def test_ghost_cannot_begin(bench: Bench) -> None:
    a = bench.register(worker_id="trainer")
    bench.register(worker_id="trainer")
    assert refusal(bench.begin, a, 7).reason == "superseded"
    assert bench.roster.attempts_begun == 0


def test_numbers_of_a_new_world_go_on(bench: Bench) -> None:
    a = bench.register()
    bench.begin(a, 7)
    bench.leave(a)
    b = bench.register(world_size=1)
    assert bench.begin(b, 7).checkpoint_id == SECOND


def test_id_that_somebody_has_chosen_is_not_given_to_an_attempt(bench: Bench) -> None:
    a = bench.register()
    bench.save(a, FIRST, partial=False, step=7)
    assert bench.begin(a, 7).checkpoint_id == SECOND
    assert isinstance(bench.save(a, FIRST, partial=False, step=7).reply, c.Committed)


def test_ids_that_only_look_like_those_of_attempts_are_free_to_use(bench: Bench) -> None:
    a = bench.register()
    bench.begin(a, 7)
    for name in ("step-000000000007-00000001", "step-7-000001", "step-000000000007-12345678"):
        assert isinstance(bench.save(a, name, step=7).reply, c.Committed)


def test_one_writer_cannot_commit_under_the_id_of_an_attempt(bench: Bench) -> None:
    a = bench.register()
    bench.begin(a, 7)
    assert refusal(bench.save, a, FIRST, partial=False, step=7).reason == "checkpoint_conflict"
    bench.begin(a, 7, ticket=2)
    refused = refusal(bench.save, a, FIRST, partial=False, step=7)
    assert refused.reason == "checkpoint_conflict", "also when the attempt has ended"


def test_part_for_another_step_than_the_attempt_is_refused(bench: Bench) -> None:
    a = bench.register()
    bench.begin(a, 7)
    assert refusal(bench.save, a, FIRST, step=8).reason == "checkpoint_conflict"


def test_oldest_attempts_are_forgotten_and_stay_over(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ATTEMPTS_KEPT", 3)
    a, b = bench.world(2)
    calls = []
    for step in range(5):
        begun = bench.begin(a, step, ticket=step + 1)
        calls.append(bench.save(a, begun.checkpoint_id, step=step))
    assert len(bench.job.checkpoints.attempts) == 3
    assert [isinstance(call.reply, c.Aborted) for call in calls] == [
        True,
        True,
        False,
        False,
        False,
    ]
    late = bench.save(b, "step-000000000000-000001", step=0)
    assert isinstance(late.reply, c.Aborted)
    assert not [key for key in bench.rows if "step-000000000000" in key[2]]


def test_attempts_are_forgotten_by_the_number_of_their_ranks(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RANKS_KEPT", 5)
    members = bench.world(2)
    for step in range(4):
        for m in members:
            bench.begin(m, step, ticket=step + 1)
    assert [a.record.step for a in bench.job.checkpoints.attempts] == [2, 3]


def test_beginning_is_told_in_the_journal(bench: Bench) -> None:
    a, b = bench.world(2)
    bench.begin(a, 7)
    bench.begin(b, 7)
    begun = [e.fields for e in bench.events if e.kind == "checkpoint.begun"]
    assert begun == [{"checkpoint": FIRST, "step": "7", "ranks": "2"}]


def test_member_that_is_behind_does_not_end_what_the_others_save(bench: Bench) -> None:
    a, b = bench.world(2)
    begun = bench.begin(a, 10).checkpoint_id
    late = bench.begin(b, 5).checkpoint_id
    answer = bench.save(b, late, step=5).reply
    assert isinstance(answer, c.Aborted)
    assert "step 10" in answer.detail
    bench.restart()
    late = bench.begin(b, 7, ticket=2).checkpoint_id
    assert isinstance(bench.save(b, late, step=7).reply, c.Aborted)
    assert bench.begin(b, 10, ticket=3).checkpoint_id == begun
    waiting = bench.save(a, begun, step=10)
    assert waiting.held
    assert isinstance(bench.save(b, begun, step=10).reply, c.Committed)
    assert isinstance(waiting.reply, c.Committed)


def test_saves_that_have_come_out_of_step_come_together_again(bench: Bench) -> None:
    """One's save has failed without a word, and both have saves in line."""
    a, b = bench.world(2)
    lines = {a.worker_id: [15, 20, 25, 30], b.worker_id: [10, 15, 20, 25, 30]}
    tickets = {a.worker_id: 0, b.worker_id: 0}
    waiting: dict[str, tuple[str, Any]] = {}
    for _ in range(20):
        for m in (a, b):
            line = lines[m.worker_id]
            if m.worker_id in waiting:
                if waiting[m.worker_id][1].held:
                    continue
                del waiting[m.worker_id]
            if not line:
                continue
            step = line.pop(0)
            tickets[m.worker_id] += 1
            begun = bench.begin(m, step, ticket=tickets[m.worker_id]).checkpoint_id
            waiting[m.worker_id] = begun, bench.save(m, begun, step=step)
    committed = [record.step for record in bench.job.checkpoints.committed.values()]
    assert committed == [15, 20, 25, 30]


def test_member_that_goes_back_ends_what_it_will_not_come_to(bench: Bench) -> None:
    a, b = bench.world(2)
    for m in (a, b):
        bench.begin(m, 10)
    ahead = bench.save(a, bench.begin(a, 15, ticket=2).checkpoint_id, step=15)
    bench.begin(b, 7, ticket=2)
    assert isinstance(ahead.reply, c.Aborted)
