"""Train a small torch model on flights or any parquet folder, and go on where it stopped.

Run it, stop it with Ctrl-C, run it again: it continues with the next batch, and every sample of an
epoch is used exactly once however often it was interrupted.

    python examples/resumable_loader.py --data DATA_FOLDER --state state.json

Without ``--data`` it makes a small dataset. No coordinator is needed; with several processes,
give each its ``--rank`` and the ``--world-size``.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from dtruntime.data import FileSource, Loader, build_index


def make_data(folder: Path) -> Path:
    """Points on a noisy plane, in ten files."""
    rng = np.random.default_rng(0)
    for number in range(10):
        x = rng.standard_normal((2_000, 4), dtype=np.float32)
        y = x @ np.array([1, -2, 3, 0.5], np.float32) + rng.normal(0, 0.1, 2_000)
        columns = {f"x{i}": x[:, i] for i in range(4)} | {"y": y.astype(np.float32)}
        pq.write_table(pa.table(columns), folder / f"{number}.parquet", row_group_size=500)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--state", type=Path, default=Path("loader-state.json"))
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--stop-after", type=int, help="stop after this many steps")
    options = parser.parse_args()
    data = options.data or make_data(Path(tempfile.mkdtemp()))

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    source = FileSource(build_index(data, "parquet"), shard_size=500)
    loader = Loader(
        source, 100, rank=options.rank, world_size=options.world_size, output="torch", ids=True
    )
    if options.state.exists():
        saved = json.loads(options.state.read_text())
        loader.load_state_dict(saved["loader"])
        model.load_state_dict({k: torch.tensor(v) for k, v in saved["model"].items()})

    steps = 0
    for epoch in range(loader.epoch, options.epochs):
        for batch in loader:
            x = torch.stack([batch[f"x{i}"] for i in range(4)], dim=1)
            loss = torch.nn.functional.mse_loss(model(x).squeeze(1), batch["y"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
            if steps == options.stop_after:
                break
        weights = {name: value.tolist() for name, value in model.state_dict().items()}
        state = {"loader": loader.state_dict(), "model": weights}
        options.state.write_text(json.dumps(state))
        print(f"epoch {epoch}: {steps} steps, loss {loss.item():.4f}")
        if steps == options.stop_after:
            return


if __name__ == "__main__":
    main()
