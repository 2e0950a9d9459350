"""``strata jobs`` and ``strata datasets rm`` against a real coordinator, also after a restart."""

import json
from pathlib import Path

import pytest

from dtruntime import DatasetRegistry, ShardError, TrainingOrchestrator
from dtruntime.client import Observer
from dtruntime.errors import SyncError
from dtruntime.testing import LocalCoordinator, WorkerProcess
from tests.support.command_line import strata


def test_job_is_listed_shown_and_removed_for_good(own_coordinator: LocalCoordinator) -> None:
    url = own_coordinator.url
    with TrainingOrchestrator(coordinator_url=url, job="old") as worker:
        worker.register()
        registry = DatasetRegistry()
        registry.register_dataset("train", 100, 10)
        worker.commit_checkpoint("c-1", 1, path="/somewhere")
        (listed,) = json.loads(strata("jobs", "ls", "--url", url, "--json").stdout)["jobs"]
        assert (listed["job"], listed["live_workers"]) == ("old", 1)
        assert (listed["dataset_count"], listed["checkpoint_count"]) == (1, 1)
        assert "worker-0" in strata("jobs", "show", "old", "--url", url).stdout
        refused = strata("jobs", "rm", "old", "--url", url)
        assert refused.returncode == 1
        assert "1 live workers (worker-0)" in refused.stderr
        assert "--force" in refused.stderr
    removed = strata("jobs", "rm", "old", "--url", url)
    assert removed.returncode == 0
    assert "Stored checkpoints and data stay" in removed.stdout
    own_coordinator.kill()
    own_coordinator.start()
    assert json.loads(strata("jobs", "ls", "--url", url, "--json").stdout)["jobs"] == []
    with Observer(url) as observer:
        assert [event.kind for event in observer.events("old")][-1] == "job.removed"
    with DatasetRegistry(url, job="old") as registry:
        registry.register_dataset("train", 7, 7)


def test_worker_of_a_job_removed_by_force_is_told(own_coordinator: LocalCoordinator) -> None:
    with TrainingOrchestrator(coordinator_url=own_coordinator.url, job="old") as worker:
        worker.register()
        report = strata("jobs", "rm", "old", "--force", "--url", own_coordinator.url, "--json")
        assert json.loads(report.stdout)["live_workers"] == 1
        with pytest.raises(SyncError) as caught:
            worker.barrier("step", timeout_ms=5000)
        assert caught.value.reason == "superseded"


def test_dataset_is_removed_and_registered_anew(coordinator: LocalCoordinator, job: str) -> None:
    with DatasetRegistry(coordinator.url, job=job) as registry:
        registry.register_dataset("train", 100, 10)
        with pytest.raises(ShardError, match="STRATA_JOB") as caught:
            registry.register_dataset("train", 100, 20)
        assert "shard_size: registered 10, given 20" in str(caught.value)
        command = f"strata datasets rm train --job {job}"
        assert command in str(caught.value)
        done = strata(*command.split()[1:], "--url", coordinator.url)
        assert done.returncode == 0, done.stderr
        registry.register_dataset("train", 100, 20)
        assert registry.describe("train").shard_size == 20


def test_command_without_a_job_takes_the_one_at_work(own_coordinator: LocalCoordinator) -> None:
    url = own_coordinator.url
    for job in ("first", "second"):
        with DatasetRegistry(url, job=job) as registry:
            registry.register_dataset("train", 100, 10)
    refused = strata("datasets", "show", "train", "--url", url)
    assert refused.returncode == 1
    assert "first, second" in refused.stderr
    with TrainingOrchestrator(coordinator_url=url, job="second") as worker:
        worker.register()
        assert "of job second" in strata("datasets", "show", "train", "--url", url).stdout
        asked = strata("actions", "request", "checkpoint", "--url", url, "--json")
        assert json.loads(asked.stdout)["actions"][0]["job"] == "second"


@pytest.mark.long
def test_programs_that_name_no_job_do_not_meet(
    own_coordinator: LocalCoordinator, tmp_path: Path
) -> None:
    program = """
import sys
from dtruntime import Run

with Run(sys.argv[1], data=int(sys.argv[2]), batch_size=10, save_steps=5) as run:
    for batch in run:
        pass
print("done after step", run.step, flush=True)
"""
    env = {"COORDINATOR_URL": own_coordinator.url}
    for name, samples in (("first", 100), ("second", 200)):
        script = tmp_path / f"{name}.py"
        script.write_text(program, encoding="utf-8")
        with WorkerProcess(script, [str(tmp_path / name), str(samples)], env=env) as process:
            process.expect(f"done after step {samples // 10}", timeout=120)
            assert process.wait(120) == 0
    with Observer(own_coordinator.url) as observer:
        assert observer.jobs() == ["first", "second"]
        stored = [observer.status(job).latest_checkpoint for job in ("first", "second")]
    assert [found and found.step for found in stored] == [10, 20]
