"""Train a small classifier with torch on several workers, kill whatever you like, and lose nothing.

Start a coordinator and four workers, each in a terminal of its own or in the background:

    strata coordinator 127.0.0.1:50051 &
    export COORDINATOR_URL=http://127.0.0.1:50051 WORLD_SIZE=4
    for i in 1 2 3 4; do python examples/real_training.py --folder /tmp/run & done

Kill a worker with ``kill -9`` and start another: the others notice, wait for it, and all go on
from the last checkpoint. At the end the weights are those of a run that nobody disturbed.
"""

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from dtruntime import Recovery, Run
from dtruntime.telemetry import configure_logging

FEATURES, CLASSES = 16, 4


def make_data(folder: Path, samples: int) -> Path:
    """Points around four centres, in eight parquet files; the first worker to finish wins."""
    if folder.exists():
        return folder
    centres = np.random.default_rng(0).standard_normal((CLASSES, FEATURES))
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent))
    for number in range(8):
        rng = np.random.default_rng(number + 1)
        label = rng.integers(0, CLASSES, samples // 8)
        points = (centres[label] + rng.standard_normal((len(label), FEATURES))).astype(np.float32)
        table = pa.table({**{f"x{i}": points[:, i] for i in range(FEATURES)}, "label": label})
        pq.write_table(table, unfinished / f"{number}.parquet", row_group_size=256)
    try:
        unfinished.rename(folder)
    except OSError:
        shutil.rmtree(unfinished)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("real-training"))
    parser.add_argument("--samples", type=int, default=16_384)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=256, help="of all workers together")
    parser.add_argument("--save-steps", type=int, default=20)
    parser.add_argument("--wait-seconds", type=float, default=60.0, help="for a replacement")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="make steps this slow")
    parser.add_argument("--trace", type=Path, help="folder for which samples each step had")
    options = parser.parse_args()
    configure_logging()

    torch.manual_seed(1)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 64),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(64, CLASSES),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=50, gamma=0.9)

    run = Run(
        options.folder / "checkpoints",
        data=make_data(options.folder / "data", options.samples),
        global_batch_size=options.batch_size,
        epochs=options.epochs,
        save_steps=options.save_steps,
        process_group="auto",  # gradients are averaged at the end of backward()
        recovery=Recovery(wait_seconds=options.wait_seconds),
        loader={"output": "torch", "ids": True, "shard_size": 512},
        track={"model": model, "optimizer": optimizer, "scheduler": scheduler},
    )
    with run:
        trace = _trace(options.trace)
        print(f"worker {run.rank} of {run.world_size} begins after step {run.step}", flush=True)
        for batch in run:
            with run.guard():
                points = torch.stack([batch[f"x{i}"] for i in range(FEATURES)], dim=1)
                loss = torch.nn.functional.cross_entropy(model(points), batch["label"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                run.report(loss=loss.item())
                time.sleep(options.step_seconds)
                if trace is not None:
                    ids = batch["__id__"].tolist()
                    line = {"step": run.step + 1, "world": run.world_size, "ids": ids}
                    trace.write(json.dumps(line) + "\n")
                    trace.flush()
        if run.ending == "finished" and run.rank == 0:
            np.save(options.folder / "weights.npy", flat(model))
    print(f"{run.ending} after step {run.step}, epoch {options.epochs}", flush=True)


def flat(model: torch.nn.Module) -> np.ndarray:
    """All weights in one array."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy()


def _trace(folder: Path | None):
    if folder is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / f"{os.getpid()}.jsonl").open("w")


if __name__ == "__main__":
    main()
