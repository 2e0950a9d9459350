"""Callers that ask too often are told when to come back, and nothing else happens to them."""

from collections.abc import Callable, Iterator

import grpc
import psutil
import pytest

from benchmarks.coordinator.raw_http2 import RawHttp2Client
from dtruntime import TrainingOrchestrator
from dtruntime.coordinator.queries import ANSWERS_WAITING
from dtruntime.rpc.gen import coordinator_pb2 as pb
from dtruntime.testing import LocalCoordinator, eventually
from tests.support.coordinators import TRANSPORTS, StartCoordinator
from tests.support.raw_client import HeldCall, RawClient, RawWorker, Refusal

RATE = 10.0
BURST = 40


@pytest.fixture(scope="module", params=TRANSPORTS)
def strict(request: pytest.FixtureRequest) -> Iterator[LocalCoordinator]:
    """A coordinator that lets a worker make ten calls a second, forty at once."""
    with LocalCoordinator(
        heartbeat_timeout_ms=60_000,
        options=["--transport", request.param],
        settings={"worker_rate_limit": RATE},
    ) as coordinator:
        yield coordinator


def calls_until_refused(call: Callable[[], object]) -> tuple[int, Refusal]:
    for count in range(10 * BURST):
        try:
            call()
        except Refusal as refusal:
            return count, refusal
    raise AssertionError("never refused")


def barrier_calls(coordinator: LocalCoordinator, job: str) -> pb.MethodMetrics:
    with RawClient(coordinator.url, job) as client:
        methods = client.call("GetServerInfo").methods
    return next(m for m in methods if m.method == "WaitBarrier")


def test_worker_that_calls_too_often_is_told_when_to_come_back(
    strict: LocalCoordinator, job: str
) -> None:
    with RawClient(strict.url, job) as client:
        worker, other = client.workers(2)
        accepted, refusal = calls_until_refused(worker.heartbeat)
        assert accepted >= BURST
        assert refusal.code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refusal.reason == "rate_limited"
        assert 1 <= int(refusal.trailing["retry-after-ms"]) <= 1000 / RATE
        assert worker.worker_id in refusal.message
        assert "worker_rate_limit" in refusal.message
        assert other.heartbeat().live_workers == 2, "the others are not held back"


def test_sdk_waits_as_it_is_told_and_succeeds(strict: LocalCoordinator, job: str) -> None:
    with TrainingOrchestrator(coordinator_url=strict.url, job=job) as orchestrator:
        orchestrator.register()
        before = barrier_calls(strict, job)
        for _ in range(BURST + 15):
            orchestrator.barrier("step")
        after = barrier_calls(strict, job)
        assert after.errors > before.errors
        assert after.calls - after.errors == before.calls - before.errors + BURST + 15


@pytest.fixture
def spent(start_coordinator: StartCoordinator) -> Iterator[RawWorker]:
    """A worker that has made its one call of these twenty seconds."""
    coordinator = start_coordinator(
        heartbeat_timeout_ms=60_000, settings={"worker_rate_limit": 0.05}
    )
    with RawClient(coordinator.url) as client:
        worker, _ = client.workers(2, world_size=2)
        calls_until_refused(worker.heartbeat)
        yield worker


def test_refused_arrival_does_not_count(spent: RawWorker) -> None:
    for _ in range(3):
        with pytest.raises(Refusal, match="worker_rate_limit"):
            spent.arrive("step", timeout_ms=60_000).result()
    assert not spent.client.call("GetStatus").barriers


def test_refused_heartbeat_changes_nothing(spent: RawWorker) -> None:
    with pytest.raises(Refusal, match="worker_rate_limit"):
        spent.heartbeat(epoch=3, step=7)
    status = spent.client.call("GetStatus")
    assert (status.epoch, status.workers[0].step) == (0, 0)


def test_address_that_calls_too_often_is_told_when_to_come_back(
    start_coordinator: StartCoordinator,
) -> None:
    coordinator = start_coordinator(settings={"peer_rate_limit": 20})
    with RawClient(coordinator.url) as client:
        accepted, refusal = calls_until_refused(lambda: client.call("ListJobs"))
        assert accepted >= 40
        assert refusal.reason == "rate_limited"
        assert "127.0.0.1" in refusal.message
        assert int(refusal.trailing["retry-after-ms"]) >= 1


