"""The HTTP server as a part of the coordinator's process: start, stop, restart, real training."""

import socket
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dtruntime import Config, DatasetRegistry, Run, Runtime, TrainingOrchestrator
from dtruntime.cli.main import main
from dtruntime.coordinator.http import views
from dtruntime.errors import ConnectionError, StrataError
from dtruntime.testing import LocalCoordinator, eventually
from tests.support.coordinators import TRANSPORTS, StartCoordinator
from tests.support.http_api import Api
from tests.support.raw_client import RawClient

TRAINING = 3


def test_taken_port_is_an_error_that_names_the_option(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        command = [sys.executable, "-m", "dtruntime.cli.main", "coordinator", "127.0.0.1:0"]
        command += ["--http", address, "--data-dir", str(tmp_path)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 3
    assert f"cannot listen on {address} for HTTP" in result.stderr
    assert "--http HOST:PORT" in result.stderr
    assert "--no-http" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_start_that_fails_leaves_nothing_behind(tmp_path: Path, transport: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        places = {
            "address": f"127.0.0.1:{free_port()}",
            "http_address": f"127.0.0.1:{taken.getsockname()[1]}",
            "data_dir": str(tmp_path),
            "transport": transport,
        }
        runtime = Runtime(Config().override("coordinator", "test", **places))
        with pytest.raises(ConnectionError, match="for HTTP"):
            runtime.start()
    with runtime, RawClient(runtime.url) as raw:
        assert raw.register().rank == 0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_coordinator_without_http_says_so(own_coordinator: LocalCoordinator) -> None:
    with pytest.raises(StrataError, match="serves no HTTP"):
        _ = own_coordinator.http_url


def test_coordinator_inside_the_users_process_serves_too(tmp_path: Path) -> None:
    places = {"address": "127.0.0.1:0", "http_address": "127.0.0.1:0", "data_dir": str(tmp_path)}
    with Runtime(Config().override("coordinator", "test", **places)) as runtime:
        server = runtime._server
        assert server is not None
        with Api(f"http://{server.http_address}") as api:
            assert api.get("/api/health", views.Health).status == "ok"


def test_coordinator_without_a_job_answers_everywhere(
    start_coordinator: StartCoordinator,
) -> None:
    with Api(start_coordinator(http=True).http_url) as api:
        empty = api.get("/api/dashboard", views.Dashboard)
        assert (empty.job, empty.workers, empty.jobs) == ("", [], [])
        for name in ("jobs", "workers", "datasets", "checkpoints", "tasks", "logs", "actions"):
            answer = api.ask(f"/api/{name}").json()
            assert answer == {"items": [], "total": 0, "next_cursor": None}
        for name in ("barriers", "metrics", "history"):
            assert api.ask(f"/api/{name}").status_code == 200


def test_history_survives_a_restart(start_coordinator: StartCoordinator) -> None:
    coordinator = start_coordinator(http=True)
    with RawClient(coordinator.url, "j") as raw:
        raw.register().heartbeat(state=TRAINING, step=3, metrics={"loss": 0.75})
        with Api(coordinator.http_url) as api:
            eventually(lambda: api.get("/api/history", views.History, job="j").points)
    assert coordinator.stop() == 0
    coordinator.start()
    with Api(coordinator.http_url) as api:
        kept = api.get("/api/history", views.History, job="j").points
    assert kept[0].loss == 0.75
    assert kept[0].workers_live == 1


@pytest.mark.long
def test_broken_history_is_no_obstacle(start_coordinator: StartCoordinator) -> None:
    coordinator = start_coordinator(http=True)
    with RawClient(coordinator.url, "j") as raw:
        raw.register()
    with Api(coordinator.http_url) as api:
        eventually(lambda: api.get("/api/history", views.History, job="j").points)
    coordinator.stop()
    (kept,) = (coordinator.data_dir / "history").glob("*.json")
    kept.write_bytes(b"{")
    coordinator.start()
    with Api(coordinator.http_url) as api:
        assert api.get("/api/history", views.History, job="j").resolution_seconds == 1.0


def test_training_shows_samples_coverage_and_progress(
    start_coordinator: StartCoordinator, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"x": list(range(4000))}), tmp_path / "a.parquet", row_group_size=250)
    coordinator = start_coordinator(http=True)
    with (
        Api(coordinator.http_url) as api,
        TrainingOrchestrator(coordinator_url=coordinator.url, job="j") as worker,
    ):
        worker.register()
        with DatasetRegistry(coordinator.url, job="j") as registry:
            registry.register("d", str(tmp_path), format="parquet", shard_size=250)
            loader = registry.live_loader("d", 10)
            steps = enumerate(loader, 1)

            def rate_after_a_step() -> float | None:
                step, _ = next(steps)
                worker.report(step=step, epoch=0, state="training", loss=1 / step)
                loader.commit()
                return api.get("/api/metrics", views.Metrics, job="j").samples_per_second

            eventually(rate_after_a_step)
            part = eventually(lambda: covered(api, partly=True))
            assert 0 < part.covered < 4000
            assert not part.exact
            for _ in steps:
                loader.commit()
            whole = eventually(lambda: covered(api, partly=False))
            assert (whole.covered, whole.missing, whole.repeated) == (4000, 0, 0)
            loader.close()
        (task,) = api.get("/api/tasks", views.Page[views.Task], job="j").items
        assert (task.samples, task.total_samples, task.progress) == (4000, 4000, 1.0)


def test_run_tells_how_far_it_is_within_an_epoch(
    start_coordinator: StartCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = start_coordinator(http=True)
    monkeypatch.setenv("COORDINATOR_URL", coordinator.url)
    with (
        Api(coordinator.http_url) as api,
        Run(tmp_path, data=1000, batch_size=10, epochs=3, job="j") as run,
    ):

        def told() -> views.Task | None:
            (task,) = api.get("/api/tasks", views.Page[views.Task], job="j").items
            return task if task.step == 120 else None

        for _ in run:
            if run.step == 120:
                task = eventually(told)
                assert task is not None
                assert (task.epoch, task.epochs, task.total_steps) == (1, 3, 300)
                assert task.progress == pytest.approx(0.4)
                assert "steps" not in task.metrics


def covered(api: Api, partly: bool) -> views.Coverage | None:
    (dataset,) = api.get("/api/datasets", views.Page[views.Dataset], job="j").items
    for found in dataset.coverage:
        if found.epoch == 0 and (found.covered if partly else found.exact):
            return found
    return None


def test_http_is_served_on_the_host_that_workers_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever binds the coordinator to loopback does not want its actions on every interface."""
    chosen: list[str] = []
    monkeypatch.setattr(
        "dtruntime.cli.coordinator.server.run",
        lambda config, **_: chosen.append(config.http_address),
    )
    for arguments in (["127.0.0.1:0"], [], ["127.0.0.1:0", "--http", "0.0.0.0:3000"]):
        assert main(["coordinator", *arguments]) == 0
    assert chosen == ["127.0.0.1:3000", "0.0.0.0:3000", "0.0.0.0:3000"]
