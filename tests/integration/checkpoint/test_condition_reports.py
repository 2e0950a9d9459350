"""What became of checkpoints, told to a real coordinator by those who see the store."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dtruntime import CheckpointManager, TrainingOrchestrator
from dtruntime.client import Observer
from dtruntime.coordinator.http import views
from dtruntime.testing import LocalCoordinator
from tests.integration.cli.test_checkpoints import flip, pack_of, strata
from tests.support.http_api import Api
from tests.support.raw_client import RawClient, Refusal


@pytest.fixture
def worker(served: LocalCoordinator) -> Iterator[TrainingOrchestrator]:
    with TrainingOrchestrator(coordinator_url=served.url, job="j") as worker:
        worker.register()
        yield worker


def saved(worker: TrainingOrchestrator, place: Path, *steps: int, **options: Any) -> None:
    with CheckpointManager(place, orchestrator=worker, **options) as manager:
        for step in steps:
            manager.save(bytes([step]) * 5000, step).wait()


def rows(api: Api) -> dict[int, views.Checkpoint]:
    page = api.get("/api/checkpoints", views.Page[views.Checkpoint], job="j")
    assert page.total == len(page.items)
    return {row.step: row for row in page.items}


def events(api: Api, kind: str) -> list[views.LogEntry]:
    return api.get("/api/logs", views.Page[views.LogEntry], job="j", event=kind).items


def test_loads_that_check_everything_say_that_it_is_good(
    worker: TrainingOrchestrator, served: LocalCoordinator, api: Api, tmp_path: Path
) -> None:
    saved(worker, tmp_path, 1, 2, 3)
    assert [row.verified for row in rows(api).values()] == [None] * 3
    with CheckpointManager(tmp_path, orchestrator=worker) as manager:
        manager.load_bytes(2)
        manager.load_latest()
    found = rows(api)
    assert {step: row.verified for step, row in found.items()} == {1: None, 2: True, 3: True}
    assert found[3].verified_by == "worker-0"
    assert (found[3].verified_at or 0) >= found[3].committed_at
    assert found[1].verified_at is None
    served.kill()
    served.start()
    assert rows(api) == found


def test_damage_that_recovery_falls_back_from_is_shown_and_in_the_journal(
    worker: TrainingOrchestrator, api: Api, tmp_path: Path
) -> None:
    saved(worker, tmp_path, 1, 2, 3)
    flip(pack_of(tmp_path, 3), 6000)
    (newest,) = tmp_path.glob("manifests/*-000000000002*")
    newest.write_bytes(b"nothing that can be read")
    with api.events("j") as stream:
        stream.snapshot()
        with CheckpointManager(tmp_path, orchestrator=worker) as manager:
            assert manager.load_latest().step == 1
        told = stream.until(
            lambda c: [x for x in c.get("checkpoints", []) if x["verified"] is False] or None
        )
    assert told
    assert {s: row.verified for s, row in rows(api).items()} == {1: True, 2: False, 3: False}
    found = events(api, "checkpoint.damaged")
    assert {entry.fields["step"] for entry in found} == {"2", "3"}
    assert {entry.level for entry in found} == {"error"}
    assert all(entry.fields["reason"] for entry in found)


def test_what_retention_drops_leaves_the_list_and_its_watchers(
    worker: TrainingOrchestrator, served: LocalCoordinator, api: Api, tmp_path: Path
) -> None:
    with api.events("j") as stream:
        stream.snapshot()
        saved(worker, tmp_path, 1, keep_count=2)
        assert stream.until(lambda c: c.get("checkpoints"))
        saved(worker, tmp_path, 2, 3, keep_count=2)
        gone = stream.until(lambda c: c.get("removed_checkpoints"))
    (entry,) = events(api, "checkpoint.removed")
    assert gone == [entry.fields["checkpoint"]]
    assert entry.fields["step"] == "1"
    assert {step: row.will_be_dropped for step, row in rows(api).items()} == {2: True, 3: False}
    with Observer(served.url) as observer:
        status = observer.status("j")
    assert [one.step for one in status.checkpoints] == [3, 2]
    assert status.checkpoint_count == 2


def test_command_tells_the_jobs_whose_checkpoints_it_reads(
    worker: TrainingOrchestrator, served: LocalCoordinator, api: Api, tmp_path: Path
) -> None:
    saved(worker, tmp_path, 1, 2, 3)
    flip(pack_of(tmp_path, 2), 6000)
    quiet = strata("verify", tmp_path)
    assert "coordinator" not in quiet.stdout + quiet.stderr
    answer = strata("verify", tmp_path, "--url", served.url, "--json")
    assert answer.returncode == 1
    assert json.loads(answer.stdout)["told"] == 3
    assert {s: row.verified for s, row in rows(api).items()} == {1: True, 2: False, 3: True}
    assert rows(api)[2].verified_by == ""
    removed = strata("rm", tmp_path, 2, "--yes", "--url", served.url)
    assert "reported 1 checkpoint to the coordinator" in removed.stdout
    assert sorted(rows(api)) == [1, 3]


def test_nothing_fails_because_the_coordinator_is_away(
    worker: TrainingOrchestrator,
    served: LocalCoordinator,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    saved(worker, tmp_path, 1, 2)
    flip(pack_of(tmp_path, 2), 6000)
    served.kill()
    with caplog.at_level(logging.WARNING), CheckpointManager(tmp_path) as manager:
        assert manager.load_latest().step == 1
    away = strata("verify", tmp_path, 1, "--url", served.url)
    assert away.returncode == 0
    assert "could not inform the coordinator" in away.stderr
    served.start()


@pytest.mark.parametrize(
    "fields",
    [
        {"checkpoint_ids": ["../x"], "condition": 1},
        {"checkpoint_ids": ["a"] * 1001, "condition": 1},
        {"checkpoint_ids": ["a"], "condition": 0},
        {"checkpoint_ids": ["a"], "condition": 2, "detail": "x\n"},
        {"checkpoint_ids": ["a"], "condition": 2, "path": "x" * 5000},
        {"checkpoint_ids": ["a"], "condition": 1, "reported_by": "worker-0"},
    ],
)
def test_nonsense_from_the_wire_is_refused(
    served: LocalCoordinator, worker: TrainingOrchestrator, fields: dict[str, Any]
) -> None:
    with RawClient(served.url, "j") as raw, pytest.raises(Refusal) as caught:
        raw.call("ReportCheckpoints", **fields)
    assert "INVALID_ARGUMENT" in str(caught.value)
