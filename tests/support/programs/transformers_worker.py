"""A small training by Hugging Face's Trainer, to be killed: OUTPUT CHECKPOINTS [SECONDS [HOLD]].

In step HOLD it waits until its input ends.
"""

import sys
import time
from pathlib import Path

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

from dtruntime.integrations.transformers import StrataCallback
from dtruntime.telemetry import configure_logging

STEPS = 24


class Model(torch.nn.Module):
    """A regression with dropout, so that random numbers matter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1)
        )

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.layers(x).squeeze(-1)
        return {"loss": torch.nn.functional.mse_loss(found, labels), "logits": found}


class Slow(TrainerCallback):
    """Says where it is, and takes its time."""

    def __init__(self, seconds: float, hold: int) -> None:
        self._seconds = seconds
        self._hold = hold

    def on_step_end(self, args, state, control, **_):
        print(f"step {state.global_step}", flush=True)
        time.sleep(self._seconds)
        if state.global_step == self._hold:
            sys.stdin.read()


def main() -> None:
    configure_logging()
    output, checkpoints, seconds, hold = [*sys.argv[1:], "0", "0"][:4]
    set_seed(7)
    values = torch.randn(96, 4, generator=torch.Generator().manual_seed(1))
    data = [{"x": row, "labels": row.sum()} for row in values]
    arguments = TrainingArguments(
        output,
        per_device_train_batch_size=8,
        max_steps=STEPS,
        save_steps=5,
        save_total_limit=2,
        logging_steps=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=7,
    )
    strata = StrataCallback(checkpoints, keep_count=3)
    slow = Slow(float(seconds), int(hold))
    trainer = Trainer(Model(), arguments, train_dataset=data, callbacks=[strata, slow])
    found = strata.restore(output)
    print(f"begins with {Path(found).name if found else 'nothing'}", flush=True)
    trainer.train(resume_from_checkpoint=found)
    if trainer.state.global_step == STEPS:
        torch.save(trainer.model.state_dict(), Path(output) / "final.pt")
        print("finished", flush=True)


if __name__ == "__main__":
    main()
