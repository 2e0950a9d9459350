"""What the service tells about itself: metrics, health, reflection, events, status pages."""

from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from dtruntime.client.observer import Observer
from dtruntime.rpc.gen import coordinator_pb2 as pb
from dtruntime.rpc.methods import METHODS, SERVICE
from dtruntime.testing import eventually
from tests.support.raw_client import RawClient, Refusal


def metrics_of(client: RawClient, method: str) -> pb.MethodMetrics:
    return next(m for m in client.call("GetServerInfo").methods if m.method == method)


def test_metrics_count_calls_and_errors_per_method(service: RawClient) -> None:
    worker = service.register()
    before = metrics_of(service, "Heartbeat")
    for _ in range(5):
        worker.heartbeat()
    for _ in range(2):
        with pytest.raises(Refusal):
            service.call("Heartbeat", worker_id="nobody", incarnation=1)
    after = metrics_of(service, "Heartbeat")
    assert after.calls - before.calls == 7
    assert after.errors - before.errors == 2
    assert sum(after.bucket_counts) == after.calls
    assert len(after.bucket_counts) == len(after.bucket_bounds) + 1
    assert 0 < after.p50_seconds <= after.p99_seconds
    assert after.total_seconds > before.total_seconds


def test_metrics_count_requests_that_never_reach_the_handler(service: RawClient) -> None:
    before = metrics_of(service, "RegisterWorker")
    with pytest.raises(Refusal):
        service.call_bytes("RegisterWorker", b"\xff\xff\xff")
    after = metrics_of(service, "RegisterWorker")
    assert (after.calls - before.calls, after.errors - before.errors) == (1, 1)


def test_held_calls_are_measured_until_their_answer(service: RawClient) -> None:
    before = metrics_of(service, "WaitBarrier")
    first, second = service.workers(2, world_size=2)
    wait = first.arrive("step")
    second.arrive("step").result()
    wait.result()
    assert metrics_of(service, "WaitBarrier").calls - before.calls == 2


def test_server_info_names_version_transport_and_timing(
    service: RawClient, request: pytest.FixtureRequest
) -> None:
    info = service.call("GetServerInfo")
    assert info.version
    assert info.transport in request.node.name
    assert (info.heartbeat_interval_ms, info.heartbeat_timeout_ms) == (1000, 60_000)
    assert info.term == 1
    assert info.started_at < info.now
    assert {m.method for m in info.methods} == set(METHODS)


@pytest.mark.parametrize("name", ["", SERVICE])
def test_health_service_says_serving(service: RawClient, name: str) -> None:
    health: Any = health_pb2_grpc.HealthStub(service.channel)
    reply = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_health_of_an_unknown_service_is_not_found(service: RawClient) -> None:
    health: Any = health_pb2_grpc.HealthStub(service.channel)
    with pytest.raises(grpc.RpcError) as caught:
        health.Check(health_pb2.HealthCheckRequest(service="nothing"), timeout=10)
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("version", ["v1alpha", "v1"])
def test_reflection_lists_every_service_and_describes_it(service: RawClient, version: str) -> None:
    def ask(*requests: dict[str, Any]) -> list[reflection_pb2.ServerReflectionResponse]:
        call = service.channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        made = [reflection_pb2.ServerReflectionRequest(**fields) for fields in requests]
        return list(call(iter(made), timeout=10))

    (listed,) = ask({"list_services": ""})
    names = {found.name for found in listed.list_services_response.service}
    assert names == {
        SERVICE,
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
        "grpc.reflection.v1.ServerReflection",
    }
    for described in ask(*({"file_containing_symbol": name} for name in names)):
        assert described.file_descriptor_response.file_descriptor_proto, described


