"""A coordinator comes back from a copy of its state, made while it worked."""

import shutil
import threading
from pathlib import Path

import pytest

from dtruntime import DatasetRegistry
from dtruntime.client import Observer
from dtruntime.testing import LocalCoordinator, eventually
from dtruntime.types import JobStatus, Membership
from tests.support.command_line import Result, strata
from tests.support.raw_client import RawClient, Refusal
from tests.support.workers import remote_workers


def strata_state(*arguments: str | Path) -> Result:
    return strata("state", *arguments)


def done(result: Result) -> str:
    assert result.returncode == 0, result.stderr
    return result.stdout


def status_of(coordinator: LocalCoordinator) -> JobStatus:
    with Observer(coordinator.url) as observer:
        return observer.status("default")


def test_copy_made_while_workers_register_brings_ranks_and_datasets_back(tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    with (
        LocalCoordinator(data_dir=tmp_path / "first") as coordinator,
        remote_workers(3, coordinator),
    ):
        registry = DatasetRegistry(coordinator.url)
        registry.register_dataset("before", 1000, 100)
        before = status_of(coordinator)
        stop = threading.Event()

        def go_on() -> None:
            number = 0
            while not stop.is_set():
                registry.register_dataset(f"during-{number}", 1000, 100)
                number += 1

        busy = threading.Thread(target=go_on)
        busy.start()
        try:
            done(strata_state("backup", copy, "--data-dir", coordinator.data_dir))
        finally:
            stop.set()
            busy.join()
        coordinator.kill()
    shutil.rmtree(tmp_path / "first")
    assert "intact" in done(strata_state("check", copy))
    done(strata_state("restore", copy, "--data-dir", tmp_path / "second"))
    with LocalCoordinator(data_dir=tmp_path / "second") as restored:
        after = status_of(restored)
        assert (after.generation, after.world_size) == (before.generation, before.world_size)
        assert [(w.worker_id, w.rank, w.incarnation) for w in after.workers] == [
            (w.worker_id, w.rank, w.incarnation) for w in before.workers
        ]
        registry = DatasetRegistry(restored.url)
        assert registry.describe("before").total_samples == 1000


@pytest.mark.long
def test_members_of_the_copy_carry_on_with_the_restored_coordinator(tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    with (
        LocalCoordinator(data_dir=tmp_path / "state") as coordinator,
        remote_workers(2, coordinator) as workers,
    ):
        done(strata_state("backup", copy, "--data-dir", coordinator.data_dir))
        coordinator.kill()
        for file in coordinator.data_dir.glob("state.db*"):
            file.unlink()
        refused = strata_state("restore", copy, "--data-dir", coordinator.data_dir)
        assert refused.returncode == 1
        assert "--force" in refused.stderr
        done(strata_state("restore", copy, "--data-dir", coordinator.data_dir, "--force"))
        coordinator.start()
        for wait in [worker.barrier("after") for worker in workers]:
            wait.result(60)
        status = status_of(coordinator)
        assert [w.membership for w in status.workers] == [Membership.LIVE] * 2


def test_live_state_is_checked_and_not_restored_over(tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    with LocalCoordinator(data_dir=tmp_path / "state") as coordinator:
        with RawClient(coordinator.url) as client:
            client.register()
        assert "intact: 2 records of 1 jobs" in done(
            strata_state("check", "--data-dir", coordinator.data_dir)
        )
        done(strata_state("backup", copy, "--data-dir", coordinator.data_dir))
        refused = strata_state("restore", copy, "--data-dir", coordinator.data_dir, "--force")
        assert refused.returncode == 1
        assert f"in use by another coordinator (process {coordinator.pid})" in refused.stderr


def test_worker_of_an_emptied_coordinator_proves_that_there_was_a_past(tmp_path: Path) -> None:
    with LocalCoordinator(data_dir=tmp_path / "state", log_path=tmp_path / "log") as coordinator:
        with remote_workers(1, coordinator):
            coordinator.kill()
            shutil.rmtree(coordinator.data_dir)
            coordinator.data_dir.mkdir()
            coordinator.start()
            eventually(lambda: "state.lost" in coordinator.log, what="the loss is logged")
            with RawClient(coordinator.url) as client:
                (event,) = [e for e in client.events() if e.kind == "coordinator.state_lost"]
        assert event.fields["restored"] == "False"
        (line,) = [x for x in coordinator.log.splitlines() if "state.lost" in x and "ERROR" in x]
        assert "strata state restore COPY" in line


def test_worker_that_registered_after_the_copy_is_told_so(tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    with (
        LocalCoordinator(data_dir=tmp_path / "state") as coordinator,
        RawClient(coordinator.url) as client,
    ):
        first = client.register()
        done(strata_state("backup", copy, "--data-dir", coordinator.data_dir))
        second = client.register()
        coordinator.stop()
        done(strata_state("restore", copy, "--data-dir", coordinator.data_dir, "--force"))
        coordinator.start()
        state_id = first.registration.state_id
        assert first.heartbeat(state_id=state_id).live_workers == 1
        with pytest.raises(Refusal, match="restored from a copy made before this worker"):
            second.heartbeat(state_id=state_id)
        kinds = [e.kind for e in client.events()]
        assert kinds.count("coordinator.state_lost") == 1
        again = client.register(state_id=state_id)
        assert again.registration.state_id != state_id
        assert [e.kind for e in client.events()].count("coordinator.state_lost") == 1
