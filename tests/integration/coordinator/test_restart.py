"""The coordinator dies, hangs or is away: what is remembered, and what workers notice."""

import asyncio
import signal
import threading
import time

import pytest

from dtruntime import DatasetRegistry, TrainingOrchestrator, WorkerConfig
from dtruntime.errors import ConnectionError, SyncError
from dtruntime.rpc.channel import Channel
from dtruntime.rpc.gen import coordinator_pb2 as pb
from dtruntime.testing import LocalCoordinator, TcpProxy, eventually
from dtruntime.types import Membership
from tests.support.coordinators import JobView
from tests.support.raw_client import RawClient, Refusal
from tests.support.workers import RemoteWorker, remote_workers


def let_pass(seconds: float) -> None:
    """Let time pass that is itself what the test is about."""
    end = time.monotonic() + seconds
    eventually(lambda: time.monotonic() > end, within=seconds + 10)


def restart(coordinator: LocalCoordinator) -> None:
    coordinator.kill()
    coordinator.start()


def test_restart_keeps_ranks_incarnations_and_generation(
    own_coordinator: LocalCoordinator, own_view: JobView
) -> None:
    with remote_workers(3, own_coordinator) as workers:
        before = own_view.status
        restart(own_coordinator)
        for wait in [worker.barrier("step") for worker in workers]:
            wait.result(60)
        after = own_view.status
        assert [(w.worker_id, w.rank, w.incarnation) for w in after.workers] == [
            (w.worker_id, w.rank, w.incarnation) for w in before.workers
        ]
        assert after.generation == before.generation
        assert all(w.membership == Membership.LIVE for w in after.workers)
        assert [worker.call("rank") for worker in workers] == [0, 1, 2]
        assert not any(worker.events("worker.superseded") for worker in workers)


async def test_back_off_however_long_ends_when_the_coordinator_is_back(
    own_coordinator: LocalCoordinator,
) -> None:
    own_coordinator.kill()
    channel = Channel(own_coordinator.url)
    with pytest.raises(ConnectionError):
        await channel.call("Heartbeat", pb.HeartbeatRequest(), pb.HeartbeatResponse, patience=0)
    rests = asyncio.gather(channel.rest(3600), channel.rest(3600))
    await asyncio.to_thread(own_coordinator.start)
    await rests
    await channel.close()


def test_open_barrier_completes_across_a_killed_coordinator(
    own_coordinator: LocalCoordinator, own_view: JobView
) -> None:
    with remote_workers(3, own_coordinator) as workers:
        waits = [worker.barrier("step") for worker in workers[:2]]
        eventually(lambda: own_view.waiting("step") == 2)
        restart(own_coordinator)
        eventually(lambda: own_view.waiting("step") == 2, what="the waiting workers came back")
        waits.append(workers[2].barrier("step"))
        for wait in waits:
            wait.result(60)


def test_barrier_whose_reply_was_lost_is_answered_again_after_a_restart(
    own_coordinator: LocalCoordinator,
) -> None:
    with RawClient(own_coordinator.url) as client:
        first, second = client.workers(2, world_size=2)
        for _ in range(2):
            replies = [call.result() for call in [first.arrive("step"), second.arrive("step")]]
        restart(own_coordinator)
        again = first.arrive("step", ticket=2).result()
        assert again == replies[0]
        assert again.outcome == pb.BARRIER_OUTCOME_COMPLETED
        assert again.round == 2
        third_round = first.arrive("step", ticket=3)
        reply = second.arrive("step", ticket=3).result()
        assert third_round.result() == reply
        assert reply.round == 3


