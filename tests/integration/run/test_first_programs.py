"""The first programs of a new user: what they store, and what the coordinator knows then."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from dtruntime import CheckpointManager
from dtruntime.client import Observer
from dtruntime.testing import LocalCoordinator
from dtruntime.types import JobStatus, Membership

ASYNC = """
import asyncio, os
from dtruntime import CheckpointManager, DatasetRegistry, TrainingOrchestrator

async def main():
    url, rank, world = os.environ["URL"], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    worker = TrainingOrchestrator(
        worker_id=f"worker-{rank}", coordinator_url=url, world_size=world, rank=rank
    )
    await worker.register_worker(ip="127.0.0.1", port=8080)
    data = DatasetRegistry(url)
    data.register("numbers", path="/data/numbers", format="parquet", total_samples=100_000,
                  shard_size=10_000, shuffle=True)
    print("files", *data.get_shard("numbers", worker_rank=rank, epoch=0))
    saves = CheckpointManager(os.environ["FOLDER"])
    for step in range(1000):
        if step % 500 == 0:
            await worker.wait_barrier(f"epoch_{step // 500}")
        if step % 100 == 0 and rank == 0:
            await saves.save_async(f"state {step}".encode(), step=step)
    await worker.wait_barrier("end")

asyncio.run(main())
"""

PLAIN = """
import io, os
from dtruntime import CheckpointManager, DatasetRegistry, TrainingOrchestrator, WorkerConfig

def main():
    config = WorkerConfig(
        coordinator_url=os.environ["URL"], gpu_count=8, heartbeat_interval_ms=5000
    )
    worker = TrainingOrchestrator(config)
    data = DatasetRegistry()
    saves = CheckpointManager(os.environ["FOLDER"])
    name = worker.register()
    data.register_dataset("numbers", total_samples=100_000, shard_size=10_000, shuffle=True)
    print("shards", *(s.start_index for s in data.get_shards("numbers", epoch=0)))
    for epoch in range(3):
        for step in range(epoch * 100, epoch * 100 + 100):
            if step % 50 == 0:
                worker.barrier(f"save_{step}")
                if name == "worker-0":
                    state = io.BytesIO(f"state {step}".encode())
                    saves.save(state.getvalue(), step, epoch)
        worker.barrier(f"epoch_{epoch}_complete")
    print("gpus", worker.get_status().gpu_count)

main()
"""

RESUMING = """
import asyncio, json, os
from dtruntime import CheckpointManager, DatasetRegistry, TrainingOrchestrator

async def main():
    url, rank, world = os.environ["URL"], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    worker = TrainingOrchestrator(
        worker_id=f"worker-{rank}", coordinator_url=url, world_size=world, rank=rank
    )
    await worker.register_worker(ip="127.0.0.1", port=8080)
    data = DatasetRegistry(url)
    data.register("numbers", "/data/numbers", "parquet", total_samples=1000)
    data.get_shard("numbers", worker_rank=rank, epoch=0)
    saves = CheckpointManager("/saves", backend="s3")
    try:
        first = json.loads(await saves.load(step=0))["step"]
    except FileNotFoundError:
        first = 0
    print("first", first)
    for step in range(first, int(os.environ["STEPS"])):
        if step % 5 == 0:
            await worker.wait_barrier(f"epoch_{step // 5}")
        if step % 10 == 0 and rank == 0:
            await saves.save_async(json.dumps({"step": step}).encode(), step=step)

asyncio.run(main())
"""


def start(program: str, url: str, job: str, folder: Path, **env: str) -> subprocess.Popen[str]:
    known = {"URL": url, "STRATA_JOB": job, "FOLDER": str(folder), **env}
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, **known},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output_of(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    return out


def known_of(coordinator: LocalCoordinator, job: str) -> JobStatus:
    with Observer(coordinator.url) as observer:
        return observer.status(job)


def stored_in(folder: Path) -> dict[int, bytes]:
    with CheckpointManager(folder) as manager:
        return {step: manager.load_bytes(step) for step in manager.steps()}


def check_known(status: JobStatus, workers: int, step: int) -> None:
    assert [w.membership for w in status.workers] == [Membership.LEFT] * workers
    assert status.dataset_count == 1
    assert status.latest_checkpoint is not None
    assert status.latest_checkpoint.step == step


def test_asynchronous_program_of_two_workers(
    coordinator: LocalCoordinator, job: str, tmp_path: Path
) -> None:
    both = [
        start(ASYNC, coordinator.url, job, tmp_path, RANK=str(rank), WORLD_SIZE="2")
        for rank in range(2)
    ]
    files = [output_of(process).split()[1:] for process in both]
    assert sorted(files[0] + files[1]) == [f"/data/numbers/shard_{i}.parquet" for i in range(10)]
    assert stored_in(tmp_path) == {step: b"state %d" % step for step in range(500, 1000, 100)}
    check_known(known_of(coordinator, job), workers=2, step=900)


def test_plain_program_of_one_worker(
    coordinator: LocalCoordinator, job: str, tmp_path: Path
) -> None:
    lines = output_of(start(PLAIN, coordinator.url, job, tmp_path)).splitlines()
    assert sorted(map(int, lines[0].split()[1:])) == list(range(0, 100_000, 10_000))
    assert lines[1] == "gpus 8"
    assert stored_in(tmp_path) == {step: b"state %d" % step for step in range(50, 300, 50)}
    check_known(known_of(coordinator, job), workers=1, step=250)


def test_program_that_loads_from_a_bucket_when_it_starts(
    coordinator: LocalCoordinator, job: str, tmp_path: Path, s3_server: dict[str, str]
) -> None:
    bucket: dict[str, Any] = s3_server | {"CHECKPOINT_BUCKET": "first-programs", "WORLD_SIZE": "2"}

    def train(steps: int) -> list[str]:
        both = [
            start(
                *(RESUMING, coordinator.url, job, tmp_path),
                **bucket,
                RANK=str(rank),
                STEPS=str(steps),
            )
            for rank in range(2)
        ]
        return [output_of(process).strip() for process in both]

    assert train(20) == ["first 0"] * 2
    assert stored_in_bucket(bucket) == {0: '{"step": 0}', 10: '{"step": 10}'}
    assert train(40) == ["first 10"] * 2
    assert stored_in_bucket(bucket) == {n: f'{{"step": {n}}}' for n in (0, 10, 20, 30)}
    check_known(known_of(coordinator, job), workers=2, step=30)


def stored_in_bucket(env: dict[str, str]) -> dict[int, str]:
    """What another process reads."""
    program = """
import json
from dtruntime import CheckpointManager
with CheckpointManager("/saves", backend="s3") as saves:
    found = {c.step: saves.get_checkpoint(c.checkpoint_id).decode() for c in saves.checkpoints()}
    print(json.dumps(found))
"""
    found = json.loads(output_of(start(program, "", "", Path(), **env)))
    return {int(step): text for step, text in found.items()}
