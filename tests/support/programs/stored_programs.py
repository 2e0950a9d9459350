"""Writes what a release leaves behind, for later ones to read: ``python -m ... FOLDER``.

Everything in FOLDER is made by the code that runs this. ``test_stored_earlier.py`` holds archives
of earlier releases against the present code.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

from dtruntime import CheckpointManager, DatasetRegistry, Run, TrainingOrchestrator
from dtruntime.checkpoint.dcp import StrataWriter
from dtruntime.testing import LocalCoordinator

STEPS, STOPPED_AT, SAMPLES, BATCH = 20, 8, 160, 8
JOB = "stored"


def state(step: int) -> dict[str, Any]:
    """A state of all kinds, different at each step."""
    weight = torch.arange(600, dtype=torch.float32).reshape(20, 30) + step
    return {
        "model": {"weight": weight, "tied": weight.T, "half": weight.to(torch.bfloat16)},
        "arrays": [np.arange(7, dtype=np.int64) * step, np.float32(step), np.zeros((0, 3))],
        "plain": (step, 1.5, "text", None, True, b"bytes", {"set", "of"}, 2**70),
    }


def train(folder: Path, steps: int) -> tuple[int, torch.Tensor]:
    """The steps of a run up to one of them; returns the last one and the weights."""
    torch.manual_seed(7)
    model = torch.nn.Linear(1, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run = Run(
        folder / "run",
        data=SAMPLES,
        global_batch_size=BATCH,
        epochs=1,
        max_steps=steps,
        save_steps=4,
        loader={"shard_size": 16},
        track={"model": model, "optimizer": optimizer},
    )
    with run:
        for batch in run:
            with run.guard():
                optimizer.zero_grad()
                model(
                    torch.as_tensor(batch["sample"], dtype=torch.float32)[:, None]
                ).sum().backward()
                optimizer.step()
    return run.step, model.weight.detach().clone()


def write(folder: Path) -> None:
    """Write everything."""
    with CheckpointManager(folder / "states", keep_count=10, compression="zstd") as manager:
        for step in (1, 2, 3):
            manager.save(state(step), step=step, is_full=step == 1, metrics={"loss": 1 / step})
    with CheckpointManager(folder / "bytes") as manager:
        manager.save(bytes(range(256)) * 64, step=5)
    with CheckpointManager(folder / "distributed") as manager:
        dcp.save(state(4)["model"], storage_writer=StrataWriter(manager, step=4), no_dist=True)
    _coordinate(folder)
    train(folder, STOPPED_AT)
    shutil.copytree(folder / "run", folder / "whole")
    _, weights = train(folder, STEPS)
    np.save(folder / "weights.npy", weights.numpy())
    shutil.rmtree(folder / "run")
    (folder / "whole").rename(folder / "run")


def _coordinate(folder: Path) -> None:
    """A coordinator's directory, and the state of a loader in the middle of an epoch."""
    with LocalCoordinator(folder / "coordinator") as coordinator:
        worker = TrainingOrchestrator(coordinator_url=coordinator.url, job=JOB, world_size=1)
        worker.register()
        datasets = DatasetRegistry()
        datasets.register_dataset("numbers", SAMPLES, 16)
        loader = datasets.loader("numbers", batch_size=BATCH, seed=3)
        batches = iter(loader)
        read = [int(x) for _ in range(5) for x in next(batches)["sample"]]
        left = {"state": loader.state_dict(), "read": read}
        with CheckpointManager(folder / "committed") as manager:
            manager.save({"step": 30}, step=30).wait()
        worker.deregister()
    (folder / "loader.json").write_text(json.dumps(left))
    (folder / "coordinator" / "coordinator.log").unlink()


if __name__ == "__main__":
    write(Path(sys.argv[1]))