def test_watch_gives_kept_events_then_new_ones(service: RawClient) -> None:
    first = service.register()
    stream = service.watch(follow=True)
    kept = next(stream)
    assert (kept.kind, kept.fields["worker"], kept.job) == (
        "worker.registered",
        "worker-0",
        service.job,
    )
    first.commit("c-1", 1).result()
    assert next(stream).kind == "checkpoint.committed"
    first.leave("done")
    left = next(stream)
    assert (left.kind, left.fields["reason"]) == ("worker.left", "done")
    stream.cancel()


def test_watch_goes_on_after_the_last_event_seen(service: RawClient) -> None:
    service.workers(3)
    events = list(service.watch())
    assert [event.fields["worker"] for event in events] == ["worker-0", "worker-1", "worker-2"]
    assert list(service.watch(after_id=events[1].id)) == events[2:]
    assert list(service.watch(after_id=events[2].id)) == []
    assert list(service.watch(after_id=2**63)) == []


def test_watch_of_one_job_shows_no_other(service: RawClient) -> None:
    service.register()
    other = RawClient.__new__(RawClient)
    other.__dict__ = {**service.__dict__, "job": f"{service.job}-other"}
    other.register()
    assert [event.job for event in service.watch()] == [service.job]
    everything = service.stub("WatchEvents")(pb.WatchRequest(), timeout=10)
    assert {event.job for event in everything} >= {service.job, other.job}


def test_many_watchers_see_the_same_events(service: RawClient) -> None:
    streams = [service.watch(follow=True) for _ in range(10)]
    service.workers(3)
    for stream in streams:
        assert [next(stream).fields["rank"] for _ in range(3)] == ["0", "1", "2"]
        stream.cancel()


def test_status_is_paged_in_rank_order(service: RawClient) -> None:
    service.workers(7)
    seen: list[int] = []
    next_rank = 0
    pages = 0
    while pages == 0 or next_rank:
        page = service.call("GetStatus", from_rank=next_rank, limit=3)
        assert page.live_workers == 7
        seen += [worker.rank for worker in page.workers]
        next_rank, pages = page.next_rank, pages + 1
    assert seen == list(range(7))
    assert pages == 3
    assert not service.call("GetStatus", from_rank=100).workers


def test_status_of_a_fixed_world_shows_ranks_that_are_expected(service: RawClient) -> None:
    service.register(world_size=3, rank=1)
    workers = service.call("GetStatus").workers
    assert [(w.worker_id, w.membership) for w in workers] == [
        ("worker-0", pb.MEMBERSHIP_EXPECTED),
        ("worker-1", pb.MEMBERSHIP_LIVE),
        ("worker-2", pb.MEMBERSHIP_EXPECTED),
    ]


def test_status_shows_open_barriers_and_who_is_missing(service: RawClient) -> None:
    first, second = service.workers(2, world_size=2)
    second.heartbeat(step=41)
    wait = first.arrive("step")
    barrier = eventually(lambda: service.call("GetStatus").barriers)[0]
    assert (barrier.barrier_id, barrier.round) == ("step", 1)
    assert (barrier.arrived, barrier.expected) == (1, 2)
    missing = barrier.missing[0]
    assert (missing.worker_id, missing.last_step, missing.registered) == ("worker-1", 41, True)
    second.arrive("step").result()
    wait.result()
    assert not service.call("GetStatus").barriers


def test_epochs_are_complete_when_everybody_is_past_them(service: RawClient) -> None:
    first, second = service.workers(2, world_size=2)
    first.heartbeat(epoch=2)
    second.heartbeat(epoch=1)
    status = service.call("GetStatus")
    assert (status.epoch, status.completed_epochs) == (2, 1)


def test_observer_sees_jobs_and_whole_statuses(service: RawClient, service_url: str) -> None:
    service.workers(3)
    with Observer(service_url) as observer:
        assert service.job in observer.jobs()
        status = observer.status(service.job)
        assert [worker.rank for worker in status.workers] == [0, 1, 2]
        assert observer.server_info().version
        assert [event.kind for event in observer.events(service.job)] == ["worker.registered"] * 3
