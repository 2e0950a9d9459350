"""Parts of any rank: a run that was saved by some ranks goes on with fewer or more."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtruntime import TrainingOrchestrator
from dtruntime.checkpoint.manager import CheckpointManager
from dtruntime.errors import CheckpointNotFoundError, StorageError
from dtruntime.testing import LocalCoordinator


@contextmanager
def managers(url: str, job: str, world: int, folder: Path) -> Iterator[list[CheckpointManager]]:
    """One manager for each rank of a job; a process would have one."""
    workers = [
        TrainingOrchestrator(
            coordinator_url=url, job=job, rank=rank, world_size=world, worker_id=f"worker-{rank}"
        )
        for rank in range(world)
    ]
    for worker in workers:
        worker.register()
    made = [CheckpointManager(folder, sharded=True, orchestrator=worker) for worker in workers]
    try:
        yield made
    finally:
        for manager in made:
            manager.close()
        for worker in workers:
            worker.deregister()


def state(rank: int, step: int) -> dict[str, Any]:
    """Replicas: rank 0 saves the model for all, and each rank what is its own."""
    own = {"own": {"rank": rank, "rng": np.arange(10) + 100 * rank + step}}
    return own if rank else {"shared": {"model": np.full(200_000, step)}, **own}


def save(ranks: list[CheckpointManager], step: int) -> None:
    handles = [manager.save(state(rank, step), step) for rank, manager in enumerate(ranks)]
    for handle in handles:
        handle.wait(60)


@pytest.mark.parametrize("world", [2, 6])
def test_parts_of_four_ranks_are_read_by_another_number(
    coordinator: LocalCoordinator, job: str, tmp_path: Path, world: int
) -> None:
    with managers(coordinator.url, f"{job}-before", 4, tmp_path) as ranks:
        save(ranks, 1)
        save(ranks, 2)
    with managers(coordinator.url, f"{job}-after", world, tmp_path) as ranks:
        for number, manager in enumerate(ranks):
            assert manager.ranks() == [0, 1, 2, 3]
            assert manager.newest_step() == 2
            model = manager.load_state(rank=0, keys=["shared"])["shared"]["model"]
            assert (model == 2).all()
            taken = range(number, 4, world)
            own = [manager.load_state(1, rank=rank)["own"] for rank in taken]
            assert [one["rank"] for one in own] == list(taken)
            assert [one["rng"][0] for one in own] == [100 * rank + 1 for rank in taken]
            if number < 4:
                assert manager.load_state()["own"]["rank"] == number, "its own, where there is one"
            else:
                with pytest.raises(StorageError, match=r"no part of rank .*rank=.*ranks\(\)"):
                    manager.load_state()
        with pytest.raises(CheckpointNotFoundError, match=r"rank 9 \(there: 0, 1, 2, 3\)"):
            ranks[0].load_state(rank=9)
        save(ranks, 3)
        assert ranks[0].ranks() == list(range(world))
        assert ranks[0].ranks(2) == [0, 1, 2, 3]


def test_parts_are_read_without_a_coordinator(
    coordinator: LocalCoordinator, job: str, tmp_path: Path
) -> None:
    with managers(coordinator.url, job, 2, tmp_path) as ranks:
        save(ranks, 5)
    with CheckpointManager(tmp_path) as reader:
        info = reader.latest()
        assert info is not None
        assert (info.step, info.parts) == (5, 2)
        assert [reader.load_state(rank=rank)["own"]["rank"] for rank in reader.ranks()] == [0, 1]
