"""Train a sharded model (FSDP) under torchrun, kill a worker, and lose nothing.

Start a coordinator, and then two workers with torchrun:

    strata coordinator 127.0.0.1:50051 &
    export COORDINATOR_URL=http://127.0.0.1:50051 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    python -m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 3 \\
        examples/fsdp_torchrun.py --folder /tmp/fsdp-run

Kill one of the workers with ``kill -9`` (each prints its process number). torchrun starts both
again; the run resumes from its last checkpoint, and ends with the weights of a run that nobody
disturbed. Each worker saves its shards of the model and the optimizer, and a checkpoint can be
resumed by any number of workers: start it again with ``--nproc-per-node 1``.
"""

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dtruntime import Run
from dtruntime.telemetry import configure_logging

LENGTH, SYMBOLS, WIDTH = 12, 8, 32


class Transformer(nn.Module):
    """Reads a sequence of symbols, and says which comes next at each place."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.symbols = nn.Embedding(SYMBOLS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout, batch_first=True) for _ in range(2)
        )
        self.out = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, sequences: torch.Tensor) -> torch.Tensor:
        """Scores of all symbols, for each place of each sequence in turn."""
        length = sequences.shape[1]
        hidden = self.symbols(sequences) + self.places(torch.arange(length))
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return self.out(hidden.flatten(0, 1))


def sequences(numbers: torch.Tensor) -> torch.Tensor:
    """The sequences of these samples: each goes on by a stride of its own."""
    first, stride = numbers % SYMBOLS, 1 + numbers // SYMBOLS % (SYMBOLS - 1)
    return (first[:, None] + stride[:, None] * torch.arange(LENGTH + 1)) % SYMBOLS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("fsdp-run"))
    parser.add_argument("--samples", type=int, default=4_096)
    parser.add_argument("--batch-size", type=int, default=64, help="of all workers together")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--save-steps", type=int, default=10)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="make steps this slow")
    parser.add_argument("--stop-after", type=int, help="leave after so many steps, and save")
    parser.add_argument("--trace", type=Path, help="folder for which samples each step had")
    options = parser.parse_args()
    configure_logging()

    torch.manual_seed(0)
    torch.set_num_threads(1)
    # On GPUs: backend "nccl", torch.cuda.set_device(LOCAL_RANK), and a mesh of "cuda".
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Transformer(options.dropout)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=25, gamma=0.8)

    with Run(
        options.folder / "checkpoints",
        data=options.samples,
        global_batch_size=options.batch_size,
        epochs=options.epochs,
        save_steps=options.save_steps,
        # FSDP gives all workers the same weight: so all have batches of one size.
        loader={"output": "torch", "last": "drop"},
        track={"model": model, "optimizer": optimizer, "scheduler": scheduler},
    ) as run:
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        who = f"worker {run.rank} of {run.world_size} (process {os.getpid()}, restart {restarts})"
        print(f"{who} begins after step {run.step}", flush=True)
        trace = open_trace(options.trace)
        for batch in run:
            with run.guard():
                given = sequences(batch["sample"])
                loss = nn.functional.cross_entropy(model(given[:, :-1]), given[:, 1:].flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                run.report(loss=loss.item())
            time.sleep(options.step_seconds)
            if trace is not None:
                line = {"step": run.step + 1, "world": run.world_size}
                print(json.dumps({**line, "ids": batch["sample"].tolist()}), file=trace, flush=True)
            if run.rank == 0 and (run.step + 1) % options.save_steps == 0:
                print(f"step {run.step + 1}: loss {loss.item():.4f}", flush=True)
            if run.step + 1 == options.stop_after:
                break
        if run.ending == "finished":
            keep_weights(model, options.folder / "weights.npy")
            for proof in run.coverage() if run.rank == 0 else ():
                print(f"epoch {proof.epoch}: {'every sample once' if proof.exact else proof}")
    dist.destroy_process_group()
    print(f"worker {run.rank}: {run.ending or 'left'} after step {run.step}", flush=True)


def keep_weights(model: nn.Module, path: Path) -> None:
    """Gather the whole model, and let the first worker write it down."""
    gathered = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=gathered)
    if dist.get_rank() == 0:
        np.save(path, torch.cat([part.reshape(-1) for part in weights.values()]).numpy())


def open_trace(folder: Path | None):
    if folder is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / f"{os.getpid()}.jsonl").open("w")


if __name__ == "__main__":
    main()
