"""Every field of every request is checked by the service, whatever client sends it."""

from typing import Any

import grpc
import pytest

from dtruntime.rpc.gen import coordinator_pb2 as pb
from dtruntime.rpc.methods import METHODS
from tests.support.raw_client import RawClient, Refusal

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
FENCED = grpc.StatusCode.FAILED_PRECONDITION
TOO_MUCH = grpc.StatusCode.RESOURCE_EXHAUSTED

BAD_IDS = ["", "../etc/passwd", "a..b", "-dash-first", "line\nbreak", "nul\0", "ünïcode", "x" * 201]

UNARY = sorted(name for name, method in METHODS.items() if not method.streams)


def refused(call: Any, *args: Any, **kwargs: Any) -> Refusal:
    with pytest.raises(Refusal) as caught:
        call(*args, **kwargs)
    return caught.value


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        *[({"worker_id": bad}, "worker id") for bad in BAD_IDS if bad],
        *[({"session": bad}, "session") for bad in BAD_IDS if bad],
        *[({"job": bad}, "job") for bad in BAD_IDS if bad],
        ({"rank": 2**32 - 1}, "rank"),
        ({"rank": 65536}, "rank"),
        ({"rank": 4, "world_size": 4}, "rank 4"),
        ({"world_size": 65537}, "world_size"),
        ({"port": 65536}, "port"),
        ({"gpu_count": 1025}, "gpu_count"),
        ({"memory_bytes": 2**63}, "memory_bytes"),
        ({"hostname": "h" * 513}, "hostname"),
        ({"hostname": "bell\a"}, "hostname"),
        ({"process": "p" * 513}, "process"),
        ({"metadata": {f"k{n}": "" for n in range(65)}}, "metadata"),
        ({"metadata": {"": "x"}}, "metadata"),
        ({"metadata": {"k" * 129: "x"}}, "metadata"),
        ({"metadata": {"k": "v" * 4097}}, "metadata"),
    ],
)
def test_bad_registration_is_refused(
    service: RawClient, fields: dict[str, Any], named: str
) -> None:
    refusal = refused(service.call, "RegisterWorker", **fields)
    assert (refusal.code, refusal.reason) == (INVALID, "invalid")
    assert named in refusal.message


def test_largest_registration_is_accepted(service: RawClient) -> None:
    worker = service.register(
        worker_id="w" * 200,
        session="s" * 200,
        rank=65535,
        port=65535,
        gpu_count=1024,
        memory_bytes=2**63 - 1,
        hostname="h" * 512,
        process="p" * 512,
        metadata={f"{n:0128}": "v" * 4096 for n in range(64)},
    )
    assert worker.rank == 65535
    status = service.call("GetStatus", worker_id=worker.worker_id).workers[0]
    assert status.memory_bytes == 2**63 - 1
    assert len(status.metadata) == 64


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        *[({"dataset_id": bad}, "dataset") for bad in BAD_IDS],
        ({"job": "../x"}, "job"),
        ({"total_samples": 0}, "total_samples"),
        ({"total_samples": 2**63}, "total_samples"),
        ({"shard_size": 0}, "shard_size"),
        ({"total_samples": 10**12, "shard_size": 1}, "shards"),
        ({"format": "pickle"}, "format"),
        ({"path": "p" * 4097}, "path"),
        ({"path": "/a\nb"}, "path"),
        ({"metadata": {"k": "v" * 4097}}, "metadata"),
    ],
)
def test_bad_dataset_is_refused(service: RawClient, fields: dict[str, Any], named: str) -> None:
    good = {"dataset_id": "d", "total_samples": 100, "shard_size": 10, "format": "csv"}
    refusal = refused(service.call, "RegisterDataset", **{**good, **fields})
    assert (refusal.code, refusal.reason) == (INVALID, "invalid")
    assert named in refusal.message


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        *[({"checkpoint_id": bad}, "checkpoint") for bad in BAD_IDS],
        ({"worker_id": "../x"}, "worker id"),
        ({"incarnation": 0}, "incarnation"),
        ({"step": 2**63}, "step"),
        ({"epoch": 2**63}, "epoch"),
        ({"size_bytes": 2**63}, "size_bytes"),
        ({"path": "p" * 4097}, "path"),
        ({"metadata": {"": "x"}}, "metadata"),
        ({"partial": True, "generation": 0}, "generation"),
    ],
)
def test_bad_checkpoint_is_refused(service: RawClient, fields: dict[str, Any], named: str) -> None:
    good = {"checkpoint_id": "c", "step": 1, **service.register().identity}
    refusal = refused(service.call, "NotifyCheckpoint", **{**good, **fields})
    assert (refusal.code, refusal.reason) == (INVALID, "invalid")
    assert named in refusal.message
    assert not service.call("ListCheckpoints").checkpoints


