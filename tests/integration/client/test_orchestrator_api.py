"""The orchestrator as users hold it: constructors, both faces, context managers, arguments."""

import asyncio
import inspect
import socket
from collections.abc import Callable
from typing import Any

import pytest

from dtruntime import DatasetRegistry, TrainingOrchestrator, WorkerConfig
from dtruntime.errors import ConfigError, ShardError, StrataError
from dtruntime.testing import LocalCoordinator, eventually
from dtruntime.types import Membership, WorkerState
from tests.support.coordinators import JobView
from tests.support.raw_client import RawClient

NOWHERE = "http://127.0.0.1:1"


def by_config(url: str, job: str, monkeypatch: pytest.MonkeyPatch) -> TrainingOrchestrator:
    return TrainingOrchestrator(
        WorkerConfig(coordinator_url=url, gpu_count=8, heartbeat_interval_ms=500, job=job)
    )


def by_arguments(url: str, job: str, monkeypatch: pytest.MonkeyPatch) -> TrainingOrchestrator:
    return TrainingOrchestrator(
        worker_id="worker-0", coordinator_url=url, world_size=1, rank=0, job=job
    )


def by_position(url: str, job: str, monkeypatch: pytest.MonkeyPatch) -> TrainingOrchestrator:
    return TrainingOrchestrator("worker-0", url, 1, 0, job=job)


def by_environment(url: str, job: str, monkeypatch: pytest.MonkeyPatch) -> TrainingOrchestrator:
    monkeypatch.setenv("COORDINATOR_URL", url)
    monkeypatch.setenv("STRATA_JOB", job)
    return TrainingOrchestrator()


STYLES = [by_config, by_arguments, by_position, by_environment]
Style = Callable[[str, str, pytest.MonkeyPatch], TrainingOrchestrator]


@pytest.mark.parametrize("style", STYLES)
def test_every_style_of_constructor_works_synchronously(
    coordinator: LocalCoordinator,
    job: str,
    view: JobView,
    monkeypatch: pytest.MonkeyPatch,
    style: Style,
) -> None:
    with style(coordinator.url, job, monkeypatch) as orchestrator:
        assert orchestrator.register() == "worker-0"
        orchestrator.barrier("start")
        status = orchestrator.get_status()
        assert (status.worker_id, status.rank) == ("worker-0", 0)
        assert status.membership == Membership.LIVE
    assert view.status.workers[0].membership == Membership.LEFT
    assert not orchestrator.is_registered


@pytest.mark.parametrize("style", STYLES)
async def test_every_style_of_constructor_works_asynchronously(
    coordinator: LocalCoordinator,
    job: str,
    view: JobView,
    monkeypatch: pytest.MonkeyPatch,
    style: Style,
) -> None:
    async with style(coordinator.url, job, monkeypatch) as orchestrator:
        assert await orchestrator.register_worker(ip="127.0.0.1", port=8080) == "worker-0"
        await orchestrator.wait_barrier("start")
        await orchestrator.heartbeat()
        assert (await orchestrator.get_status_async()).port == 8080
    status = await view.observer.status_async(job)
    assert status.workers[0].membership == Membership.LEFT


def test_block_that_raises_says_so_and_deregisters(
    coordinator: LocalCoordinator, job: str, view: JobView
) -> None:
    def fail() -> None:
        with TrainingOrchestrator(coordinator_url=coordinator.url, job=job) as orchestrator:
            orchestrator.register()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    worker = view.status.workers[0]
    assert (worker.membership, worker.detail) == (Membership.LEFT, "failed: ZeroDivisionError")


def test_coordinator_that_is_gone_does_not_hide_the_error_of_a_block(
    own_coordinator: LocalCoordinator,
) -> None:
    def fail() -> None:
        with TrainingOrchestrator(coordinator_url=own_coordinator.url) as orchestrator:
            orchestrator.register()
            own_coordinator.kill()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()


def test_leaving_a_block_without_having_registered_needs_no_coordinator() -> None:
    with TrainingOrchestrator(coordinator_url=NOWHERE):
        pass


