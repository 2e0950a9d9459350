"""The API keeps what its OpenAPI document promises, whatever is sent."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from dtruntime.coordinator.http.routes import ROUTES
from dtruntime.testing import LocalCoordinator
from tests.support.raw_client import RawClient

CHECKS = [
    not_a_server_error,
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("openapi")
    with LocalCoordinator(folder, http=True, heartbeat_timeout_ms=60_000) as coordinator:
        with RawClient(coordinator.url, "j") as raw:
            worker = raw.register()
            worker.heartbeat(state=3, step=1)
            worker.commit("c", 1).result()
            raw.call("RegisterDataset", dataset_id="d", total_samples=9, shard_size=3)
        yield coordinator.http_url


@pytest.fixture(scope="module")
def schema(url: str) -> Any:
    return schemathesis.openapi.from_url(f"{url}/openapi.json")


# A stream has no end; its events are checked elsewhere.
OPERATIONS = [
    (re.sub(r":path", "", route.path), route.method)
    for route in ROUTES
    if route.path != "/api/events"
]


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_answers_are_as_documented(schema: Any, path: str, method: str) -> None:
    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=schema[path][method].as_strategy())
    def check(case: Any) -> None:
        case.call_and_validate(checks=CHECKS)

    check()
