"""A small training by Lightning, to be killed: OUTPUT CHECKPOINTS [SECONDS [HOLD]].

In step HOLD it waits until its input ends.
"""

import sys
import time
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint

from dtruntime.data import Loader, NumberSource
from dtruntime.data.torch import TorchLoader
from dtruntime.integrations.lightning import StrataCallback, StrataCheckpointIO
from dtruntime.telemetry import configure_logging

STEPS = 24
ROWS = torch.randn(96, 4, generator=torch.Generator().manual_seed(1))


class Model(pl.LightningModule):
    """A regression."""

    def __init__(self, seconds: float, hold: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self._seconds = seconds
        self._hold = hold

    def training_step(self, batch: dict[str, torch.Tensor], number: int) -> torch.Tensor:
        rows = ROWS[batch["sample"]]
        loss = torch.nn.functional.mse_loss(self.layer(rows).squeeze(-1), rows.sum(1))
        self.log("loss", loss)
        time.sleep(self._seconds)
        step = self.trainer.global_step + 1
        print(f"step {step}", flush=True)
        if step == self._hold:
            sys.stdin.read()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main() -> None:
    configure_logging()
    output, checkpoints, seconds, hold = [*sys.argv[1:], "0", "0"][:4]
    pl.seed_everything(7, verbose=False)
    data = TorchLoader(Loader(NumberSource(96), batch_size=8, seed=7, output="torch"))
    storage = StrataCheckpointIO(checkpoints)
    saves = ModelCheckpoint(output, every_n_train_steps=5, save_top_k=2, monitor="loss")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=STEPS,
        default_root_dir=output,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[storage],
        callbacks=[saves, StrataCallback()],
    )
    model = Model(float(seconds), int(hold))
    newest = storage.newest()
    print(f"begins with {newest or 'nothing'}", flush=True)
    trainer.fit(model, data, ckpt_path=newest)
    if trainer.global_step == STEPS:
        Path(output).mkdir(exist_ok=True)
        torch.save(model.state_dict(), Path(output) / "final.pt")
        print("finished", flush=True)


if __name__ == "__main__":
    main()
