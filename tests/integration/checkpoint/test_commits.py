"""Commits of checkpoints: by one writer, by all ranks, by those who may not."""

import pytest

from dtruntime import TrainingOrchestrator
from dtruntime.errors import StorageError, SyncError
from dtruntime.rpc.gen import coordinator_pb2 as pb
from dtruntime.testing import LocalCoordinator, eventually
from tests.support.coordinators import JobView
from tests.support.raw_client import RawClient, Refusal
from tests.support.workers import remote_workers

COMMITTED = pb.CHECKPOINT_STATUS_COMMITTED
PENDING = pb.CHECKPOINT_STATUS_PENDING
ABORTED = pb.CHECKPOINT_STATUS_ABORTED


def ids_of(client: RawClient) -> list[str]:
    return [c.checkpoint_id for c in client.call("ListCheckpoints").checkpoints]


def test_single_writer_commits_at_once(coordinator: LocalCoordinator, job: str) -> None:
    with TrainingOrchestrator(coordinator_url=coordinator.url, job=job) as orchestrator:
        assert orchestrator.latest_checkpoint() is None
        orchestrator.register()
        orchestrator.commit_checkpoint(
            "run/10", 10, epoch=2, path="s3://b/10", size_bytes=2**40, is_full=False, loss="0.5"
        )
        latest = orchestrator.latest_checkpoint()
        assert latest is not None
        assert (latest.checkpoint_id, latest.step, latest.epoch) == ("run/10", 10, 2)
        assert (latest.path, latest.size_bytes, latest.is_full) == ("s3://b/10", 2**40, False)
        assert (latest.worker_id, latest.parts) == ("worker-0", 1)
        assert latest.metadata == {"loss": "0.5"}
        assert latest.committed_at > 0


def test_latest_is_the_newest_commit_not_the_highest_step(service: RawClient) -> None:
    worker = service.register()
    for step in (10, 30, 20):
        worker.commit(f"c-{step}", step).result()
    assert service.call("GetLatestCheckpoint").checkpoint.step == 20
    assert ids_of(service) == ["c-10", "c-30", "c-20"]


def test_job_without_checkpoints_has_no_latest(service: RawClient) -> None:
    assert not service.call("GetLatestCheckpoint").found
    service.register()
    assert not service.call("GetLatestCheckpoint").found


def test_commit_can_be_repeated(service: RawClient) -> None:
    worker = service.register()
    for _ in range(3):
        assert worker.commit("c-1", 1, path="/c/1").result().status == COMMITTED
    assert ids_of(service) == ["c-1"]


@pytest.mark.parametrize("other", [{"step": 2, "path": "/c/1"}, {"step": 1, "path": "/other"}])
def test_other_contents_under_the_same_id_are_a_conflict(
    service: RawClient, other: dict[str, object]
) -> None:
    worker = service.register()
    worker.commit("c-1", 1, path="/c/1").result()
    with pytest.raises(Refusal, match="use another id") as caught:
        worker.commit("c-1", **other).result()  # type: ignore[arg-type]
    assert caught.value.code.name == "ALREADY_EXISTS"
    assert caught.value.reason == "checkpoint_conflict"


def test_conflict_is_a_storage_error_in_the_sdk(coordinator: LocalCoordinator, job: str) -> None:
    with TrainingOrchestrator(coordinator_url=coordinator.url, job=job) as orchestrator:
        orchestrator.register()
        orchestrator.commit_checkpoint("c-1", 1)
        with pytest.raises(StorageError, match="'c-1' is committed for step 1"):
            orchestrator.commit_checkpoint("c-1", 2)


def test_checkpoint_of_all_ranks_commits_when_the_last_part_is_there(
    coordinator: LocalCoordinator, job: str, view: JobView
) -> None:
    with remote_workers(3, coordinator, job=job) as workers:

        def save(rank: int) -> object:
            return workers[rank].begin(
                "commit_checkpoint", "c-1", 7, path=f"/c/7/{rank}", size_bytes=100, partial=True
            )

        saves = [save(2), save(1)]
        workers[2].barrier("elsewhere", timeout_ms=100).exception(60)
        assert not any(done.done() for done in saves)  # type: ignore[attr-defined]
        assert view.status.latest_checkpoint is None
        for done in [save(0), *saves]:
            done.result(60)  # type: ignore[attr-defined]
        latest = view.status.latest_checkpoint
        assert latest is not None
        assert (latest.step, latest.parts, latest.size_bytes) == (7, 3, 300)


def test_part_can_be_repeated(service: RawClient) -> None:
    first, second = service.workers(2, world_size=2)
    for _ in range(2):
        reply = first.commit("c-1", 1, partial=True).result()
        assert (reply.status, list(reply.missing_ranks)) == (PENDING, [1])
    assert second.commit("c-1", 1, partial=True).result().status == COMMITTED
    assert first.commit("c-1", 1, partial=True, timeout_ms=60_000).result().status == COMMITTED
    assert service.call("GetLatestCheckpoint").checkpoint.parts == 2