def test_every_acknowledged_commit_survives_a_kill_in_the_middle_of_them(
    own_coordinator: LocalCoordinator,
) -> None:
    acknowledged: set[str] = set()
    enough = threading.Event()

    def commit_until_it_dies(url: str, name: str) -> None:
        with RawClient(url) as client:
            worker = client.register(worker_id=name)
            for step in range(1_000_000):
                try:
                    worker.commit(f"{name}/{step}", step, path=f"/{name}/{step}").result()
                except Refusal:
                    return
                acknowledged.add(f"{name}/{step}")
                if len(acknowledged) > 200:
                    enough.set()

    threads = [
        threading.Thread(target=commit_until_it_dies, args=(own_coordinator.url, f"writer-{n}"))
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    assert enough.wait(60)
    own_coordinator.kill()
    for thread in threads:
        thread.join(60)
    own_coordinator.start()
    with RawClient(own_coordinator.url) as client:
        listed = [c.checkpoint_id for c in client.call("ListCheckpoints").checkpoints]
        stored = set(listed)
        assert acknowledged <= stored
        assert len(stored) <= len(acknowledged) + len(threads), "commits that nobody sent"
        newest = client.call("GetLatestCheckpoint").checkpoint
        assert newest.checkpoint_id == listed[-1]


@pytest.mark.long
def test_generation_and_incarnations_never_go_back(own_coordinator: LocalCoordinator) -> None:
    generations, incarnations = [0], [0]
    for _ in range(2):
        with RawClient(own_coordinator.url) as client:
            workers = client.workers(2)
            workers[0].leave()
            generations.append(workers[1].heartbeat().generation)
            incarnations += [worker.registration.incarnation for worker in workers]
        restart(own_coordinator)
        with RawClient(own_coordinator.url) as client:
            generations.append(client.call("GetStatus").generation)
            workers[1].client = client
            workers[1].leave()
    assert incarnations == sorted(set(incarnations))
    assert generations == sorted(generations)


def test_datasets_and_shards_survive_a_restart(own_coordinator: LocalCoordinator) -> None:
    with DatasetRegistry(own_coordinator.url) as registry:
        registry.register(
            "images", "/data", "parquet", 2**40, 2**32 - 1, shuffle=True, seed=2**64 - 1
        )
        before = registry.get_shard("images", 0, 3)
        restart(own_coordinator)
        assert registry.get_shard("images", 0, 3) == before
        assert len(before) == 257


def test_partial_checkpoint_commits_across_a_killed_coordinator(
    own_coordinator: LocalCoordinator, own_view: JobView
) -> None:
    with remote_workers(3, own_coordinator) as workers:

        def save(worker: RemoteWorker) -> object:
            return worker.begin("commit_checkpoint", "c-1", 1, size_bytes=10, partial=True)

        saves = [save(worker) for worker in workers[:2]]
        restart(own_coordinator)
        saves.append(save(workers[2]))
        for done in saves:
            done.result(60)  # type: ignore[attr-defined]
        latest = own_view.status.latest_checkpoint
        assert latest is not None
        assert (latest.checkpoint_id, latest.parts, latest.size_bytes) == ("c-1", 3, 30)


def test_attempt_survives_a_killed_coordinator_and_its_id_is_not_given_again(
    own_coordinator: LocalCoordinator, own_view: JobView
) -> None:
    def saved(workers: list[RemoteWorker], checkpoint_id: str) -> None:
        parts = [w.begin("commit_checkpoint", checkpoint_id, 7, partial=True) for w in workers]
        for part in parts:
            part.result(60)

    with remote_workers(3, own_coordinator) as workers:
        ids = [worker.call("begin_checkpoint", 7) for worker in workers[:2]]
        restart(own_coordinator)
        ids.append(workers[2].call("begin_checkpoint", 7))
        restart(own_coordinator)
        assert len(set(ids)) == 1
        saved(workers, ids[0])
        restart(own_coordinator)
        again = {worker.call("begin_checkpoint", 7) for worker in workers}
        assert len(again) == 1
        assert not again & set(ids)
        saved(workers, *again)
        latest = own_view.status.latest_checkpoint
        assert latest is not None
        assert ({latest.checkpoint_id}, latest.parts) == (again, 3)


@pytest.mark.long
def test_workers_ride_through_an_absence_and_say_so_once(
    own_coordinator: LocalCoordinator, own_view: JobView
) -> None:
    with remote_workers(2, own_coordinator) as workers:
        generation = own_view.status.generation
        wait = workers[0].barrier("step", timeout_ms=8000)
        eventually(lambda: own_view.waiting("step") == 1)
        own_coordinator.kill()
        eventually(lambda: all(worker.events("coordinator.unreachable") for worker in workers))
        let_pass(9.0)
        assert not wait.done(), "time during which the coordinator is away must not count"
        own_coordinator.start()
        workers[1].barrier("step").result(60)
        wait.result(60)
        eventually(lambda: all(worker.events("coordinator.back") for worker in workers))
        for worker in workers:
            away, back = worker.events("coordinator.unreachable"), worker.events("coordinator.back")
            assert (len(away), len(back)) == (1, 1)
            assert away[0]["level"] == "warning"
            assert away[0]["url"] == own_coordinator.url
            assert back[0]["away_seconds"] >= 8
        assert own_view.status.generation == generation


@pytest.mark.long
def test_absent_coordinator_is_tried_ever_less_often(
    own_coordinator: LocalCoordinator, own_view: JobView
) -> None:
    with TcpProxy(own_coordinator.url) as proxy, remote_workers(1, proxy.url) as (worker,):
        own_coordinator.kill()
        eventually(lambda: worker.events("coordinator.unreachable"))
        proxy.accepted = 0
        let_pass(2.5)
        assert proxy.accepted <= 25
        eventually(lambda: proxy.accepted >= 2)
        own_coordinator.start()
        worker.barrier("step").result(60)


def test_worker_started_before_its_coordinator_waits_for_it(
    own_coordinator: LocalCoordinator,
) -> None:
    own_coordinator.stop()
    with RemoteWorker(own_coordinator.url) as worker:
        registration = worker.begin("register")
        eventually(lambda: worker.events("coordinator.unreachable"))
        own_coordinator.start()
        assert registration.result(60) == "worker-0"


def test_coordinator_that_never_comes_is_a_connection_error_that_says_what_to_check(
    own_coordinator: LocalCoordinator,
) -> None:
    own_coordinator.stop()
    config = WorkerConfig(coordinator_url=own_coordinator.url, connect_timeout_ms=500)
    with pytest.raises(ConnectionError) as caught:
        TrainingOrchestrator(config).register()
    for part in (own_coordinator.url, "strata doctor", "COORDINATOR_URL"):
        assert part in str(caught.value)


@pytest.mark.deaths
def test_worker_that_died_while_the_coordinator_was_away_is_noticed_afterwards(
    own_coordinator: LocalCoordinator, own_view: JobView
) -> None:
    with remote_workers(2, own_coordinator) as (survivor, victim):
        wait = survivor.barrier("step")
        eventually(lambda: own_view.waiting("step") == 1)
        own_coordinator.kill()
        victim.kill()
        own_coordinator.start()
        with pytest.raises(SyncError) as caught:
            wait.result(60)
        assert caught.value.reason == "membership_changed"
        assert caught.value.survivors == (0,)


@pytest.mark.deaths
def test_coordinator_that_hung_declares_nobody_dead(
    own_coordinator: LocalCoordinator, own_view: JobView
) -> None:
    with remote_workers(3, own_coordinator) as workers:
        generation = own_view.status.generation
        waits = [worker.barrier("step") for worker in workers[:2]]
        eventually(lambda: own_view.waiting("step") == 2)
        own_coordinator.send_signal(signal.SIGSTOP)
        let_pass(5.0)
        own_coordinator.send_signal(signal.SIGCONT)
        waits.append(workers[2].barrier("step"))
        for wait in waits:
            wait.result(60)
        let_pass(3.2)
        assert own_view.status.live_workers == 3
        assert own_view.status.generation == generation
        with RawClient(own_coordinator.url) as client:
            assert "coordinator.stalled" in [event.kind for event in client.events()]


def test_restarts_are_counted_and_the_journal_goes_on(own_coordinator: LocalCoordinator) -> None:
    with RawClient(own_coordinator.url) as client:
        client.register()
        own_coordinator.stop()
        own_coordinator.start()
        client.register()
        assert client.call("GetServerInfo").term == 2
        events = list(client.events())
        assert [event.kind for event in events].count("worker.registered") == 2
        assert [event.id for event in events] == list(range(1, len(events) + 1))


@pytest.mark.long
def test_second_restart_in_a_row_loses_nothing(own_coordinator: LocalCoordinator) -> None:
    with remote_workers(2, own_coordinator) as workers:
        for _ in range(2):
            waits = [workers[0].barrier("step")]
            restart(own_coordinator)
            waits.append(workers[1].barrier("step"))
            for wait in waits:
                wait.result(60)


@pytest.mark.long
def test_history_of_a_quiet_job_outlives_the_flood_of_another_and_a_restart(
    own_coordinator: LocalCoordinator, own_view: JobView
) -> None:
    """Two processes that take one rank from each other register without an end."""
    with RawClient(own_coordinator.url, "quiet") as raw:
        raw.register().leave()
    quiet = own_view.observer.events("quiet")
    assert [event.kind for event in quiet] == ["worker.registered", "worker.left"]
    with RawClient(own_coordinator.url, "loud") as raw:
        request = pb.WorkerInfo(job="loud", rank=0)
        for call in [raw.begin("RegisterWorker", request, 60) for _ in range(5500)]:
            call.result(60)
    assert own_view.observer.events("quiet") == quiet
    assert len(own_view.observer.events("loud")) == 10_000
    own_coordinator.kill()
    own_coordinator.start()
    assert own_view.observer.events("quiet") == quiet
    assert len(own_view.observer.events("loud")) <= 10_000
