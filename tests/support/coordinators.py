"""Coordinators for tests: shared ones for what leaves no trace, own ones for what does."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dtruntime.client.observer import Observer
from dtruntime.testing import LocalCoordinator
from dtruntime.types import JobStatus
from tests.support.http_api import Api
from tests.support.raw_client import RawClient

TRANSPORTS = ["pygrpc-native", "grpc.aio"]

PATIENT: dict[str, Any] = {"heartbeat_interval_ms": 200, "heartbeat_timeout_ms": 30_000}
"""A worker that gets no turn on a busy machine is not taken for dead."""
QUICK: dict[str, Any] = {"heartbeat_interval_ms": 200, "heartbeat_timeout_ms": 3000}
"""For tests that wait for a death, marked ``deaths``: short to wait for, long for the others."""

StartCoordinator = Callable[..., LocalCoordinator]


@pytest.fixture
def job(request: pytest.FixtureRequest) -> str:
    """A job of the test's own, named after it."""
    digest = hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:8]
    return f"{request.node.originalname[:60]}-{digest}"


@pytest.fixture(scope="session")
def patient_coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCoordinator]:
    """One coordinator for all tests that keep to their own job and leave it running."""
    with LocalCoordinator(tmp_path_factory.mktemp("coordinator"), **PATIENT) as coordinator:
        yield coordinator


@pytest.fixture(scope="session")
def quick_coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCoordinator]:
    """Another one, for those that wait for a death."""
    with LocalCoordinator(tmp_path_factory.mktemp("coordinator"), **QUICK) as coordinator:
        yield coordinator


@pytest.fixture
def coordinator(request: pytest.FixtureRequest) -> LocalCoordinator:
    """The shared coordinator that suits the test."""
    name = "quick_coordinator" if _waits_for_a_death(request) else "patient_coordinator"
    found: LocalCoordinator = request.getfixturevalue(name)
    return found


def _waits_for_a_death(request: pytest.FixtureRequest) -> bool:
    return request.node.get_closest_marker("deaths") is not None


@pytest.fixture(scope="session", params=TRANSPORTS)
def service_url(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The address of a coordinator, once for each transport."""
    with LocalCoordinator(
        tmp_path_factory.mktemp(request.param),
        heartbeat_timeout_ms=60_000,
        options=["--transport", request.param],
    ) as coordinator:
        yield coordinator.url


@pytest.fixture
def service(service_url: str, job: str) -> Iterator[RawClient]:
    """A plain gRPC client of the service, once for each transport."""
    with RawClient(service_url, job) as client:
        yield client


@pytest.fixture
def start_coordinator(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StartCoordinator]:
    """Start a coordinator of the test's own; arguments as for `LocalCoordinator`."""
    timing = QUICK if _waits_for_a_death(request) else PATIENT
    with ExitStack() as stack:

        def start(**options: Any) -> LocalCoordinator:
            options.setdefault("data_dir", tmp_path / "coordinator")
            return stack.enter_context(LocalCoordinator(**{**timing, **options}))

        yield start


@pytest.fixture
def own_coordinator(start_coordinator: StartCoordinator) -> LocalCoordinator:
    """A coordinator of the test's own."""
    return start_coordinator()


@pytest.fixture
def served(start_coordinator: StartCoordinator) -> LocalCoordinator:
    """A coordinator of the test's own, with its HTTP API."""
    return start_coordinator(http=True)


@pytest.fixture
def api(served: LocalCoordinator) -> Iterator[Api]:
    """That API."""
    with Api(served.http_url) as api:
        yield api


class JobView:
    """What an observer sees of one job."""

    def __init__(self, observer: Observer, job: str) -> None:
        self.observer = observer
        self.job = job

    @property
    def status(self) -> JobStatus:
        return self.observer.status(self.job)

    @property
    def dead(self) -> int:
        return self.status.dead_workers

    @property
    def events(self) -> list[tuple[str, dict[str, str]]]:
        return [(event.kind, dict(event.fields)) for event in self.observer.events(self.job)]

    def waiting(self, barrier: str) -> int:
        """How many workers wait in a barrier."""
        return sum(b.arrived for b in self.status.barriers if b.barrier_id == barrier)


@pytest.fixture
def view(coordinator: LocalCoordinator, job: str) -> Iterator[JobView]:
    """The test's job on the shared coordinator."""
    with Observer(coordinator.url, patience=10.0) as observer:
        yield JobView(observer, job)


@pytest.fixture
def own_view(own_coordinator: LocalCoordinator) -> Iterator[JobView]:
    """The default job on the test's own coordinator."""
    with Observer(own_coordinator.url, patience=10.0) as observer:
        yield JobView(observer, "default")
