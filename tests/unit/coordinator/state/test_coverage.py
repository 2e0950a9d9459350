"""What workers report of epochs whose position is kept in checkpoints."""

from typing import Any

import pytest

from dtruntime.coordinator.state import commands as c
from dtruntime.coordinator.state.epochs import epoch_coverage
from dtruntime.coordinator.state.epochs.epoch_coverage import Covered
from dtruntime.sharding.coverage_digest import Digest
from tests.support.epoch_bench import bench_with_dataset
from tests.support.machine_bench import DATASET, JOB, SAMPLES, Bench, digest_of, refusal


@pytest.fixture
def bench() -> Bench:
    return bench_with_dataset()


def report(bench: Bench, m: c.Registered, samples: Any, **fields: Any) -> None:
    fields = {"dataset_id": DATASET, "epoch": 0, "world_size": 2, "expected": SAMPLES, **fields}
    fields.setdefault("generation", m.generation)
    digest = samples if isinstance(samples, bytes) else digest_of(samples)
    bench.apply(c.ReportCoverage(m.job, m.worker_id, m.incarnation, digest=digest, **fields))


def covered(bench: Bench, epoch: int = 0) -> Covered:
    (found,) = [x for x in bench.job.coverages.of(DATASET, {}) if x.epoch == epoch]
    assert isinstance(found, Covered)
    return found


def count(bench: Bench) -> int:
    return Digest(SAMPLES, covered(bench).digest).count


def test_reports_of_all_workers_add_up_with_the_base(bench: Bench) -> None:
    a, b = bench.world(2)
    base = digest_of(range(20))
    report(bench, a, range(20, 40), base=base, dropped=5, expected=95)
    report(bench, b, range(60, 70), base=base, dropped=5, expected=95)
    found = covered(bench)
    assert found.digest == digest_of([*range(40), *range(60, 70)])
    assert (found.workers, found.expected, found.dropped, found.complete) == (2, 95, 5, False)
    report(bench, b, range(40, 95), base=base, dropped=5, expected=95)
    assert covered(bench).complete


def test_samples_before_the_resumed_position_may_be_assumed(bench: Bench) -> None:
    a, _ = bench.world(2)
    report(bench, a, range(30, 100), assumed=30)
    found = covered(bench)
    assert (found.assumed, found.complete) == (30, True)


def test_report_that_comes_late_does_not_undo_a_newer_one(bench: Bench) -> None:
    a, _ = bench.world(2)
    report(bench, a, range(20))
    report(bench, a, range(10))
    assert bench.effects == []
    assert count(bench) == 20


def test_newer_incarnation_replaces_what_its_slot_reported(bench: Bench) -> None:
    a, b = bench.world(2)
    report(bench, a, range(20))
    report(bench, b, range(50, 60))
    again = bench.register(world_size=2, rank=1)
    report(bench, again, range(50, 53), generation=b.generation)
    assert count(bench) == 23


@pytest.mark.parametrize("base", [range(40), range(5)], ids=["further on", "further back"])
def test_attempt_of_a_newer_state_replaces_the_older_one(bench: Bench, base: range) -> None:
    a, b = bench.world(2)
    first = digest_of(range(20))
    report(bench, a, range(20, 30), base=first)
    report(bench, b, range(60, 70), base=first)
    bench.leave(b)
    b = bench.register(world_size=2, rank=1)
    newer = digest_of(base)
    report(bench, b, [98, 99], base=newer)
    assert count(bench) == len(base) + 2
    report(bench, a, range(20, 35), base=first)
    assert bench.effects == [], "it has not loaded the newer state yet"
    report(bench, a, [97], base=newer, generation=b.generation)
    assert count(bench) == len(base) + 3


