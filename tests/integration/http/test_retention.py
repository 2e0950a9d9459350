"""A manager's retention, seen through the HTTP API of a real coordinator."""

from pathlib import Path

from dtruntime import CheckpointManager, TrainingOrchestrator
from dtruntime.coordinator.http import views
from dtruntime.testing import LocalCoordinator
from tests.support.coordinators import PATIENT
from tests.support.http_api import Api


def test_checkpoints_tell_what_will_be_dropped_also_after_a_restart(tmp_path: Path) -> None:
    with LocalCoordinator(**PATIENT, http=True) as coordinator, Api(coordinator.http_url) as api:
        with (
            TrainingOrchestrator(coordinator_url=coordinator.url, job="kept") as worker,
            CheckpointManager(tmp_path, keep_count=2, orchestrator=_registered(worker)) as manager,
        ):
            manager.save(bytes(5000), step=1).wait()
            assert _fates(api) == {1: False}
            with api.events("kept") as events:
                events.snapshot()
                manager.save(bytes(6000), step=2).wait()
                told = None
                while told is None:
                    event = events.next()
                    assert event is not None
                    told = event.data.get("checkpoints")
            assert {row["step"]: row["will_be_dropped"] for row in told} == {1: True, 2: False}
            manager.save(bytes(7000), step=3).wait()
            assert manager.steps() == [2, 3]
        expected = {2: True, 3: False}
        assert _fates(api) == expected
        newest = api.get("/api/checkpoints", views.Page[views.Checkpoint], job="kept").items[0]
        assert newest.written_bytes is not None
        assert newest.metadata == {}
        coordinator.kill()
        coordinator.start()
        assert _fates(api) == expected


def _registered(worker: TrainingOrchestrator) -> TrainingOrchestrator:
    worker.register()
    return worker


def _fates(api: Api) -> dict[int, bool | None]:
    page = api.get("/api/checkpoints", views.Page[views.Checkpoint], job="kept")
    return {row.step: row.will_be_dropped for row in page.items}
