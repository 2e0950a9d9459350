"""A coordinator comes back from a copy of its state, made while it worked."""

import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from dtruntime import DatasetRegistry
from dtruntime.client import Observer
from dtruntime.testing import LocalCoordinator
from dtruntime.types import JobStatus, Membership
from tests.integration.workers import remote_workers

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"


def documented_back_up() -> Callable[[Path, Path], None]:
    """The function that the documentation tells people to use."""
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Callable[[Path, Path], None]] = {}
    exec(compile(block, str(PAGE), "exec"), names)
    return names["back_up"]


def status_of(coordinator: LocalCoordinator) -> JobStatus:
    with Observer(coordinator.url) as observer:
        return observer.status("default")


def test_copy_made_while_workers_register_brings_ranks_and_datasets_back(tmp_path: Path) -> None:
    back_up, copy = documented_back_up(), tmp_path / "copy.db"
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
            back_up(coordinator.data_dir, copy)
        finally:
            stop.set()
            busy.join()
        coordinator.kill()
    shutil.rmtree(tmp_path / "first")
    (tmp_path / "second").mkdir()
    shutil.copy(copy, tmp_path / "second" / "state.db")
    with LocalCoordinator(data_dir=tmp_path / "second") as restored:
        after = status_of(restored)
        assert (after.generation, after.world_size) == (before.generation, before.world_size)
        assert [(w.worker_id, w.rank, w.incarnation) for w in after.workers] == [
            (w.worker_id, w.rank, w.incarnation) for w in before.workers
        ]
        registry = DatasetRegistry(restored.url)
        assert registry.describe("before").total_samples == 1000


def test_members_of_the_copy_carry_on_with_the_restored_coordinator(tmp_path: Path) -> None:
    back_up, copy = documented_back_up(), tmp_path / "copy.db"
    with (
        LocalCoordinator(data_dir=tmp_path / "state") as coordinator,
        remote_workers(2, coordinator) as workers,
    ):
        back_up(coordinator.data_dir, copy)
        coordinator.kill()
        for file in coordinator.data_dir.glob("state.db*"):
            file.unlink()
        shutil.copy(copy, coordinator.data_dir / "state.db")
        coordinator.start()
        for wait in [worker.barrier("after") for worker in workers]:
            wait.result(60)
        status = status_of(coordinator)
        assert [w.membership for w in status.workers] == [Membership.LIVE] * 2
