"""What the coordinator knows of programs that use the SDK without `Run`."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from dtruntime.testing import LocalCoordinator, WorkerProcess, eventually
from tests.support.command_line import strata
from tests.support.http_api import Api
from tests.support.programs.plain_programs import LOADER, MANAGER, ORCHESTRATOR


@contextmanager
def started(
    served: LocalCoordinator, job: str, program: str, *arguments: object, count: int = 1
) -> Iterator[list[WorkerProcess]]:
    env = {"COORDINATOR_URL": served.url, "STRATA_JOB": job}
    with ExitStack() as stack:
        workers = [
            stack.enter_context(WorkerProcess(program, [str(a) for a in arguments], env=env))
            for _ in range(count)
        ]
        for worker in workers:
            worker.expect("registered")
        yield workers


class Seen:
    """The job as the API shows it."""

    def __init__(self, api: Api, job: str) -> None:
        self._api, self._job = api, job

    @property
    def all(self) -> Any:
        return self._api.ask("/api/dashboard", job=self._job).json()

    @property
    def metrics(self) -> Any:
        return self.all["metrics"]

    def states(self) -> list[str]:
        return sorted(w["state"] for w in self.all["workers"] if w["membership"] == "live")

    def until(self, *states: str) -> None:
        eventually(lambda: self.states() == sorted(states), what=f"states {states}")


def test_orchestrator_alone_waits_and_is_otherwise_not_known(
    served: LocalCoordinator, api: Api, job: str
) -> None:
    seen = Seen(api, job)
    with started(served, job, ORCHESTRATOR, count=3) as workers:
        seen.until("idle", "idle", "idle")
        workers[0].send("go")
        workers[1].send("go")
        seen.until("idle", "waiting", "waiting")
        assert seen.metrics["goodput"] is None, "nobody knows when these train"
        assert seen.metrics["steps_per_second"] is None
        assert seen.metrics["samples_per_second"] is None
        workers[2].send("go")
        for worker in workers:
            worker.expect("passed")
        seen.until("idle", "idle", "idle")
        measured = eventually(lambda: m if (m := seen.metrics)["barriers_measured"] else None)
        assert measured["barriers_measured"] == 1
        assert measured["barrier_p50_ms"] == measured["barrier_p99_ms"]
        (row,) = [row for row in seen.all["jobs"] if row["job"] == job]
        assert (row["world_size"], row["live_workers"]) == (0, 3)
        told = strata("status", "--url", served.url, "--job", job).stdout
        assert "elastic world   3 live" in told
        assert "epoch" not in told, "nobody has spoken of epochs"


def test_loader_tells_what_its_program_does(served: LocalCoordinator, api: Api, job: str) -> None:
    seen = Seen(api, job)
    with started(served, job, LOADER) as (worker,):
        seen.until("idle")
        worker.send("begin")
        seen.until("training")
        eventually(lambda: seen.all["tasks"][0]["state"] == "running", what="the run is seen")
        for _ in range(20):
            worker.send("next")
            worker.expect("trained")
        worker.expect("epoch 0")
        eventually(lambda: seen.all["tasks"][0]["epoch"] == 1, what="the next epoch")
        assert seen.all["tasks"][0]["completed_epochs"] == 1
        metrics = eventually(lambda: m if (m := seen.metrics)["samples_per_second"] else None)
        assert 0 < metrics["samples_per_second"] <= 400
        assert 0 < metrics["goodput"] <= 1
        seen.until("idle")
        worker.send("begin")
        seen.until("training")
        worker.close_input()
        worker.wait()
    finished = eventually(lambda: s if (s := seen.all)["metrics"]["workers_live"] == 0 else None)
    assert finished["metrics"]["goodput"] is None
    assert finished["metrics"]["samples_per_second"] is None


@pytest.mark.long
def test_waiting_for_data_is_loading(served: LocalCoordinator, api: Api, job: str) -> None:
    seen = Seen(api, job)
    slow = LOADER.replace("time.sleep(0.05)", "time.sleep(1.5)")
    with started(served, job, slow) as (worker,):
        worker.send("begin")
        seen.until("loading")
        worker.send("next")
        seen.until("training")


def test_checkpoint_of_one_writer_has_a_duration_and_a_rate(
    served: LocalCoordinator, api: Api, job: str, tmp_path: Path
) -> None:
    seen = Seen(api, job)
    with (
        started(served, job, ORCHESTRATOR),
        started(served, job, MANAGER, tmp_path) as (worker,),
    ):
        worker.send("save")
        seen.until("checkpointing", "idle")
        (tmp_path / "disk").touch()
        worker.expect("saved 1")
        seen.until("idle", "training")
        (saved,) = seen.all["checkpoints"]
        assert (saved["size_bytes"], saved["parts"]) == (3_000_000, 1)
        assert saved["duration_seconds"] > 0
        assert "strata" not in " ".join(saved["metadata"])
        rate = "checkpoint_bytes_per_second"
        metrics = eventually(lambda: m if (m := seen.metrics)[rate] else None)
        assert metrics[rate] == saved["size_bytes"] / saved["duration_seconds"]
        points = api.ask("/api/history", job=job).json()["points"]
        assert [p[rate] for p in points if p[rate] is not None] == [metrics[rate]]
        (took,) = [
            line.split()[-1]
            for line in api.ask("/metrics").text.splitlines()
            if line.startswith("strata_checkpoint_last_duration_seconds{") and job in line
        ]
        assert float(took) == saved["duration_seconds"]
    served.stop()
    served.start()
    (kept,) = seen.all["checkpoints"]
    assert kept["duration_seconds"] == saved["duration_seconds"]