def test_size_limit_of_requests_can_be_configured(start_coordinator: StartCoordinator) -> None:
    coordinator = start_coordinator(settings={"max_request_bytes": 1000})
    with RawClient(coordinator.url) as client:
        client.register(metadata={"k": "v" * 500})
        with pytest.raises(Refusal, match="1000") as caught:
            client.register(metadata={"k": "v" * 1500})
        assert caught.value.code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert caught.value.reason == "request_too_large"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_registering_a_dataset_has_a_size_limit_of_its_own(
    start_coordinator: StartCoordinator, transport: str
) -> None:
    settings = {"max_request_bytes": 1000, "max_dataset_bytes": 5000}
    coordinator = start_coordinator(settings=settings, options=["--transport", transport])
    dataset = {"dataset_id": "d", "total_samples": 100, "shard_size": 10}
    with RawClient(coordinator.url) as client:
        client.call("RegisterDataset", **dataset, metadata={"k": "v" * 4000})
        for size, call in (
            (1000, lambda: client.register(metadata={"k": "v" * 2000})),
            (5000, lambda: client.call("RegisterDataset", **dataset, path="p" * 6000)),
        ):
            with pytest.raises(Refusal) as caught:
                call()
            assert caught.value.code == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert str(size) in caught.value.message


def test_size_of_a_fixed_world_is_limited(start_coordinator: StartCoordinator) -> None:
    coordinator = start_coordinator(settings={"max_workers_per_job": 2})
    with RawClient(coordinator.url) as client:
        with pytest.raises(Refusal, match="world_size 3 is more than 2") as caught:
            client.register(world_size=3)
        assert caught.value.code == grpc.StatusCode.INVALID_ARGUMENT


def test_number_of_workers_in_an_elastic_world_is_limited(
    start_coordinator: StartCoordinator,
) -> None:
    coordinator = start_coordinator(settings={"max_workers_per_job": 2})
    with RawClient(coordinator.url) as client:
        client.workers(2)
        with pytest.raises(Refusal) as caught:
            client.register()
        assert caught.value.reason == "job_full"


ANSWER = 4 * 2**20
UNREAD = 100


def register_large(client: RawClient) -> pb.DatasetRequest:
    """A dataset whose description is large; returns the request for it."""
    layout = pb.DatasetLayout(
        fingerprint="f",
        shard_samples=[1],
        shard_bytes=[1],
        root="/data/",
        files=["a.parquet"],
        file_samples=[1],
        total_bytes=1,
    )
    client.call(
        "RegisterDataset",
        pb.DatasetInfo(
            dataset_id="large",
            path="/data",
            format="parquet",
            total_samples=1,
            shard_size=1,
            layout=layout,
            index=bytes(ANSWER - 1024),
        ),
    )
    return pb.DatasetRequest(dataset_id="large", full=True)


def descriptions_answered(client: RawClient) -> int:
    methods = client.call("GetServerInfo").methods
    return int(next(m.calls for m in methods if m.method == "GetDataset"))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_answers_that_nobody_reads_are_bounded(
    start_coordinator: StartCoordinator, transport: str
) -> None:
    coordinator = start_coordinator(options=["--transport", transport])
    memory = psutil.Process(coordinator.pid).memory_info
    with RawClient(coordinator.url) as client:
        request = register_large(client)
        assert len(client.call("GetDataset", request).dataset.index) == ANSWER - 1024
        before = memory().rss
        with RawHttp2Client(coordinator.url) as unreading:
            for _ in range(UNREAD):
                stream = unreading.ask("GetDataset", request)
            eventually(
                lambda: descriptions_answered(client) > UNREAD, what="all calls are answered"
            )
            grown = memory().rss - before
            assert grown < UNREAD * ANSWER / 3, f"{grown / 2**20:.0f} MiB for unread answers"
            assert client.call("GetDataset", request).found, "others are answered"
            unreading.cancel(stream)
        with RawClient(coordinator.url) as another:
            for _ in range(20):
                assert another.call("GetDataset", request).found


def test_dataset_of_too_many_shards_is_refused(coordinator: LocalCoordinator, job: str) -> None:
    with RawClient(coordinator.url, job) as client, pytest.raises(Refusal, match="shard_size"):
        client.call("RegisterDataset", dataset_id="d", total_samples=10**8, shard_size=1)


def test_long_dealing_is_computed_while_others_are_answered(
    coordinator: LocalCoordinator, job: str
) -> None:
    with RawClient(coordinator.url, job) as client:
        worker = client.register()
        client.call(
            "RegisterDataset", dataset_id="d", total_samples=5_000_000, shard_size=1, shuffle=True
        )
        request = pb.ShardRequest(dataset_id="d", **worker.identity)
        long = [client.begin("GetDataShard", request) for _ in range(ANSWERS_WAITING + 8)]
        answered = 0
        while not all(call.done() for call in long):
            worker.heartbeat()
            answered += 1
        assert answered > 10, "heartbeats are answered meanwhile"
        refused = [call for call in long if failed_with(call) == "rate_limited"]
        assert 1 <= len(refused) <= 8
        listed = pb.ShardListRequest(dataset_id="d", **worker.identity)
        with pytest.raises(Refusal, match="an answer lists at most"):
            client.call("ListShards", listed)


def failed_with(call: HeldCall) -> str:
    try:
        assert call.result().shard_count == 5_000_000
    except Refusal as refusal:
        return refusal.reason
    return ""
