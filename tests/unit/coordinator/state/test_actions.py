"""What is asked of a running job: told by heartbeats, kept until it is done."""

import pytest

from dtruntime.coordinator.state import commands as c
from dtruntime.coordinator.state.effects import Put
from dtruntime.coordinator.state.operator_requests import ACTIONS_LIMIT
from dtruntime.coordinator.state.records import CRASH_SAFE_KINDS
from tests.support.machine_bench import Bench, refusal


def told(bench: Bench, member: c.Registered) -> list[str]:
    return [action.action_id for action in bench.beat(member).actions]


def test_heartbeats_tell_of_actions_until_they_are_done(bench: Bench) -> None:
    a, b = bench.world(2)
    assert told(bench, a) == []
    first = bench.request("checkpoint", reason="because")
    second = bench.request("drain", b.worker_id)
    assert told(bench, a) == told(bench, b) == [first, second]
    bench.complete(first)
    assert told(bench, a) == [second]
    (action,) = bench.beat(a).actions
    assert (action.kind, action.worker_id, action.requested_at) == ("drain", "worker-1", bench.now)


def test_same_request_is_one_action_while_it_is_pending(bench: Bench) -> None:
    _, b, d = bench.world(3)
    first = bench.request("drain", b.worker_id, reason="one")
    assert bench.request("drain", b.worker_id, reason="another") == first
    assert bench.request("drain", d.worker_id) != first
    bench.complete(first)
    assert bench.request("drain", b.worker_id) != first


def test_actions_survive_a_restart_and_wait_for_the_disk(bench: Bench) -> None:
    a = bench.register()
    first = bench.request("stop")
    assert not {e.kind for e in bench.effects if isinstance(e, Put)} & CRASH_SAFE_KINDS
    bench.restart()
    assert told(bench, a) == [first]
    bench.complete(first)
    bench.restart()
    assert told(bench, a) == []
    assert bench.request("stop") != first


def test_completion_is_told_in_the_journal_once_with_who_and_what(bench: Bench) -> None:
    a, b = bench.world(2)
    key = bench.request("checkpoint", requested_by=a.worker_id, incarnation=a.incarnation)
    for m in (b, a):
        who = {"completed_by": m.worker_id, "incarnation": m.incarnation}
        bench.complete(key, f"saved by {m.rank}", **who)
    requested, completed = (e.fields for e in bench.events if e.kind.startswith("action."))
    assert (requested["what"], requested["by"]) == ("checkpoint", "worker-0")
    assert (completed["action"], completed["by"]) == (key, "worker-1")
    assert completed["outcome"] == "saved by 1"


@pytest.mark.parametrize(
    ("kind", "worker", "reason", "text"),
    [
        ("dance", "", "invalid", "checkpoint, stop, drain"),
        ("drain", "nobody", "no_such_worker", "'nobody'"),
        ("drain", "", "no_such_worker", "no worker is named"),
        ("drain", "worker-1", "no_such_worker", "'worker-1'"),
        ("stop", "worker-0", "invalid", "whole job"),
    ],
)
def test_impossible_requests_are_refused(
    bench: Bench, kind: str, worker: str, reason: str, text: str
) -> None:
    _, b = bench.elastic(2)
    bench.leave(b)
    refused = refusal(bench.request, kind, worker)
    assert refused.reason == reason
    assert text in str(refused)


def test_unknown_action_cannot_be_completed(bench: Bench) -> None:
    bench.register()
    assert refusal(bench.complete, "action-000001").reason == "unknown_action"
    bench.request("stop")
    for wrong in ("action-000002", "action-1", "action-x", "stop"):
        assert refusal(bench.complete, wrong).reason == "unknown_action"


def test_ghost_can_neither_request_nor_complete(bench: Bench) -> None:
    a = bench.register(worker_id="w")
    bench.register(worker_id="w")
    key = bench.request("stop")
    ghost = {"incarnation": a.incarnation}
    refused = refusal(bench.request, "checkpoint", requested_by="w", **ghost)
    assert refused.reason == "superseded"
    assert refusal(bench.complete, key, completed_by="w", **ghost).reason == "superseded"


@pytest.mark.parametrize("how", ["leave", "kill", "replace"])
def test_drain_ends_when_its_worker_is_gone(bench: Bench, how: str) -> None:
    a, b = members = bench.world(2)
    bench.request("drain", b.worker_id)
    stop = bench.request("stop")
    if how == "leave":
        bench.leave(b)
    elif how == "kill":
        bench.kill(b, among=members)
    else:
        bench.register(world_size=2, rank=1)
    assert told(bench, a) == [stop]
    assert "action.completed" in bench.kinds_of_events()


def test_what_is_asked_outlives_a_group_that_dies_and_ends_with_one_that_leaves(
    bench: Bench,
) -> None:
    a, b = members = bench.world(2)
    key = bench.request("stop")
    bench.kill(a, b, among=members)
    a, b = bench.world(2)
    assert told(bench, a) == [key]
    bench.leave(a)
    assert told(bench, b) == [key]
    bench.leave(b)
    assert told(bench, bench.register()) == []


def test_pending_actions_are_bounded(bench: Bench) -> None:
    members = bench.world(ACTIONS_LIMIT)
    first = bench.request("stop")
    for m in members[1:]:
        bench.request("drain", m.worker_id)
    refused = refusal(bench.request, "checkpoint")
    assert refused.reason == "too_many_actions"
    assert first in str(refused)
    bench.complete(first)
    assert bench.request("checkpoint")
