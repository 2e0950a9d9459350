"""Shares, epochs and endings as a new user sees them, after the programs of the documentation."""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dtruntime.testing import LocalCoordinator, WorkerProcess, eventually
from tests.support.command_line import strata
from tests.support.http_api import Api

SAMPLES = 1200

PARTS = """
import sys
from dtruntime import DatasetRegistry, TrainingOrchestrator

folder, order = sys.argv[1:3]
with TrainingOrchestrator() as worker:
    worker.register()
    datasets = DatasetRegistry()
    datasets.register("train", folder, "parquet", shuffle=True)
    worker.barrier("begin")
    loader = datasets.loader("train", batch_size=50, order=order)
    for epoch in range(2):
        for step, batch in enumerate(loader):
            worker.report(step=step, epoch=epoch, state="training")
            if not step:
                print("reads", epoch, flush=True)
                input()
        print("read", epoch, flush=True)
        worker.barrier(f"epoch-{epoch}")
"""


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    pq.write_table(pa.table({"n": range(SAMPLES)}), folder / "part.parquet")
    return folder


class Job:
    """One job, as everything shows it."""

    def __init__(self, served: LocalCoordinator, api: Api, name: str) -> None:
        self.url, self.name, self._api = served.url, name, api

    @contextmanager
    def workers(
        self, count: int, program: str, *arguments: object, **env: str
    ) -> Iterator[list[WorkerProcess]]:
        """So many processes of a program."""
        given = [str(argument) for argument in arguments]
        told = {"COORDINATOR_URL": self.url, "STRATA_JOB": self.name, "WORLD_SIZE": str(count)}
        with ExitStack() as stack:
            yield [
                stack.enter_context(WorkerProcess(program, given, env={**told, **env}))
                for _ in range(count)
            ]

    def until_nobody_is_live(self) -> None:
        eventually(lambda: not self.seen()["metrics"]["workers_live"], what="nobody is live")

    def seen(self) -> Any:
        return self._api.ask("/api/dashboard", job=self.name).json()

    def points(self) -> list[Any]:
        found: list[Any] = self._api.ask("/api/history", job=self.name).json()["points"]
        return found

    def task(self) -> Any:
        (task,) = self.seen()["tasks"]
        return task

    def has_completed(self, epochs: int) -> None:
        """Everywhere."""
        eventually(lambda: self.task()["completed_epochs"] == epochs, what=f"{epochs} completed")
        assert re.search(rf"\b{epochs} epochs? completed", self.status())

    def dataset(self) -> Any:
        (found,) = self._api.ask("/api/datasets", job=self.name).json()["items"]
        return found

    def shows_no_shares(self) -> bool:
        found = self.dataset()
        return (found["shards_per_rank"], found["last_change"]) == ([], None)

    def shown(self, *options: str) -> str:
        told = strata("datasets", "show", "train", "--url", self.url, "--job", self.name, *options)
        assert told.returncode == 0, told.stderr
        return told.stdout

    def status(self) -> str:
        return strata("status", "--url", self.url, "--job", self.name).stdout


@pytest.fixture
def run(served: LocalCoordinator, api: Api, job: str) -> Job:
    return Job(served, api, job)


def go_on(workers: list[WorkerProcess], *lines: str) -> None:
    """Let all workers go on from where they say they are."""
    for line in lines:
        for worker in workers:
            worker.expect(line)
        for worker in workers:
            worker.send("go")


def test_ranks_that_share_the_batches_have_no_shards_of_their_own(run: Job, rows: Path) -> None:
    with run.workers(2, PARTS, rows, "global") as workers:
        for worker in workers:
            worker.expect("reads 0")
        eventually(run.shows_no_shares, what="no shares")
        assert "a part of every batch" in run.shown()
        assert json.loads(run.shown("--json"))["share"] is None
        for worker in workers:
            worker.send("go")
        go_on(workers, "reads 1")
        for worker in workers:
            worker.wait()
    run.until_nobody_is_live()
    eventually(run.shows_no_shares, what="no shares")
    assert "0 to 1,200 samples" not in run.shown()


@pytest.mark.long
def test_order_of_a_dataset_is_known_after_a_restart(
    run: Job, rows: Path, served: LocalCoordinator
) -> None:
    with run.workers(2, PARTS, rows, "global") as workers:
        go_on(workers, "reads 0")
        for worker in workers:
            worker.expect("reads 1")
        served.stop()
        served.start()
        eventually(run.shows_no_shares, what="no shares")
        assert "a part of every batch" in run.shown()


def test_ranks_that_share_the_shards_are_shown_with_them(run: Job, rows: Path) -> None:
    with run.workers(2, PARTS, rows, "affinity") as workers:
        eventually(lambda: any("reads 0" in worker.lines for worker in workers))
        shares = eventually(lambda: run.dataset()["shards_per_rank"], what="shares")
        assert sorted(share["samples"] for share in shares) == [0, SAMPLES]
        assert "0 to 1 shard, 0 to 1,200 samples" in run.shown()


# Epochs that were read are completed


def test_last_epoch_of_a_program_without_a_run_is_completed(run: Job, rows: Path) -> None:
    with run.workers(1, PARTS, rows, "global") as workers:
        go_on(workers, "reads 0", "reads 1")
        workers[0].wait()
    run.until_nobody_is_live()
    assert run.shown().count("exactly once") == 2
    run.has_completed(2)