async def test_both_faces_can_be_mixed(coordinator: LocalCoordinator, job: str) -> None:
    orchestrator = TrainingOrchestrator(coordinator_url=coordinator.url, job=job)
    await asyncio.to_thread(orchestrator.register)
    await orchestrator.wait_barrier("start")
    await asyncio.to_thread(orchestrator.barrier, "start")
    await orchestrator.deregister_worker()


def test_one_orchestrator_serves_many_event_loops(coordinator: LocalCoordinator, job: str) -> None:
    orchestrator = TrainingOrchestrator(coordinator_url=coordinator.url, job=job)
    asyncio.run(orchestrator.register_worker())
    for _ in range(3):
        asyncio.run(orchestrator.wait_barrier("step"))
    orchestrator.deregister()


def test_construction_touches_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.5)
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        orchestrator = TrainingOrchestrator(coordinator_url=url)
        registry = DatasetRegistry(url)
        assert repr(orchestrator)
        assert not orchestrator.is_registered
        orchestrator.report(step=1)
        with pytest.raises(TimeoutError):
            server.accept()
        assert registry.job == "default"


@pytest.mark.parametrize(
    "arguments",
    [
        {"coordinator_url": 50051},
        {"coordinator_url": b"http://x:1"},
        {"worker_id": 7},
        {"rank": "0"},
        {"rank": 0.0},
        {"rank": True},
        {"world_size": "8"},
        {"gpu_count": "8"},
        {"heartbeat_interval_ms": 0.5},
        {"job": 3},
        {"config": {"coordinator_url": "http://x:1"}},
    ],
)
def test_argument_of_a_wrong_type_is_a_type_error(arguments: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=next(iter(arguments)).replace("_", ".")):
        TrainingOrchestrator(**arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"coordinator_url": "coordinator"},
        {"coordinator_url": "http://coordinator"},
        {"coordinator_url": "http://coordinator:port"},
        {"coordinator_url": "http://coordinator:70000"},
        {"coordinator_url": "https://coordinator:50051"},
        {"worker_id": "../worker"},
        {"worker_id": ""},
        {"rank": -1},
        {"rank": 8, "world_size": 8},
        {"world_size": 0},
        {"gpu_count": -1},
        {"heartbeat_interval_ms": 0},
        {"job": "a\nb"},
    ],
)
def test_argument_of_a_wrong_value_is_a_value_error(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        TrainingOrchestrator(**arguments)


@pytest.mark.parametrize(
    ("variable", "value"),
    [("RANK", "first"), ("WORLD_SIZE", "many"), ("RANK", "-1"), ("COORDINATOR_URL", "nowhere")],
)
def test_environment_of_a_wrong_value_is_a_value_error(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=r"\w"):
        TrainingOrchestrator()


@pytest.fixture(scope="module")
def member(patient_coordinator: LocalCoordinator) -> Any:
    """A registered worker whose coordinator counts the calls it gets."""
    with TrainingOrchestrator(
        coordinator_url=patient_coordinator.url, job="arguments", heartbeat_interval_ms=900
    ) as orchestrator:
        orchestrator.register()
        yield orchestrator


@pytest.mark.parametrize(
    ("method", "args", "kwargs", "error"),
    [
        ("barrier", (7,), {}, TypeError),
        ("barrier", (None,), {}, TypeError),
        ("barrier", ("",), {}, ValueError),
        ("barrier", ("../x",), {}, ValueError),
        ("barrier", ("b",), {"timeout_ms": "1000"}, TypeError),
        ("barrier", ("b",), {"timeout_ms": None}, TypeError),
        ("report", (), {"bad \ud800": 1.0}, ValueError),
        ("barrier", ("b",), {"timeout_ms": True}, TypeError),
        ("barrier", ("b",), {"timeout_ms": 0}, ValueError),
        ("barrier", ("b",), {"timeout_ms": -1}, ValueError),
        ("barrier", ("b",), {"timeout_ms": float("nan")}, ValueError),
        ("barrier", ("b",), {"timeout_ms": float("inf")}, ValueError),
        ("commit_checkpoint", (7, 1), {}, TypeError),
        ("commit_checkpoint", ("", 1), {}, ValueError),
        ("commit_checkpoint", ("c", "1"), {}, TypeError),
        ("commit_checkpoint", ("c", 1.5), {}, TypeError),
        ("commit_checkpoint", ("c", -1), {}, ValueError),
        ("commit_checkpoint", ("c", 2**63), {}, ValueError),
        ("commit_checkpoint", ("c", 1), {"epoch": -1}, ValueError),
        ("commit_checkpoint", ("c", 1), {"size_bytes": -1}, ValueError),
        ("commit_checkpoint", ("c", 1), {"path": 7}, TypeError),
        ("commit_checkpoint", ("c", 1), {"timeout_ms": 0}, ValueError),
        ("report", (), {"step": "1"}, TypeError),
        ("report", (), {"step": -1}, ValueError),
        ("report", (), {"epoch": 1.5}, TypeError),
        ("report", (), {"state": "dancing"}, ValueError),
        ("report", (), {"loss": "low"}, ValueError),
    ],
)
def test_wrong_argument_raises_before_anything_is_sent(
    member: TrainingOrchestrator,
    view: JobView,
    method: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    error: type[Exception],
) -> None:
    def calls() -> int:
        counted = ("WaitBarrier", "NotifyCheckpoint")
        methods = view.observer.server_info().methods
        return sum(m.calls for m in methods if m.method in counted)

    before = calls()
    with pytest.raises(error):
        getattr(member, method)(*args, **kwargs)
    assert calls() == before
    assert member.is_registered


@pytest.mark.parametrize(
    ("kwargs", "error"),
    [
        ({"port": -1}, ValueError),
        ({"port": 65536}, ValueError),
        ({"port": "8080"}, TypeError),
        ({"ip": 7}, TypeError),
        ({"gpu_count": -1}, ValueError),
        ({"gpu_count": "8"}, TypeError),
        ({"memory_bytes": 2**64}, ValueError),
    ],
)
def test_wrong_registration_raises_before_anything_is_sent(
    kwargs: dict[str, Any], error: type[Exception]
) -> None:
    orchestrator = TrainingOrchestrator(coordinator_url=NOWHERE)
    with pytest.raises(error):
        asyncio.run(orchestrator.register_worker(**kwargs))


def test_calls_before_registration_say_what_to_do() -> None:
    orchestrator = TrainingOrchestrator(coordinator_url=NOWHERE)
    for call in (
        lambda: orchestrator.barrier("step"),
        lambda: orchestrator.get_status(),
        lambda: orchestrator.commit_checkpoint("c", 1),
        lambda: orchestrator.rank,
    ):
        with pytest.raises(StrataError, match=r"call register\(\) first"):
            call()
    assert orchestrator.worker_id == ""
    orchestrator.deregister()


BLOCKING = {
    "register": ("register_worker", ()),
    "barrier": ("wait_barrier", ("step",)),
    "deregister": ("deregister_worker", ()),
    "commit_checkpoint": ("commit_checkpoint_async", ("c-1", 1)),
}


@pytest.mark.parametrize("name", BLOCKING)
async def test_blocking_call_inside_a_running_loop_names_the_asynchronous_one(name: str) -> None:
    twin, args = BLOCKING[name]
    orchestrator = TrainingOrchestrator(coordinator_url=NOWHERE)
    with pytest.raises(StrataError, match=f"await {twin}"):
        getattr(orchestrator, name)(*args)
    assert inspect.iscoroutinefunction(getattr(orchestrator, twin))


async def test_brief_calls_work_inside_a_running_loop(
    coordinator: LocalCoordinator, job: str
) -> None:
    async with TrainingOrchestrator(coordinator_url=coordinator.url, job=job) as orchestrator:
        await orchestrator.register_worker()
        registry = DatasetRegistry(coordinator.url)
        registry.register("images", "/data", "parquet", total_samples=100, shard_size=10)
        assert len(registry.get_shard("images", worker_rank=0, epoch=0)) == 10
        assert len(registry.get_shards("images", epoch=0)) == 10
        assert orchestrator.get_status().rank == 0
        assert orchestrator.latest_checkpoint() is None


def test_status_shows_what_the_coordinator_knows(coordinator: LocalCoordinator, job: str) -> None:
    with TrainingOrchestrator(coordinator_url=coordinator.url, job=job) as orchestrator:
        orchestrator.register()
        orchestrator.report(step=3, epoch=1, state="training", loss=0.25, accuracy=0.5)
        status = eventually(
            lambda: s if (s := orchestrator.get_status()).step == 3 else None, within=20
        )
        assert (status.epoch, status.state) == (1, WorkerState.TRAINING)
        assert status.metrics == {"loss": 0.25, "accuracy": 0.5}
        assert repr(orchestrator) == (f"<TrainingOrchestrator worker-0 of job {job!r}, registered>")


def test_types_of_both_faces_agree() -> None:
    for name, (twin, _) in BLOCKING.items():
        blocking = inspect.signature(getattr(TrainingOrchestrator, name))
        if name == "barrier":
            assert str(blocking) == "(self, name: 'str', timeout_ms: 'int' = 30000) -> 'None'"
        else:
            assert blocking == inspect.signature(getattr(TrainingOrchestrator, twin))
        assert getattr(TrainingOrchestrator, name).__doc__


def test_dataset_registry_uses_the_registered_orchestrator(
    coordinator: LocalCoordinator, job: str
) -> None:
    with TrainingOrchestrator(
        coordinator_url=coordinator.url, job=job, world_size=2, rank=1
    ) as orchestrator:
        orchestrator.register()
        with DatasetRegistry() as registry:
            assert registry.job == job
            registry.register_dataset("numbers", total_samples=95, shard_size=10, shuffle=False)
            shards = registry.get_shards("numbers", epoch=0)
            assert len(shards) == 5
            assert all(shard.file_paths == [] for shard in shards)
            with RawClient(coordinator.url, job) as client:
                others = client.call("ListShards", dataset_id="numbers", rank=0).shards
            ranges = [(s.start_index, s.end_index) for s in shards]
            ranges += [(s.start_sample, s.end_sample) for s in others]
            assert sorted(ranges) == [(n, min(n + 10, 95)) for n in range(0, 95, 10)]


def test_dataset_registry_works_without_any_worker(
    coordinator: LocalCoordinator, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = DatasetRegistry(coordinator.url, job=job)
    registry.register("images", "/data/", "csv", total_samples=100, shard_size=10)
    assert registry.get_shard("images", 0, 0) == [f"/data/shard_{i}.csv" for i in range(10)]
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "2")
    fixed = DatasetRegistry(coordinator.url, job=job)
    halves = [fixed.get_shard("images", rank, 0) for rank in range(4)]
    assert sorted(len(half) for half in halves) == [2, 2, 3, 3]
    assert len({path for half in halves for path in half}) == 10
    assert [info.file_paths for info in fixed.get_shards("images", 0)] == [[p] for p in halves[2]]


def test_dataset_registered_again_is_a_no_op_and_differently_an_error(
    coordinator: LocalCoordinator, job: str
) -> None:
    registry = DatasetRegistry(coordinator.url, job=job)
    for _ in range(2):
        registry.register("images", "/data", "csv", total_samples=100, shard_size=10, owner="me")
    with pytest.raises(ShardError) as caught:
        registry.register("images", "/data", "csv", total_samples=200, shard_size=10, owner="me")
    for part in ("images", "total_samples", "100", "200"):
        assert part in str(caught.value)


def test_unknown_dataset_is_a_lookup_error_that_lists_the_known(
    coordinator: LocalCoordinator, job: str
) -> None:
    registry = DatasetRegistry(coordinator.url, job=job)
    registry.register_dataset("numbers", 100, 10)
    with pytest.raises(LookupError, match="registered: numbers") as caught:
        registry.get_shard("images", 0, 0)
    assert isinstance(caught.value, ShardError)


@pytest.mark.parametrize(
    ("method", "args", "kwargs", "error"),
    [
        ("register", (7, "/d", "csv", 10), {}, TypeError),
        ("register", ("", "/d", "csv", 10), {}, ValueError),
        ("register", ("d", 7, "csv", 10), {}, TypeError),
        ("register", ("d", "/d", "csv", "10"), {}, TypeError),
        ("register", ("d", "/d", "csv", 10), {"seed": -1}, ValueError),
        ("register", ("d", "/d", "csv", 10), {"seed": "x"}, TypeError),
        ("register", ("d", "/d", "csv", 10), {"shard_size": "x"}, TypeError),
        ("register", ("d", "/d", "csv", 10), {"shuffle": "no"}, TypeError),
        ("register_dataset", ("d", 10, 10, 1), {}, TypeError),
        ("register_dataset", ("d", -5, 10), {}, ValueError),
        ("register_dataset", ("d", 10.5, 10), {}, TypeError),
        ("get_shard", ("d", -1, 0), {}, ValueError),
        ("get_shard", ("d", 0, -1), {}, ValueError),
        ("get_shard", ("d", "0", 0), {}, TypeError),
        ("get_shard", ("d", 0, None), {}, TypeError),
        ("get_shards", ("../d", 0), {}, ValueError),
    ],
)
def test_wrong_argument_of_the_registry_raises_before_anything_is_sent(
    method: str, args: tuple[Any, ...], kwargs: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        getattr(DatasetRegistry(NOWHERE), method)(*args, **kwargs)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (("d", "/d", "pickle", 10), {}),
        (("d", "/d", "csv", 0), {}),
        (("d", "/d", "csv", 10), {"shard_size": 0}),
        (("d", "/d", "csv", 10), {"shard_size": 2**32}),
    ],
)
def test_impossible_dataset_is_a_shard_error_and_a_value_error(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    with pytest.raises(ShardError, match="'d'") as caught:
        DatasetRegistry(NOWHERE).register(*args, **kwargs)
    assert isinstance(caught.value, ValueError)


def test_time_longer_than_any_call_is_held_is_no_error(
    coordinator: LocalCoordinator, job: str
) -> None:
    with TrainingOrchestrator(coordinator_url=coordinator.url, job=job, world_size=1) as worker:
        worker.register()
        worker.barrier("step", timeout_ms=10**13)


def test_mistyped_argument_does_not_become_metadata() -> None:
    with pytest.raises(TypeError, match=r"shuffel is no argument of register.*shuffle"):
        DatasetRegistry(NOWHERE).register("d", "/d", "csv", 10, shuffel=True)


async def test_dataset_registry_is_an_asynchronous_context_manager_too(
    coordinator: LocalCoordinator, job: str
) -> None:
    async with DatasetRegistry(coordinator.url, job=job) as registry:
        await registry.register_dataset_async("numbers", 100, 10)
        assert len(await registry.get_shards_async("numbers", 0)) == 10


def test_whole_numbers_of_numpy_are_accepted(coordinator: LocalCoordinator, job: str) -> None:
    np = pytest.importorskip("numpy")
    with TrainingOrchestrator(coordinator_url=coordinator.url, job=job) as orchestrator:
        orchestrator.register()
        orchestrator.report(step=np.int64(3), epoch=np.int32(1), loss=np.float32(0.5))
        orchestrator.commit_checkpoint("c", np.int64(3))
        registry = DatasetRegistry()
        registry.register("numbers", "/d", "csv", np.int64(100), np.int64(10), seed=np.int64(1))
        assert len(registry.get_shard("numbers", np.int64(0), np.int64(0))) == 10


def test_https_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match="http://HOST:PORT"):
        DatasetRegistry("https://coordinator:50051")
