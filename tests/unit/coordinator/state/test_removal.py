"""Jobs and datasets that are removed: what is forgotten, and what stays refused."""

import msgspec
import pytest

from dtruntime.coordinator.state import commands as c
from tests.support.epoch_bench import bench_with_dataset
from tests.support.machine_bench import DATASET, JOB, SAMPLES, Bench, digest_of, refusal


@pytest.fixture
def bench() -> Bench:
    return bench_with_dataset()


def used(bench: Bench) -> c.Registered:
    """A worker that has left a record of every kind."""
    worker, other = bench.world(2)
    bench.beat(worker, other, epoch=1)
    bench.arrive(worker, ticket=1)
    bench.arrive(other, ticket=1)
    begun = bench.begin(worker)
    bench.save(worker, begun.checkpoint_id)
    bench.save(worker, "alone", partial=False)
    bench.apply(
        c.ReportCoverage(
            JOB,
            worker.worker_id,
            worker.incarnation,
            DATASET,
            3,
            digest=digest_of([1]),
            world_size=2,
            expected=SAMPLES,
        )
    )
    bench.apply(c.Claim(JOB, worker.worker_id, worker.incarnation, DATASET, 0))
    bench.request("checkpoint")
    return worker


def test_job_with_live_workers_is_not_removed_by_accident(bench: Bench) -> None:
    used(bench)
    refused = refusal(bench.apply, c.RemoveJob(JOB))
    assert refused.reason == "job_is_live"
    assert "worker-0" in str(refused)
    assert refusal(bench.apply, c.RemoveJob("other")).reason == "unknown_job"


def test_nothing_of_a_removed_job_is_left(bench: Bench) -> None:
    used(bench)
    kinds = {kind for kind, _, _ in bench.rows}
    assert {"worker", "round", "checkpoint", "pending", "coverage", "epoch", "action"} <= kinds
    removed = bench.apply(c.RemoveJob(JOB, force=True))
    assert removed == c.JobRemoved(live_workers=2, datasets=1, checkpoints=1)
    assert list(bench.rows) == [("removed", "", "")]
    assert bench.machine.jobs == {}
    assert bench.events[-1].kind == "job.removed"
    bench.tick(60.0)
    bench.restart()
    assert bench.machine.jobs == {}


def test_calls_that_wait_in_a_removed_job_are_answered(bench: Bench) -> None:
    worker, _ = bench.world(2)
    waiting = bench.arrive(worker)
    saving = bench.save(worker, bench.begin(worker).checkpoint_id)
    assert waiting.held
    bench.apply(c.RemoveJob(JOB, force=True))
    assert not waiting.held
    assert not saving.held


@pytest.mark.parametrize("restarted", [False, True])
def test_worker_of_a_removed_job_is_none_of_the_next(bench: Bench, restarted: bool) -> None:
    old = used(bench)
    begun = bench.begin(old, step=9, ticket=2).checkpoint_id
    bench.apply(c.RemoveJob(JOB, force=True))
    if restarted:
        bench.restart()
    new = bench.register()
    assert (new.worker_id, new.rank) == (old.worker_id, 0)
    assert refusal(bench.beat, old).reason == "superseded"
    assert bench.begin(new, step=9).checkpoint_id != begun
    assert bench.job.checkpoints.latest is None


def test_removed_dataset_can_be_registered_with_other_parameters(bench: Bench) -> None:
    worker = used(bench)
    waiting = bench.apply(c.RegisterDataset(JOB, DATASET, SAMPLES, 10))
    assert not waiting.created
    assert refusal(bench.apply, c.RemoveDataset(JOB, DATASET)).reason == "job_is_live"
    assert bench.apply(c.RemoveDataset(JOB, DATASET, force=True)) == c.DatasetRemoved(epochs=2)
    left = {kind for kind, _, _ in bench.rows}
    assert not left & {"dataset", "index", "epoch", "segment", "reader", "coverage", "share"}
    assert refusal(bench.apply, c.RemoveDataset(JOB, DATASET)).reason == "unknown_dataset"
    assert bench.apply(c.RegisterDataset(JOB, DATASET, 7, 7)).created
    bench.beat(worker)
    bench.restart()


def test_conflict_names_the_difference_and_the_ways_out(bench: Bench) -> None:
    same = c.RegisterDataset(JOB, DATASET, SAMPLES, 10)
    refused = refusal(bench.apply, msgspec.structs.replace(same, shard_size=11))
    for part in (
        "shard_size: registered 10, given 11",
        "STRATA_JOB",
        "another id",
        f"strata datasets rm {DATASET} --job {JOB}",
        f"strata jobs rm {JOB}",
    ):
        assert part in str(refused)
