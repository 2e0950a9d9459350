"""A disk that keeps the coordinator waiting."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dtruntime.config import CoordinatorConfig
from dtruntime.coordinator.service import CoordinatorService
from dtruntime.coordinator.store import SqliteStore
from dtruntime.rpc.gen import coordinator_pb2 as pb

TIMEOUT = 0.4


class SlowDisk(SqliteStore):
    """Commits end when they are allowed to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.allowed = threading.Event()
        self.allowed.set()

    def _commit(self, batch, fsync) -> None:
        if fsync:
            assert self.allowed.wait(60)
        super()._commit(batch, fsync)


class Coordinator:
    """A service on that disk, and the time by which it judges."""

    def __init__(self, folder: Path) -> None:
        self.now = 1000.0
        self.disk = SlowDisk(folder)
        config = CoordinatorConfig(
            heartbeat_interval_ms=100, heartbeat_timeout_ms=round(TIMEOUT * 1000)
        )
        self.service = CoordinatorService(self.disk, config, lambda: self.now)

    async def call(self, method: str, request):
        answer = self.service.handle(method, request)
        return await answer if isinstance(answer, asyncio.Future) else answer

    def let_pass(self, seconds: float) -> None:
        """As its timer does it, every 50 ms."""
        for _ in range(round(seconds / 0.05)):
            self.now += 0.05
            self.service.tick()

    async def until_slow(self) -> None:
        await asyncio.sleep(2 * self.service.machine.stall)
        assert self.disk.waiting_seconds > self.service.machine.stall


@pytest.fixture
async def coordinator(tmp_path: Path) -> AsyncIterator[Coordinator]:
    made = Coordinator(tmp_path)
    yield made
    made.disk.allowed.set()
    await made.disk.close()


async def test_members_that_wait_for_the_disk_do_not_die_of_it(coordinator, caplog):
    member = await coordinator.call("RegisterWorker", pb.WorkerInfo())
    beat = pb.HeartbeatRequest(worker_id=member.worker_id, incarnation=member.incarnation)
    await coordinator.call("Heartbeat", beat)
    coordinator.service.tick()

    coordinator.disk.allowed.clear()
    dataset = pb.DatasetInfo(dataset_id="d", total_samples=10, shard_size=10)
    stored = asyncio.ensure_future(coordinator.call("RegisterDataset", dataset))
    await asyncio.sleep(0)
    answered = asyncio.ensure_future(coordinator.call("Heartbeat", beat))
    await coordinator.until_slow()
    coordinator.let_pass(20 * TIMEOUT)
    assert not answered.done()
    coordinator.disk.allowed.set()
    await asyncio.gather(stored, answered)
    coordinator.let_pass(TIMEOUT / 2)

    roster = coordinator.service.machine.jobs[member.job].roster
    assert roster.by_id[member.worker_id].live
    assert caplog.text.count("state.disk_is_slow") == 1
    coordinator.let_pass(2 * TIMEOUT)
    assert not roster.by_id[member.worker_id].live, "whoever stays silent after that is dead"