def test_second_load_in_one_generation_is_newer_than_the_first(bench: Bench) -> None:
    a, b = bench.world(2)
    later, earlier = digest_of(range(20)), digest_of(range(10))
    for m in (a, b):
        report(bench, m, [30 + m.rank], base=later, loads=1)
    report(bench, a, [40], base=earlier, loads=2)
    assert count(bench) == 11
    report(bench, b, [30, 31], base=later, loads=1)
    assert bench.effects == []
    report(bench, b, [41], base=earlier, loads=2)
    assert count(bench) == 12
    report(bench, a, [50], base=later, loads=3)
    assert count(bench) == 21, "back to the state it had before"


def test_same_state_loaded_again_begins_each_slot_anew(bench: Bench) -> None:
    a, b = bench.world(2)
    base = digest_of(range(20))
    for m in (a, b):
        report(bench, m, range(30 + 10 * m.rank, 40 + 10 * m.rank), base=base, loads=1)
    report(bench, a, [30], base=base, loads=2)
    report(bench, a, range(30, 40), base=base, loads=1)
    assert bench.effects == []
    assert count(bench) == 20 + 1 + 10


def test_other_number_of_workers_is_another_attempt(bench: Bench) -> None:
    a, b = bench.world(2)
    report(bench, a, range(10))
    report(bench, b, range(50, 60))
    report(bench, a, range(5), world_size=1, loads=1)
    assert (count(bench), covered(bench).workers) == (5, 1)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"base": b"x"}, "invalid"),
        ({"samples": b"x"}, "invalid"),
        ({"expected": SAMPLES + 1}, "invalid"),
        ({"dataset_id": "other"}, "unknown_dataset"),
    ],
)
def test_report_that_makes_no_sense_is_refused(
    bench: Bench, fields: dict[str, Any], reason: str
) -> None:
    a, _ = bench.world(2)
    assert refusal(report, bench, a, **{"samples": range(5), **fields}).reason == reason


def test_only_live_members_report(bench: Bench) -> None:
    a, _ = bench.world(2)
    bench.leave(a)
    assert refusal(report, bench, a, range(5)).reason == "superseded"


def test_reports_outlive_the_coordinator(bench: Bench) -> None:
    a, b = bench.world(2)
    report(bench, a, range(10))
    report(bench, b, range(50, 60))
    bench.restart()
    assert count(bench) == 20
    report(bench, a, range(12))
    assert count(bench) == 22


def test_oldest_epochs_are_forgotten(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epoch_coverage, "EPOCHS_KEPT", 2)
    a, _ = bench.world(2)
    for epoch in range(3):
        report(bench, a, range(10), epoch=epoch)
    assert [x.epoch for x in bench.job.coverages.of(DATASET, {})] == [1, 2]
    assert sorted(key[2] for key in bench.rows if key[0] == "share") == ["1:0:corpus", "2:0:corpus"]


def test_ledgers_and_reports_are_listed_together(bench: Bench) -> None:
    a, _ = bench.world(2)
    report(bench, a, range(10), epoch=3)
    bench.claim(a, 0, epoch=1)
    bench.claim(a, 1, 20, 50, epoch=1)
    bench.commit(a, 1, 20, 20, epoch=1)
    ledgers = bench.job.epochs.ledgers[DATASET]
    ledger, reports = bench.job.coverages.of(DATASET, ledgers)
    assert (ledger.epoch, ledger.segments, ledger.workers, ledger.expected) == (1, 1, 1, SAMPLES)
    assert ledger.digest == digest_of(range(20))
    assert (reports.epoch, reports.segments) == (3, 0)


def test_share_without_its_epoch_is_left_out_at_the_start(bench: Bench) -> None:
    a, _ = bench.world(2)
    report(bench, a, range(10))
    rows = dict(bench.rows)
    del rows["coverage", JOB, "0:corpus"]
    machine = type(bench.machine)(3.0)
    left_out = machine.restore([(*key, row) for key, row in rows.items()], bench.now)
    assert left_out == ["share 0:0:corpus of job job"]


