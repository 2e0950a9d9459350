"""States that several processes hold together, committed with a coordinator."""

import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from dtruntime import CheckpointManager, TrainingOrchestrator
from dtruntime.checkpoint.dcp import StrataReader, StrataWriter
from dtruntime.checkpoint.safetensors import export_safetensors
from dtruntime.storage import open_backend
from dtruntime.testing import LocalCoordinator
from tests.support.coordinators import JobView


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_coordinator_hears_of_a_distributed_checkpoint(
    coordinator: LocalCoordinator, job: str, view: JobView, tmp_path: Path
) -> None:
    with TrainingOrchestrator(coordinator_url=coordinator.url, job=job) as orchestrator:
        orchestrator.register()
        with CheckpointManager(tmp_path, orchestrator=orchestrator) as manager:
            dcp.save({"x": torch.ones(1000)}, storage_writer=StrataWriter(manager, 7, epoch=2))
            info = manager.checkpoints()[-1]
            latest = view.status.latest_checkpoint
            assert latest is not None
            assert (latest.checkpoint_id, latest.step, latest.epoch) == (info.checkpoint_id, 7, 2)
            assert (latest.path, latest.size_bytes) == (info.path, info.size_bytes)
            target = {"x": torch.zeros(1000)}
            dcp.load(target, storage_reader=StrataReader(manager))
            assert target["x"].sum() == 1000


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.usefixtures("s3")
def test_distributed_checkpoints_and_exports_go_to_an_object_store(tmp_path: Path) -> None:
    place = "s3://data/distributed"
    weights = torch.arange(3 * 2**20, dtype=torch.float32).reshape(3, -1)
    dcp.save({"w": weights}, storage_writer=StrataWriter(place, 5, compression="zstd"))
    target = {"w": torch.zeros_like(weights)}
    dcp.load(target, storage_reader=StrataReader(place))
    assert torch.equal(target["w"], weights)
    with CheckpointManager(place) as manager:
        assert manager.steps() == [5]
        manager.save({"w": weights}, step=6)
        export_safetensors(manager, 6, f"{place}/exports/w.safetensors")
    (tmp_path / "w").write_bytes(open_backend(f"{place}/exports").read("w.safetensors"))
    assert torch.equal(load_file(tmp_path / "w")["w"], weights)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_two_processes_of_jax_save_and_load_their_shards(
    coordinator: LocalCoordinator, job: str, view: JobView, tmp_path: Path
) -> None:
    address = f"127.0.0.1:{free_port()}"
    program = [sys.executable, "-m", "tests.support.programs.jax_process", str(tmp_path / "ckpt")]
    environment = {**os.environ, "COORDINATOR_URL": coordinator.url, "STRATA_JOB": job}
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [*program, str(number), address],
                    env=environment,
                    stderr=stack.enter_context((tmp_path / f"stderr-{number}").open("w")),
                )
            )
            for number in range(2)
        ]
        for process in processes:
            stack.callback(process.kill)
        ended = [process.wait(100) for process in processes]
    complaints = [(tmp_path / f"stderr-{n}").read_text()[-3000:] for n in range(2)]
    assert ended == [0, 0], "\n".join(complaints)
    latest = view.status.latest_checkpoint
    assert latest is not None
    assert (latest.step, latest.parts) == (1, 2)
