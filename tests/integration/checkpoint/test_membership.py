"""Managers and orchestrators that are made, registered and left in any order."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtruntime import CheckpointManager, TrainingOrchestrator
from dtruntime.client.observer import Observer
from dtruntime.errors import SyncError
from dtruntime.testing import LocalCoordinator
from tests.support.raw_client import RawClient

Save = Callable[[CheckpointManager, int], None]


def save_now(manager: CheckpointManager, step: int) -> None:
    manager.save(state(step), step).wait()


def save_async(manager: CheckpointManager, step: int) -> None:
    async def main() -> None:
        handle = await manager.save_async(state(step), step)
        await handle

    asyncio.run(main())


def state(step: int) -> dict[str, Any]:
    return {"step": step, "w": np.full(500_000, step, np.float32)}


def orchestrator(coordinator: LocalCoordinator, job: str, rank: int = 0) -> TrainingOrchestrator:
    return TrainingOrchestrator(coordinator_url=coordinator.url, job=job, rank=rank)


def known_steps(coordinator: LocalCoordinator, job: str) -> list[int]:
    """The steps that the coordinator knows."""
    with Observer(coordinator.url, patience=10.0) as observer:
        return sorted(checkpoint.step for checkpoint in observer.checkpoints(job))


@pytest.mark.parametrize("save", [save_now, save_async])
def test_manager_made_before_registration_tells_the_coordinator(
    save: Save, coordinator: LocalCoordinator, job: str, tmp_path: Path
) -> None:
    with CheckpointManager(tmp_path) as manager:
        save(manager, 1)
        with orchestrator(coordinator, job) as worker:
            worker.register()
            save(manager, 2)
            assert known_steps(coordinator, job) == [2]
        save(manager, 3)
    assert known_steps(coordinator, job) == [2]


@pytest.mark.parametrize("save", [save_now, save_async])
def test_manager_tells_whoever_is_registered_when_it_saves(
    save: Save, coordinator: LocalCoordinator, job: str, tmp_path: Path
) -> None:
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            worker = orchestrator(coordinator, f"{job}-{step}")
            worker.register()
            save(manager, step)
            worker.deregister()
        assert manager.steps() == [1, 2]
    assert known_steps(coordinator, f"{job}-1") == [1]
    assert known_steps(coordinator, f"{job}-2") == [2]


def test_sharded_manager_made_before_registration_commits_through_the_coordinator(
    coordinator: LocalCoordinator, job: str, tmp_path: Path
) -> None:
    with CheckpointManager(tmp_path, sharded=True) as manager:
        assert manager.steps() == []
        with pytest.raises(ValueError, match="sharded checkpoints need a registered worker"):
            manager.save(state(1), 1)
        with orchestrator(coordinator, job) as worker:
            worker.register()
            manager.save(state(2), 2).wait()
            assert manager.load_state()["step"] == 2
    assert known_steps(coordinator, job) == [2]


@pytest.mark.parametrize("sharded", [False, True])
def test_saves_under_way_are_committed_before_their_member_leaves(
    sharded: bool, coordinator: LocalCoordinator, job: str, tmp_path: Path
) -> None:
    with CheckpointManager(tmp_path, sharded=sharded) as manager:
        with orchestrator(coordinator, job) as worker:
            worker.register()
            for step in (1, 2, 3):
                manager.save(state(step), step)
        assert manager.steps() == [1, 2, 3]
    assert known_steps(coordinator, job) == [1, 2, 3]


def test_manager_of_a_worker_that_was_replaced_stores_nothing(
    coordinator: LocalCoordinator, job: str, tmp_path: Path
) -> None:
    with CheckpointManager(tmp_path) as manager:
        with orchestrator(coordinator, job) as worker:
            worker.register()
            manager.save(state(1), 1).wait()
            with RawClient(coordinator.url, job) as other:
                other.register(rank=0)
            with pytest.raises(SyncError):
                worker.beat()
            with pytest.raises(OSError, match="registered again"):
                manager.save(state(2), 2).wait()
        with pytest.raises(OSError, match="registered again"):
            manager.save(state(3), 3).wait()
        assert manager.steps() == [1]
