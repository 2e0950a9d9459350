"""What is said of committed checkpoints: kept with them, and never more than was said."""

from typing import Any

import pytest
from msgspec.structs import replace

from dtruntime.coordinator.state import commands as c
from dtruntime.coordinator.state.checkpoints.history import SAME_VERDICT_SECONDS, RetentionForecasts
from dtruntime.coordinator.state.effects import Put
from dtruntime.coordinator.state.records import CRASH_SAFE_KINDS, CheckpointRecord
from dtruntime.retention import PLACE_KEY, RETENTION_KEY, Retention
from dtruntime.types import CheckpointCondition
from tests.support.machine_bench import JOB, Bench, refusal

GOOD, DAMAGED, REMOVED = CheckpointCondition


def say(
    bench: Bench,
    condition: CheckpointCondition,
    *keys: str,
    by: c.Registered | None = None,
    **more: Any,
) -> int:
    who: dict[str, Any] = {"reported_by": by.worker_id, "incarnation": by.incarnation} if by else {}
    reply = bench.apply(c.ReportCheckpoints(JOB, condition, keys, **more, **who))
    assert isinstance(reply, c.CheckpointsReported)
    return reply.known


def saved(bench: Bench, *keys: str) -> c.Registered:
    a = bench.register()
    for step, key in enumerate(keys, 1):
        bench.save(a, key, partial=False, step=step, path=f"/{key}")
    return a


def record(bench: Bench, key: str) -> CheckpointRecord:
    found = bench.job.checkpoints.committed[key]
    assert isinstance(found, CheckpointRecord)
    return found


def told(bench: Bench) -> list[tuple[str, str]]:
    kinds = ("checkpoint.verified", "checkpoint.damaged", "checkpoint.removed")
    return [(e.kind, e.fields["checkpoint"]) for e in bench.events if e.kind in kinds]


def test_verdict_is_kept_with_the_checkpoint_and_outlives_a_restart(bench: Bench) -> None:
    a = saved(bench, "one", "two")
    before = record(bench, "one")
    assert (before.verified, before.verified_at) == (None, 0.0)
    assert say(bench, GOOD, "one", by=a) == 1
    assert not {e.kind for e in bench.effects if isinstance(e, Put)} & CRASH_SAFE_KINDS
    bench.restart()
    expected = replace(before, verified=True, verified_at=bench.now, verified_by="worker-0")
    assert record(bench, "one") == expected
    assert record(bench, "two").verified is None


def test_damage_is_told_in_the_journal_once_with_what_is_wrong(bench: Bench) -> None:
    saved(bench, "one")
    for _ in range(3):
        assert say(bench, DAMAGED, "one", detail="packs/1 is gone") == 1
    assert told(bench) == [("checkpoint.damaged", "one")]
    assert bench.events[-1].fields["reason"] == "packs/1 is gone"
    assert record(bench, "one").verified is False


def test_newer_verdict_replaces_an_older_one(bench: Bench) -> None:
    saved(bench, "one")
    say(bench, DAMAGED, "one")
    bench.now += 1
    say(bench, GOOD, "one")
    assert record(bench, "one").verified is True
    assert record(bench, "one").verified_at == bench.now
    assert told(bench) == [("checkpoint.damaged", "one"), ("checkpoint.verified", "one")]


def test_many_who_load_the_same_checkpoint_cost_one_record(bench: Bench) -> None:
    members = bench.world(4)
    bench.save(members[0], "one", partial=False)
    say(bench, GOOD, "one", by=members[0])
    for member in members[1:]:
        assert say(bench, GOOD, "one", by=member) == 1
        assert not bench.effects
    bench.now += SAME_VERDICT_SECONDS
    say(bench, GOOD, "one")
    assert record(bench, "one").verified_at == bench.now
    assert told(bench) == [("checkpoint.verified", "one")]


def test_deleted_checkpoint_is_listed_no_more_and_does_not_come_back(bench: Bench) -> None:
    a = saved(bench, "one", "two")
    assert say(bench, REMOVED, "two", "nonsense", by=a) == 1
    assert bench.job.checkpoints.latest.checkpoint_id == "one"
    again = bench.save(a, "two", partial=False, step=2, path="/two")
    assert isinstance(again.reply, c.Committed)
    say(bench, GOOD, "two")
    say(bench, REMOVED, "two")
    bench.restart()
    history = bench.job.checkpoints.history
    assert [r.checkpoint_id for r in history.newest()] == ["one"]
    assert (history.present, history.is_present("two")) == (1, False)
    assert told(bench) == [("checkpoint.removed", "two")]
    bench.save(a, "three", partial=False, step=3)
    assert bench.job.checkpoints.latest.sequence == 3


def test_checkpoint_whose_id_cannot_be_read_is_known_by_its_path(bench: Bench) -> None:
    saved(bench, "one", "two")
    assert say(bench, DAMAGED, path="/one") == 1
    assert record(bench, "one").verified is False
    assert record(bench, "two").verified is None
    assert say(bench, DAMAGED, path="/") == 0


def test_report_on_what_is_not_known_changes_nothing(bench: Bench) -> None:
    saved(bench, "one")
    assert say(bench, REMOVED, "other") == 0
    assert not bench.effects
    stranger = c.ReportCheckpoints("elsewhere", GOOD, ("one",))
    assert refusal(bench.apply, stranger).reason == "unknown_job"


@pytest.mark.parametrize("condition", CheckpointCondition)
def test_superseded_member_is_not_heard(bench: Bench, condition: CheckpointCondition) -> None:
    a = saved(bench, "one")
    bench.leave(a)
    command = c.ReportCheckpoints(
        JOB, condition, ("one",), reported_by=a.worker_id, incarnation=a.incarnation
    )
    assert refusal(bench.apply, command).reason == "superseded"
    assert record(bench, "one").verified is None


def test_what_retention_drops_next_follows_from_what_is_there(bench: Bench) -> None:
    a, book = bench.register(), RetentionForecasts()
    metadata = {RETENTION_KEY: Retention(keep_count=2).to_json(), PLACE_KEY: "/c"}
    for step in (1, 2, 3):
        bench.save(a, f"s{step}", partial=False, step=step, metadata=metadata)

    def doomed() -> list[str]:
        fates = book.of(bench.job)
        newest = bench.job.checkpoints.history.newest()
        return [r.checkpoint_id for r in newest if fates.will_be_dropped(r)]

    assert doomed() == ["s2", "s1"]
    say(bench, REMOVED, "s1")
    assert doomed() == ["s2"]
    say(bench, REMOVED, "s3")
    assert doomed() == []
