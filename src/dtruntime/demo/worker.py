"""One worker of the demonstration: ``python -m dtruntime.demo.worker``.

This is what a training program looks like on Strata. Which job it belongs to, where the
coordinator is and how many workers there are to be comes from the environment, as launchers set it.
There is nothing here about being killed, being replaced or starting again: `Run` sees to that.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from ..run import Recovery, Run
from ..telemetry import configure_logging
from .die_with_parent import end_with_parent
from .digits import samples_of
from .exchange import Exchange
from .model import Classifier, Momentum
from .notes import Notebook
from .scenario import DATASET, Plan, RunFiles

KEEP_ALL = 1_000_000


def train(plan: Plan, files: RunFiles) -> None:
    """Train all epochs together with the others."""
    model = Classifier.initial(plan.hidden, plan.seed)
    optimizer = Momentum(model, plan.rate)
    run = Run(
        files.checkpoints,
        data=plan.data_folder,
        dataset=DATASET,
        global_batch_size=plan.batch_size,
        epochs=plan.epochs,
        seed=plan.seed,
        save_steps=plan.save_steps,
        keep_count=KEEP_ALL,
        recovery=Recovery(min_workers=plan.workers),
        loader={"shard_size": plan.shard_size},
        track={"model": model, "optimizer": optimizer},
    )
    exchange = Exchange(files.exchange, run)
    with run, Notebook(files.notes, run) as notebook:
        for batch in run:
            with run.guard():
                samples = samples_of(batch)
                gradient, score = model.gradient(samples)
                counts = np.array([score.loss_sum, len(samples)], np.float32)
                total = exchange.sum(np.concatenate([gradient, counts]))
                mean = total[:-1] / total[-1]
                optimizer.step(mean[:-1])
                loss = float(mean[-1])
                notebook.write(samples.ids, loss)
                run.report(loss=loss, samples=notebook.samples)
    if run.ending == "finished":
        np.save(files.root / f"weights-{run.rank}.npy", model.parameters)


def main() -> None:
    """Run one worker."""
    parser = argparse.ArgumentParser(prog="python -m dtruntime.demo.worker")
    parser.add_argument("plan", type=Path)
    parser.add_argument("run", choices=["disturbed", "undisturbed"])
    options = parser.parse_args()
    configure_logging()
    plan = Plan.read(options.plan)
    end_with_parent()
    train(plan, plan.disturbed if options.run == "disturbed" else plan.undisturbed)


if __name__ == "__main__":
    main()
