"""Train with DistributedDataParallel under torchrun, kill a worker, and lose nothing.

Start a coordinator, and then two workers with torchrun:

    strata coordinator 127.0.0.1:50051 &
    export COORDINATOR_URL=http://127.0.0.1:50051 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    python -m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 3 \\
        examples/ddp_torchrun.py --folder /tmp/ddp-run

Kill one of the workers with ``kill -9`` (each prints its process number). torchrun ends the other
one and starts both again; the run resumes from its last checkpoint, and ends with the weights of a
run that nobody disturbed. The process group is made here, from what torchrun puts into the
environment: whoever restarts all workers together can make a group as ever. (Without the second
variable torchrun gives restarted workers the addresses of dead ones: see docs/launchers.md.)
"""

import argparse
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dtruntime import Run
from dtruntime.telemetry import configure_logging

WAVES = 8


def features(places: torch.Tensor) -> torch.Tensor:
    """Sines and cosines at places in [0, 1)."""
    angles = 2 * torch.pi * places[:, None] * torch.arange(1, WAVES + 1)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("ddp-run"))
    parser.add_argument("--samples", type=int, default=16_384)
    parser.add_argument("--batch-size", type=int, default=128, help="of each worker")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--save-steps", type=int, default=20)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="make steps this slow")
    options = parser.parse_args()
    configure_logging()

    torch.manual_seed(0)
    torch.set_num_threads(1)
    # On GPUs: backend "nccl", and the model on device LOCAL_RANK.
    dist.init_process_group("gloo")
    model = DistributedDataParallel(
        torch.nn.Sequential(
            torch.nn.Linear(2 * WAVES, 64),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.1),
            torch.nn.Linear(64, 1),
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    with Run(
        options.folder / "checkpoints",
        data=options.samples,
        batch_size=options.batch_size,
        epochs=options.epochs,
        save_steps=options.save_steps,
        # DDP gives all workers the same weight: so all have batches of one size.
        loader={"output": "torch", "last": "drop"},
        track={"model": model, "optimizer": optimizer},
    ) as run:
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        who = f"worker {run.rank} of {run.world_size} (process {os.getpid()}, restart {restarts})"
        print(f"{who} begins after step {run.step}", flush=True)
        for batch in run:
            places = batch["sample"] / options.samples
            wanted = torch.sign(torch.sin(6 * torch.pi * places)) * places
            predicted = model(features(places)).squeeze(1)
            loss = torch.nn.functional.mse_loss(predicted, wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.report(loss=loss.item())
            time.sleep(options.step_seconds)
            if run.rank == 0 and (run.step + 1) % options.save_steps == 0:
                print(f"step {run.step + 1}: loss {loss.item():.4f}", flush=True)
        if run.rank == 0 and run.ending == "finished":
            weights = [part.detach().reshape(-1) for part in model.parameters()]
            np.save(options.folder / "weights.npy", torch.cat(weights).numpy())
            for proof in run.coverage():
                print(f"epoch {proof.epoch}: {'every sample once' if proof.exact else proof}")
    dist.destroy_process_group()
    print(f"worker {run.rank}: {run.ending} after step {run.step}", flush=True)


if __name__ == "__main__":
    main()
