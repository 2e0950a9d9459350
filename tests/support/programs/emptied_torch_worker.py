"""A torch worker of a run for tests: ``python emptied_torch_worker.py FOLDER HOLD``.

Nobody gets beyond step HOLD before FOLDER has a file ``go``; 0 holds nobody.
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from dtruntime import Run
from dtruntime.telemetry import configure_logging

SAMPLES, BATCH, EPOCHS = 240, 12, 2


def train(folder: Path, hold: int) -> dict[str, np.ndarray]:
    """The weights after two epochs; what each step had is in the folder."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    run = Run(
        folder / "checkpoints",
        data=SAMPLES,
        global_batch_size=BATCH,
        epochs=EPOCHS,
        save_steps=5,
        loader={"output": "torch", "shard_size": 20, "streams": 2},
        process_group="auto",
        track={"model": model, "optimizer": optimizer},
    )
    with run, open(folder / f"steps-{os.getpid()}.jsonl", "w") as trace:
        for batch in run:
            with run.guard():
                x = batch["sample"].float().unsqueeze(1) / SAMPLES
                optimizer.zero_grad()
                points = torch.cat([x, x * x], dim=1)
                loss = nn.functional.mse_loss(model(points), torch.sin(9 * x))
                loss.backward()
                run.average_gradients(model.parameters())
                optimizer.step()
                entry = {"step": run.step + 1, "world": run.world_size, "rank": run.rank}
                print(
                    json.dumps({**entry, "ids": batch["sample"].tolist()}), file=trace, flush=True
                )
                while run.step + 1 == hold and not (folder / "go").exists():
                    time.sleep(0.02)
    return {name: value.numpy() for name, value in model.state_dict().items()}


if __name__ == "__main__":
    configure_logging()
    where = Path(sys.argv[1])
    np.savez(where / f"weights-{os.getpid()}.npz", **train(where, int(sys.argv[2])))  # type: ignore[arg-type]
