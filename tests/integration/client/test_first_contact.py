"""A coordinator that workers do not know yet: wrong addresses, wrong ports, later outages."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dtruntime import DatasetRegistry, TrainingOrchestrator
from dtruntime.client import Observer
from dtruntime.errors import ConnectionError
from dtruntime.testing import LocalCoordinator

NOWHERE = "http://127.0.0.1:1"


@pytest.mark.long
def test_wrong_address_is_an_error_after_ten_seconds_for_workers_and_registries() -> None:
    def of_worker() -> str:
        with pytest.raises(ConnectionError) as caught:
            TrainingOrchestrator(coordinator_url=NOWHERE).register()
        return str(caught.value)

    def of_registry() -> str:
        with pytest.raises(ConnectionError) as caught:
            DatasetRegistry(NOWHERE).list_datasets()
        return str(caught.value)

    with ThreadPoolExecutor() as pool:
        for message in pool.map(lambda ask: ask(), (of_worker, of_registry)):
            said = re.search(r"could not be reached (?:within|for) ([\d.]+) s", message)
            assert said is not None, message
            assert float(said[1]) <= 10.5
            for part in (NOWHERE, "strata coordinator", "STRATA_CONNECT_TIMEOUT_MS"):
                assert part in message


def test_environment_says_how_long_the_first_contact_may_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STRATA_CONNECT_TIMEOUT_MS", "300")
    for ask in (
        TrainingOrchestrator(coordinator_url=NOWHERE).register,
        DatasetRegistry(NOWHERE).list_datasets,
    ):
        with pytest.raises(ConnectionError, match=r"within 0\.\d s"):
            ask()


def test_http_port_is_recognised_and_the_grpc_port_is_named(served: LocalCoordinator) -> None:
    right = served.url.rpartition(":")[2]
    for ask in (
        TrainingOrchestrator(coordinator_url=served.http_url).register,
        DatasetRegistry(served.http_url).list_datasets,
        Observer(served.http_url).jobs,
    ):
        with pytest.raises(ConnectionError, match=f"HTTP port .* gRPC port, which is {right}"):
            ask()


def test_port_that_speaks_another_protocol_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_CONNECT_TIMEOUT_MS", "500")
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(ConnectionError, match="does not speak gRPC"):
            TrainingOrchestrator(coordinator_url=url).register()
        server.shutdown()


def test_outage_after_the_first_contact_is_ridden_through(
    own_coordinator: LocalCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = DatasetRegistry(own_coordinator.url)
    registry.register_dataset("train", 100, 10)
    with TrainingOrchestrator(coordinator_url=own_coordinator.url) as worker:
        worker.register()
        monkeypatch.setenv("STRATA_CONNECT_TIMEOUT_MS", "1")
        own_coordinator.stop()
        fresh = DatasetRegistry()
        with ThreadPoolExecutor() as pool:
            asked = [pool.submit(one.list_datasets) for one in (registry, fresh)]
            own_coordinator.start()
            for answer in asked:
                assert [known.dataset_id for known in answer.result(60)] == ["train"]
