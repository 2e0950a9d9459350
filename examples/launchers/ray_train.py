"""Train on a Ray cluster with Ray Train, which restarts all workers when one is lost.

    strata coordinator 0.0.0.0:50051 &                 # where all nodes can reach it
    python examples/launchers/ray_train.py --coordinator http://HOST:50051 --folder /shared/run

Ray makes the process group and puts DDP around the model; `Run` has data, checkpoints and
resuming. Ray's own checkpoints are not used. The folder has to be one that all nodes see, or a URL.
Needs ``pip install 'ray[train]'``.
"""

import argparse
import os
from typing import Any

import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

from dtruntime import Run


def train(config: dict[str, Any]) -> None:
    """What each worker does, anew after each restart of the group."""
    place = ray.train.get_context()
    torch.manual_seed(0)
    model = prepare_model(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    device = next(model.parameters()).device
    with Run(
        os.path.join(config["folder"], "checkpoints"),
        data=20_000,
        batch_size=100,
        epochs=2,
        save_steps=50,
        coordinator_url=config["coordinator"],
        job=config["job"],
        # Ray's workers are actors: their place is not in the environment of a launcher.
        rank=place.get_world_rank(),
        world_size=place.get_world_size(),
        loader={"output": "torch", "last": "drop"},
        track={"model": model, "optimizer": optimizer},
    ) as run:
        for batch in run:
            x = batch["sample"].float().unsqueeze(1).to(device) / 20_000
            loss = torch.nn.functional.mse_loss(model(x), 2 * x + 1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.report(loss=loss.item())
        ray.train.report({"step": run.step})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--coordinator", required=True, metavar="URL")
    parser.add_argument("--folder", required=True, help="seen by all nodes, or a URL")
    parser.add_argument("--job", default="ray")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus", action="store_true", help="one for each worker")
    options = parser.parse_args()
    trainer = TorchTrainer(
        train,
        train_loop_config=vars(options),
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpus),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
    )
    print(trainer.fit().metrics)


if __name__ == "__main__":
    main()