def incomplete(bench: Bench) -> list[tuple[str, str]]:
    """Epochs that the journal calls incomplete, and how many samples they lack."""
    found = [event.fields for event in bench.events if event.kind == "epoch.incomplete"]
    return [(fields["epoch"], fields["missing"]) for fields in found]


def test_epochs_of_which_a_ghost_had_half_are_told_of_when_it_is_dead(bench: Bench) -> None:
    ghost, reader = bench.elastic(2)
    report(bench, reader, range(50, 100), epoch=0, ended=True)
    report(bench, reader, range(50, 100), epoch=1, ended=True)
    assert incomplete(bench) == [], "the other one may still read"
    bench.kill(ghost, among=[ghost, reader])
    report(bench, reader, range(50, 100), epoch=2, ended=True)
    assert incomplete(bench) == [("0", "50"), ("1", "50")]
    assert covered(bench, 0).ended_incomplete
    assert not covered(bench, 2).ended_incomplete
    bench.restart()
    report(bench, reader, range(50, 100), epoch=3, ended=True)
    assert incomplete(bench)[2:] == [("2", "50")], "each is told of once"


@pytest.mark.parametrize("order", ["ghost first", "reader first"])
def test_last_epoch_of_a_job_that_ended_is_told_of_too(bench: Bench, order: str) -> None:
    ghost, reader = bench.elastic(2)
    report(bench, reader, range(50, 100), ended=True)
    if order == "ghost first":
        bench.kill(ghost, among=[ghost, reader])
        bench.leave(reader)
    else:
        bench.leave(reader)
        assert incomplete(bench) == []
        bench.kill(ghost, among=[ghost])
    assert incomplete(bench) == [("0", "50")]


def test_epoch_that_was_broken_off_is_not_one_that_ended(bench: Bench) -> None:
    a, b = bench.world(2)
    report(bench, a, range(10))
    report(bench, b, range(50, 60))
    bench.leave(a)
    bench.leave(b)
    assert incomplete(bench) == []


def test_workers_that_died_may_come_back_to_the_epoch(bench: Bench) -> None:
    a, b = bench.world(2)
    report(bench, a, range(50), ended=True)
    report(bench, b, range(50, 60))
    bench.kill(a, b, among=[a, b])
    assert bench.roster.live_count == 0
    assert incomplete(bench) == []


def test_worker_that_failed_may_come_back_to_the_epoch(bench: Bench) -> None:
    a, b = bench.world(2)
    report(bench, a, range(50), ended=True)
    bench.kill(b, among=[a, b])
    bench.apply(c.Deregister(JOB, a.worker_id, a.incarnation, "failed: SyncError"))
    assert incomplete(bench) == []


def test_rank_that_has_not_come_yet_is_waited_for(bench: Bench) -> None:
    first = bench.register(world_size=2, rank=0)
    report(bench, first, range(50), epoch=0, ended=True)
    report(bench, first, range(50), epoch=1, ended=True)
    assert incomplete(bench) == []
    second = bench.register(world_size=2, rank=1)
    report(bench, second, range(50, 100), epoch=0, ended=True)
    report(bench, second, range(50, 100), epoch=1, ended=True)
    bench.leave(first)
    bench.leave(second)
    assert incomplete(bench) == []


def test_missing_samples_that_come_after_all_take_the_alarm_back(bench: Bench) -> None:
    ghost, reader = bench.elastic(2)
    report(bench, reader, range(50, 100), epoch=0, ended=True)
    bench.kill(ghost, among=[ghost, reader])
    report(bench, reader, range(50, 100), epoch=1, ended=True)
    assert [a.record.epoch for a in bench.job.coverages.incomplete()] == [0]
    again = bench.register()
    report(bench, again, range(50), epoch=0, ended=True, generation=reader.generation)
    assert bench.job.coverages.incomplete() == []
    assert covered(bench, 0).complete
