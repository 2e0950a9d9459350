"""The least that a training program needs: resumes by itself when it is run again.

    python examples/real_training_simple.py

Stop it with Ctrl-C or kill it, run it again: it goes on with the next batch. With
``COORDINATOR_URL`` and ``WORLD_SIZE`` set, several of them train one model.
"""

import sys

import torch

from dtruntime import Run

folder = sys.argv[1] if len(sys.argv) > 1 else "simple-run"

torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

with Run(
    folder,
    data=20_000,
    batch_size=100,
    epochs=2,
    save_steps=50,
    loader={"output": "torch"},
    track={"model": model, "optimizer": optimizer},
    process_group="auto",  # for several workers; a single one needs nothing
) as run:
    for batch in run:
        x = batch["sample"].float().unsqueeze(1) / 20_000
        loss = torch.nn.functional.mse_loss(model(x), 2 * x + 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.report(loss=loss.item())

print(f"{run.ending} after step {run.step}, weight {model.weight.item():.3f}")