@pytest.mark.parametrize(
    ("fields", "named"),
    [({"ticket": 0}, "ticket"), ({"incarnation": 0}, "incarnation"), ({"step": 2**63}, "step")],
)
def test_bad_beginning_is_refused(service: RawClient, fields: dict[str, Any], named: str) -> None:
    good = {"step": 1, "ticket": 1, **service.register().identity}
    refusal = refused(service.call, "BeginCheckpoint", **{**good, **fields})
    assert (refusal.code, refusal.reason) == (INVALID, "invalid")
    assert named in refusal.message


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        *[({"barrier_id": bad}, "barrier") for bad in BAD_IDS],
        ({"incarnation": 0}, "incarnation"),
    ],
)
def test_bad_arrival_is_refused(service: RawClient, fields: dict[str, Any], named: str) -> None:
    good = {"barrier_id": "b", **service.register().identity}
    refusal = refused(service.call, "WaitBarrier", **{**good, **fields})
    assert (refusal.code, refusal.reason) == (INVALID, "invalid")
    assert named in refusal.message
    assert not service.call("GetStatus").barriers


@pytest.mark.parametrize(
    "fields",
    [
        {"state": 99},
        {"step": 2**63},
        {"epoch": 2**63},
        {"metrics": {"m" * 20_000: 1.0}},
        {"metrics": {f"metric-{n}": 1.0 for n in range(2000)}},
        {"resources": {"gpus": [{"index": n, "memory_total_bytes": 2**40} for n in range(2000)]}},
    ],
    ids=["state", "step", "epoch", "long metric", "many metrics", "many GPUs"],
)
def test_bad_heartbeat_is_refused(service: RawClient, fields: dict[str, Any]) -> None:
    worker = service.register()
    assert refused(worker.heartbeat, **fields).code == INVALID
    assert worker.heartbeat().live_workers == 1


@pytest.mark.parametrize(
    ("method", "fields"),
    [
        ("Heartbeat", {}),
        ("DeregisterWorker", {}),
        ("WaitBarrier", {"barrier_id": "b"}),
        ("BeginCheckpoint", {"step": 1, "ticket": 1}),
        ("NotifyCheckpoint", {"checkpoint_id": "c"}),
    ],
)
@pytest.mark.parametrize(
    "identity",
    [
        {"worker_id": "worker-0", "incarnation": 999},
        {"worker_id": "worker-7", "incarnation": 1},
        {"worker_id": "worker-0", "incarnation": 1, "job": "no such job"},
    ],
    ids=["incarnation", "worker", "job"],
)
def test_stranger_is_fenced_out_of_every_call_of_members(
    service: RawClient, method: str, fields: dict[str, Any], identity: dict[str, Any]
) -> None:
    service.register()
    refusal = refused(service.call, method, **fields, **identity)
    assert refusal.code == FENCED
    assert refusal.reason in ("superseded", "unknown_worker")
    assert identity["worker_id"] in refusal.message


@pytest.mark.parametrize(
    ("method", "fields", "reason"),
    [
        ("GetDataShard", {"dataset_id": "d", "worker_id": "nobody"}, "unknown_rank"),
        ("GetDataShard", {"dataset_id": "none", "worker_id": "worker-0"}, "unknown_dataset"),
        ("GetDataShard", {"dataset_id": "d", "worker_id": "worker-0", "index": 10}, "unknown_rank"),
        ("GetDataShard", {"dataset_id": "d", "worker_id": "worker-0", "job": "x"}, "unknown_job"),
        ("ListShards", {"dataset_id": "none", "rank": 0}, "unknown_dataset"),
        ("ListShards", {"dataset_id": "d", "rank": 1}, "unknown_rank"),
        ("ListShards", {"dataset_id": "d", "worker_id": "nobody"}, "unknown_rank"),
        ("ListFiles", {"dataset_id": "none", "rank": 0}, "unknown_dataset"),
        ("ListFiles", {"dataset_id": "d", "rank": 1}, "unknown_rank"),
        ("ListFiles", {"dataset_id": "d", "worker_id": "nobody"}, "unknown_rank"),
        ("GetStatus", {"job": "no such job"}, "unknown_job"),
        ("ListDatasets", {"job": "no such job"}, "unknown_job"),
        ("ListCheckpoints", {"job": "no such job"}, "unknown_job"),
    ],
)
def test_what_does_not_exist_is_not_found(
    service: RawClient, method: str, fields: dict[str, Any], reason: str
) -> None:
    service.register()
    service.call("RegisterDataset", dataset_id="d", total_samples=100, shard_size=10)
    refusal = refused(service.call, method, **fields)
    assert (refusal.code, refusal.reason) == (NOT_FOUND, reason)


