"""Programs whose weights are compared bit for bit, as workers of a test.

``python exact_worker.py FOLDER PROGRAM NAME...`` trains PROGRAM once for each name, as a job and
with checkpoints of its own, and keeps the weights in FOLDER/NAME-RANK.npz. A name that begins with
"disturbed" stops in the middle of a step that is not saved, says so, and waits for a line, unless
it has been there before.
"""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dtruntime import Run
from dtruntime.telemetry import configure_logging

STEPS, SAVE_STEPS, STOP = 8, 3, 5


class Network(nn.Module):
    """Its gradients do not come in the order of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(64, 1)
        self.middle = nn.Linear(64, 64)
        self.first = nn.Linear(2, 64)
        self.norm = nn.LayerNorm(64)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> Any:
        found = torch.tanh(self.middle(self.dropout(torch.tanh(self.first(x)))))
        return self.last(self.norm(found))


def stop_once(folder: Path, name: str, run: Run) -> None:
    mark = folder / f"{name}.stopped-{run.rank}"
    if name.startswith("disturbed") and run.step == STOP and not mark.exists():
        mark.touch()
        print("stopped", flush=True)
        sys.stdin.readline()


def train(folder: Path, name: str, model: nn.Module, used: nn.Module, **options: Any) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with Run(
        folder / name,
        data=4096,
        batch_size=16,
        max_steps=STEPS,
        save_steps=SAVE_STEPS,
        job=f"{folder.name}-{name}",
        loader={"output": "torch", "last": "drop"},
        track={"model": used, "optimizer": optimizer},
        **options,
    ) as run:
        for batch in run:
            with run.guard():
                x = batch["sample"].float()[:, None] / 4096
                loss = nn.functional.mse_loss(used(torch.cat([x, x.sin()], 1)), (9 * x).cos())
                optimizer.zero_grad()
                stop_once(folder, name, run)
                loss.backward()
                optimizer.step()
        rank = run.rank
    assert run.ending == "finished"
    found = {key: value.numpy() for key, value in model.state_dict().items()}
    np.savez(folder / f"{name}-{rank}.npz", **found)


def averaged(folder: Path, name: str) -> None:
    """The run averages gradients."""
    torch.manual_seed(1)
    model = Network()
    train(folder, name, model, model, process_group="auto", collective_seconds=120.0)


def ddp(folder: Path, name: str) -> None:
    """As it is by default."""
    torch.manual_seed(1)
    model = Network()
    train(folder, name, model, DistributedDataParallel(model))


def main() -> None:
    configure_logging()
    torch.set_num_threads(1)
    folder, program, names = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    if program == "ddp":
        rank, world = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
        store = dist.FileStore(str(folder / f"store-{len(names)}"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    for name in names:
        {"ddp": ddp, "averaged": averaged}[program](folder, name)
    print("done", flush=True)


if __name__ == "__main__":
    main()
