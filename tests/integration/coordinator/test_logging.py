"""What a real coordinator logs, at which level and in which form."""

import json
import re

import pytest

from dtruntime.testing import LocalCoordinator
from tests.support.coordinators import StartCoordinator
from tests.support.raw_client import RawClient


def log_of(start: StartCoordinator) -> str:
    """Start a coordinator, register a worker, stop; the log."""
    coordinator: LocalCoordinator = start()
    with RawClient(coordinator.url) as client:
        client.register()
    coordinator.stop()
    return coordinator.log


@pytest.mark.parametrize(
    ("variable", "level", "logged"),
    [("STRATA_LOG", "warn", False), ("RUST_LOG", "error", False), ("RUST_LOG", "debug", True)],
)
def test_level_comes_from_the_environment(
    start_coordinator: StartCoordinator,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    level: str,
    logged: bool,
) -> None:
    monkeypatch.setenv(variable, level)
    assert ("worker.registered" in log_of(start_coordinator)) == logged


def test_lines_are_an_event_and_its_fields(start_coordinator: StartCoordinator) -> None:
    lines = log_of(start_coordinator).splitlines()
    registered = next(line for line in lines if "worker.registered" in line)
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d\.\d{3} INFO    worker\.registered job=default worker=worker-0 rank=0 "
        r"incarnation=1 generation=1",
        registered,
    )


def test_lines_are_json_when_asked_for(
    start_coordinator: StartCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATA_LOG_FORMAT", "json")
    entries = [json.loads(line) for line in log_of(start_coordinator).splitlines()]
    registered = next(entry for entry in entries if entry["event"] == "worker.registered")
    assert registered["level"] == "info"
    assert (registered["worker"], registered["job"]) == ("worker-0", "default")
    assert registered["at"] > 1e9
    assert {"coordinator.started", "coordinator.stopped"} <= {e["event"] for e in entries}
