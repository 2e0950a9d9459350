"""One worker of the demonstration: ``python -m dtruntime.demo.worker``.

This is what a training program looks like on Strata. Which job it belongs to, where the
coordinator is and how many workers there are to be comes from the environment, as launchers set it.
There is nothing here about being killed, being replaced or starting again: `Run` sees to that.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from ..run import Recovery, Run
from ..telemetry import configure_logging
from .digits import Classifier, Floats, Momentum
from .launcher import end_with_parent
from .progress import NoteFile, StepNote
from .scenario import DATASET, RunFiles, Scenario

KEEP_ALL = 1_000_000


def train(plan: Scenario, files: RunFiles) -> None:
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
    with run:
        assert run.orchestrator is not None
        notes = NoteFile(files.notes, run.orchestrator.worker_id)
        for batch in run:
            with run.guard():
                gradient, loss_sum = model.gradient(batch)
                counts = np.array([loss_sum, len(batch["label"])], np.float32)
                total = exchange.sum(np.concatenate([gradient, counts]))
                mean = total[:-1] / total[-1]
                optimizer.step(mean[:-1])
                notes.write(
                    StepNote(
                        at=time.time(),
                        generation=run.crew.generation,
                        step=run.step + 1,
                        epoch=run.epoch,
                        rank=run.rank,
                        loss=float(mean[-1]),
                        ids=batch["sample_id"].tolist(),
                    )
                )
                run.report(loss=float(mean[-1]), samples=notes.samples)
    if run.ending == "finished":
        np.save(files.root / f"weights-{run.rank}.npy", model.parameters)


def main() -> None:
    """Run one worker."""
    parser = argparse.ArgumentParser(prog="python -m dtruntime.demo.worker")
    parser.add_argument("plan", type=Path)
    parser.add_argument("run", choices=["disturbed", "undisturbed"])
    options = parser.parse_args()
    configure_logging()
    plan = Scenario.read(options.plan)
    end_with_parent()
    train(plan, plan.disturbed if options.run == "disturbed" else plan.undisturbed)


BARRIER_MS = 60_000


class Exchange:
    """Sums up vectors of all workers: what NCCL or gloo do where there is torch.

    Everybody adds in the order of the ranks and so gets the same sum, bit for bit.
    """

    def __init__(self, folder: Path, run: Run) -> None:
        self._folder = folder
        self._run = run
        self._read: Path | None = None
        """Our file of the step before."""

    def sum(self, vector: Floats) -> Floats:
        """The sum over all workers; raises `SyncError` when one is lost meanwhile."""
        run = self._run
        assert run.orchestrator is not None
        mine = self._path(run.rank)
        np.save(mine, vector)
        run.orchestrator.barrier(f"step-{run.step + 1}", timeout_ms=BARRIER_MS)
        total: Floats = np.load(self._path(0))
        for rank in range(1, run.world_size):
            total += np.load(self._path(rank))
        self._forget(mine)
        return total

    def _forget(self, mine: Path) -> None:
        # Nobody needs the file of the last step, now that all have come to the barrier of this one.
        if self._read is not None:
            self._read.unlink(missing_ok=True)
        self._read = mine

    def _path(self, rank: int) -> Path:
        # A worker that is believed dead and is not must not change what the next crew reads.
        run = self._run
        return self._folder / f"crew-{run.crew.generation}.step-{run.step + 1}.rank-{rank}.npy"


if __name__ == "__main__":
    main()