def test_shards_of_nobody_in_particular_are_refused(service: RawClient) -> None:
    service.call("RegisterDataset", dataset_id="d", total_samples=100, shard_size=10)
    assert refused(service.call, "ListShards", dataset_id="d").code == INVALID
    assert refused(service.call, "ListFiles", dataset_id="d").code == INVALID


@pytest.mark.parametrize("method", UNARY)
def test_garbage_instead_of_a_message_is_an_invalid_argument(
    service: RawClient, method: str
) -> None:
    refusal = refused(service.call_bytes, method, b"\xff\xff\xff\xff not a message")
    assert refusal.code == INVALID
    assert refusal.reason == "invalid"


def test_garbage_instead_of_a_watch_request_is_an_invalid_argument(service: RawClient) -> None:
    assert refused(service.call_bytes, "WatchEvents", b"\xff\xff\xff").code == INVALID


@pytest.mark.parametrize("method", ["RegisterWorker", "Heartbeat", "GetStatus"])
def test_request_that_is_too_large_is_refused(service: RawClient, method: str) -> None:
    refusal = refused(service.call_bytes, method, b"\x0a" * (5 * 1024 * 1024))
    assert refusal.code == TOO_MUCH
    assert str(4 * 1024 * 1024) in refusal.message
    assert service.register().rank == 0, "the connection is still good"


@pytest.mark.parametrize(
    ("method", "fields"),
    [
        ("Heartbeat", {"worker_id": "w" * 100_000, "incarnation": 1}),
        ("Heartbeat", {"job": "j" * 100_000, "worker_id": "w", "incarnation": 1}),
        ("WaitBarrier", {"worker_id": "w" * 100_000, "incarnation": 1, "barrier_id": "b"}),
        ("WaitBarrier", {"barrier_id": "b" * 100_000, "worker_id": "w", "incarnation": 1}),
        ("DeregisterWorker", {"worker_id": "w" * 100_000, "incarnation": 1}),
        ("GetDataShard", {"job": "j" * 100_000}),
        ("GetDataShard", {"worker_id": "w" * 100_000, "dataset_id": "d"}),
        ("GetDataShard", {"worker_id": "worker-0", "dataset_id": "d" * 100_000}),
        ("ListShards", {"worker_id": "w" * 100_000, "dataset_id": "d"}),
        ("ListShards", {"dataset_id": "d" * 100_000, "rank": 0}),
        ("ListFiles", {"dataset_id": "d" * 100_000, "rank": 0}),
        ("GetStatus", {"worker_id": "w" * 100_000}),
        ("RegisterDataset", {"dataset_id": "d" * 100_000}),
        ("RegisterDataset", {"dataset_id": "d" * 100_000, "total_samples": 1}),
        (
            "RegisterDataset",
            {"dataset_id": "d" * 100_000, "total_samples": 1, "shard_size": 1, "format": "x"},
        ),
    ],
)
def test_huge_name_is_not_echoed(service: RawClient, method: str, fields: dict[str, Any]) -> None:
    service.register()
    refusal = refused(service.call, method, **fields)
    assert refusal.code in (INVALID, NOT_FOUND, FENCED)
    assert refusal.reason
    assert len(refusal.message) < 2000


def test_message_with_odd_characters_reaches_the_client(service: RawClient) -> None:
    service.register()
    refusal = refused(service.call, "Heartbeat", worker_id="wörker % 1\n", incarnation=1)
    assert refusal.code in (INVALID, FENCED)
    assert "w" in refusal.message


def test_unknown_method_is_unimplemented(service: RawClient) -> None:
    call = service.channel.unary_unary("/strata.v1.CoordinatorService/NoSuchMethod")
    with pytest.raises(grpc.RpcError) as caught:
        call(b"", timeout=10)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_timeout_beyond_a_day_is_cut_and_not_refused(service: RawClient) -> None:
    first, second = service.workers(2, world_size=2)
    wait = first.arrive("b", timeout_ms=2**64 - 1)
    assert second.arrive("b").result().outcome == pb.BARRIER_OUTCOME_COMPLETED
    assert wait.result().outcome == pb.BARRIER_OUTCOME_COMPLETED
