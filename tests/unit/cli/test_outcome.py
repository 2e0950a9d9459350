"""Which exit status a launcher gets for the worst one of its workers."""

import pytest

from dtruntime.cli.jobs import status_of
from dtruntime.types import CheckpointInfo, JobStatus, Membership, WorkerState, WorkerStatus

LOST = 137
FAILED = 1


def worker(rank: int, membership: Membership, detail: str = "") -> WorkerStatus:
    return WorkerStatus(
        f"worker-{rank}", rank, rank + 1, membership, WorkerState.TRAINING, 5, 0, 0.1, detail=detail
    )


def job(*workers: WorkerStatus, saved_end: bool, losses: tuple[float, ...] = ()) -> JobStatus:
    latest = CheckpointInfo("c-1", 100, metadata={"finished": "2"} if saved_end else {})
    live = sum(w.membership is Membership.LIVE for w in workers)
    dead = sum(w.membership is Membership.DEAD for w in workers)
    return JobStatus(
        *("j", 1, 4, live, dead, 0, 0, 0, 1, workers),
        latest_checkpoint=latest,
        loss_ages=losses,
    )


FINISHED = worker(0, Membership.LEFT, "finished")


@pytest.mark.parametrize(
    "other",
    [
        worker(1, Membership.DEAD, "no heartbeat for 30.0 s"),
        worker(1, Membership.LEFT, "failed: RuntimeError"),
        worker(1, Membership.LEFT, "preempted"),
        # Killed at the very end: its heartbeats are not missed yet.
        worker(1, Membership.LIVE),
    ],
    ids=lambda w: w.detail or w.membership,
)
def test_finished_run_is_a_success_although_a_worker_was_lost(other: WorkerStatus) -> None:
    assert status_of(job(FINISHED, other, saved_end=True), LOST) == 0


def test_loss_of_a_worker_that_was_replaced_counts_as_well() -> None:
    replaced = worker(1, Membership.LEFT, "finished")
    assert status_of(job(FINISHED, replaced, saved_end=True, losses=(60.0,)), LOST) == 0


def test_failure_after_a_run_that_nobody_was_lost_from_stays_a_failure() -> None:
    other = worker(1, Membership.LEFT, "finished")
    assert status_of(job(FINISHED, other, saved_end=True), FAILED) == FAILED


@pytest.mark.parametrize("status", [FAILED, LOST, 143])
def test_run_that_has_not_finished_keeps_its_status(status: int) -> None:
    left = worker(0, Membership.LEFT, "preempted")
    dead = worker(1, Membership.DEAD, "no heartbeat for 30.0 s")
    assert status_of(job(left, dead, saved_end=False), status) == status


def test_end_of_an_earlier_shorter_run_is_not_that_of_this_one() -> None:
    failed = worker(0, Membership.LEFT, "failed: ValueError")
    dead = worker(1, Membership.DEAD, "no heartbeat for 30.0 s")
    assert status_of(job(failed, dead, saved_end=True), FAILED) == FAILED


def test_finished_run_without_any_failure_is_a_success() -> None:
    assert status_of(job(FINISHED, saved_end=True), 0) == 0