def test_waiting_for_parts_ends_with_the_ranks_that_lack(
    coordinator: LocalCoordinator, job: str
) -> None:
    with (
        TrainingOrchestrator(coordinator_url=coordinator.url, job=job, world_size=2) as first,
        TrainingOrchestrator(coordinator_url=coordinator.url, job=job, world_size=2) as second,
    ):
        first.register()
        second.register()
        with pytest.raises(StorageError, match=r"within 200 ms.*\[1\]"):
            first.commit_checkpoint("c-1", 1, partial=True, timeout_ms=200)
        second.commit_checkpoint("c-1", 1, partial=True)
        first.commit_checkpoint("c-1", 1, partial=True)


def test_parts_of_different_steps_are_a_conflict(service: RawClient) -> None:
    first, second = service.workers(2, world_size=2)
    first.commit("c-1", 1, partial=True).result()
    with pytest.raises(Refusal, match="step 1") as caught:
        second.commit("c-1", 2, partial=True).result()
    assert caught.value.reason == "checkpoint_conflict"


def test_one_writer_cannot_commit_what_all_are_saving(service: RawClient) -> None:
    first, second = service.workers(2, world_size=2)
    first.commit("c-1", 1, partial=True).result()
    with pytest.raises(Refusal, match="in parts") as caught:
        second.commit("c-1", 1).result()
    assert caught.value.reason == "checkpoint_conflict"


def test_parts_wait_for_ranks_that_have_not_registered(service: RawClient) -> None:
    first = service.register(world_size=2)
    with pytest.raises(Refusal, match="rank 1") as caught:
        first.commit("c-1", 1, partial=True).result()
    assert caught.value.reason == "not_ready"
    assert int(caught.value.trailing["retry-after-ms"]) > 0


def test_rank_that_leaves_aborts_and_the_survivors_can_save_again(service: RawClient) -> None:
    first, second, third = service.workers(3)
    assert first.commit("c-1", 1, partial=True).result().status == PENDING
    wait = second.commit("c-1", 1, partial=True, timeout_ms=20_000)

    def lacking() -> list[int]:
        return list(first.commit("c-1", 1, partial=True).result().missing_ranks)

    # The coordinator has the second part, and so it holds the call that brought it.
    eventually(lambda: lacking() == [2], what="the arrival of the second part")
    assert not wait.done()
    third.leave()
    aborted = wait.result()
    assert aborted.status == ABORTED
    assert "worker-2" in aborted.detail
    assert first.commit("c-1", 1, partial=True).result().status == ABORTED
    for worker in (first, second):
        worker.told = aborted.generation
    assert first.commit("c-1", 1, partial=True).result().status == PENDING
    assert second.commit("c-1", 1, partial=True).result().status == COMMITTED
    assert service.call("GetLatestCheckpoint").checkpoint.parts == 2


def test_ranks_agree_on_an_id_for_each_attempt(service: RawClient) -> None:
    workers = service.workers(2, world_size=2)
    for ticket in (1, 2):
        begun = [worker.begin_checkpoint(7, ticket) for worker in workers]
        assert begun[0] == begun[1]
        assert begun[0].checkpoint_id == f"step-000000000007-{ticket:06d}"
        assert list(begun[0].ranks) == [0, 1]
        for worker in workers:
            reply = worker.commit(begun[0].checkpoint_id, 7, partial=True).result()
        assert reply.status == COMMITTED
    assert service.call("GetLatestCheckpoint").checkpoint.checkpoint_id.endswith("-000002")


def test_attempt_that_a_leaving_rank_ended_stays_over(service: RawClient) -> None:
    first, second, third = service.workers(3)
    begun = [worker.begin_checkpoint(7).checkpoint_id for worker in (first, second, third)]
    third.leave()
    first.told = second.told = first.heartbeat().generation
    for worker in (first, second):
        reply = worker.commit(begun[0], 7, partial=True).result()
        assert (reply.status, "worker-2" in reply.detail) == (ABORTED, True)
    assert list(first.begin_checkpoint(7, ticket=2).ranks) == [0, 1]
    assert ids_of(service) == []


def test_lower_ticket_is_refused(service: RawClient) -> None:
    worker = service.register()
    worker.begin_checkpoint(7, ticket=2)
    with pytest.raises(Refusal, match="ticket 2") as caught:
        worker.begin_checkpoint(7, ticket=1)
    assert caught.value.reason == "checkpoint_conflict"


def test_superseded_rank_cannot_commit(service: RawClient) -> None:
    zombie = service.register(worker_id="trainer")
    service.register(worker_id="trainer")
    for partial in (False, True):
        with pytest.raises(Refusal) as caught:
            zombie.commit("late", 9, partial=partial).result()
        assert caught.value.reason == "superseded"
    assert not ids_of(service)


def test_sdk_is_fenced_by_a_refused_commit(coordinator: LocalCoordinator, job: str) -> None:
    def orchestrator() -> TrainingOrchestrator:
        return TrainingOrchestrator(coordinator_url=coordinator.url, job=job, worker_id="trainer")

    zombie = orchestrator()
    zombie.register()
    with orchestrator() as successor:
        successor.register()
        with pytest.raises(SyncError, match="registered again") as caught:
            zombie.commit_checkpoint("late", 9)
        assert caught.value.reason == "superseded"
        assert successor.latest_checkpoint() is None
    zombie.deregister()