@pytest.mark.deaths
def test_death_in_an_epoch_leaves_the_one_before_completed(run: Job, rows: Path) -> None:
    with run.workers(3, PARTS, rows, "global") as workers:
        go_on(workers, "reads 0")
        for worker in workers:
            worker.expect("reads 1")
        workers[1].kill()
        eventually(lambda: run.seen()["metrics"]["workers_dead"], what="a death")
        assert "1 epoch completed" in run.status()
        for worker in (workers[0], workers[2]):
            worker.kill()
    run.until_nobody_is_live()
    run.has_completed(1)


@pytest.mark.long
def test_epochs_of_an_earlier_start_are_not_counted_again(run: Job, rows: Path) -> None:
    for _ in range(2):
        with run.workers(1, PARTS, rows, "global") as workers:
            workers[0].expect("reads 0")
            eventually(lambda: run.task()["epoch"] == 0, what="the first epoch")
            assert "2 epochs completed" not in run.status()
            workers[0].send("go")
            workers[0].expect("reads 1")
            assert "1 epoch completed" in run.status()
            workers[0].send("go")
            workers[0].wait()
        run.until_nobody_is_live()
    run.has_completed(2)


# A finished run reads as finished

FIRST_RUN = """
import sys
from dtruntime import Run

with Run(sys.argv[1], data=400, batch_size=50, epochs=2, save_steps=4) as run:
    for batch in run:
        pass
print(run.ending, run.step, flush=True)
"""


def finish(run: Job, count: int, folder: Path, **env: str) -> None:
    """Start so many, one after the other has left if they find everything done."""
    with run.workers(count, FIRST_RUN, folder, **env) as workers:
        for worker in workers:
            worker.expect("finished")
            worker.wait()


def reads_as_finished(run: Job, epochs: int) -> None:
    run.until_nobody_is_live()
    eventually(lambda: run.task()["state"] == "finished", what="the run is finished")
    assert run.task()["progress"] == 1.0
    run.has_completed(epochs)
    status = run.status()
    assert "not registered" not in status
    assert "expected" not in status


@pytest.mark.long
def test_finished_program_that_is_run_again_reads_as_finished(run: Job, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    finish(run, 2, folder)
    reads_as_finished(run, 2)
    for _ in range(2):
        # One alone: the other one has come and gone.
        finish(run, 1, folder, WORLD_SIZE="2")
    reads_as_finished(run, 2)


@pytest.mark.long
def test_program_that_finished_alone_reads_as_finished_on_several_workers(
    run: Job, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    finish(run, 1, folder, COORDINATOR_URL="")
    for _ in range(2):
        finish(run, 1, folder, WORLD_SIZE="4")
    reads_as_finished(run, 2)
    assert "yet" not in run.status()


REPORTING_RUN = """
import sys
import time
from dtruntime import Run

with Run(sys.argv[1], data=400, batch_size=20, epochs=2, save_steps=10) as run:
    for batch in run:
        run.report(loss=1 / (run.step + 1))
        time.sleep(0.05)
print(run.ending, run.step, flush=True)
"""


@pytest.mark.long
def test_figures_of_a_finished_run_are_those_of_its_end(run: Job, tmp_path: Path) -> None:
    with run.workers(1, REPORTING_RUN, tmp_path / "run") as (worker,):
        worker.expect("finished 40")
        worker.wait()
    run.until_nobody_is_live()
    last = eventually(lambda: None if (p := run.points()[-1])["workers_live"] else p)
    task, metrics = run.task(), run.seen()["metrics"]
    completed = re.search(r"\d+ epochs? completed", run.status())
    assert {
        "step": task["step"],
        "progress": task["progress"],
        "samples a second": metrics["samples_per_second"],
        "loss now": last["loss"],
        "completed": completed and completed[0],
    } == {
        "step": 40,
        "progress": 1.0,
        "samples a second": None,
        "loss now": None,
        "completed": "2 epochs completed",
    }


ONE_BARRIER = """
import time
from dtruntime import TrainingOrchestrator

with TrainingOrchestrator() as worker:
    worker.register()
    print("registered", flush=True)
    input()
    began = time.perf_counter()
    worker.barrier("once")
    print("took", (time.perf_counter() - began) * 1000, flush=True)
    input()
"""


def test_quantiles_of_one_barrier_are_its_duration(run: Job) -> None:
    with run.workers(2, ONE_BARRIER) as workers:
        for worker in workers:
            worker.expect("registered")
            worker.send("go")
        took = max(float(worker.expect("took ").split()[1]) for worker in workers)
        shown = eventually(lambda: m if (m := run.seen()["metrics"])["barrier_p50_ms"] else None)
        assert shown["barrier_p50_ms"] == shown["barrier_p99_ms"]
        assert 0 < shown["barrier_p50_ms"] <= took
        for worker in workers:
            worker.send("go")
            worker.wait()


# An epoch that nobody reads


def test_epoch_that_everybody_left_is_left_unfinished(run: Job, rows: Path) -> None:
    with run.workers(2, PARTS, rows, "global") as workers:
        go_on(workers, "reads 0")
        for worker in workers:
            worker.expect("reads 1")
        workers[0].send("go")
        workers[0].expect("read 1")
        assert "running" in run.shown()
        assert "left unfinished" not in run.shown()
        workers[1].close_input()
        run.until_nobody_is_live()
    assert "running" not in run.shown()
    assert "left unfinished" in run.shown()
    assert json.loads(run.shown("--json"))["live_workers"] == 0
