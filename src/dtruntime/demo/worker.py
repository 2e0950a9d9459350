"""One worker of the demonstration: ``python -m dtruntime.demo.worker``.

This is what a training program looks like on Strata. The job, the coordinator's address and the
number of workers come from the environment, as launchers set it. Nothing here is about being
killed, being replaced or starting again: `Run` sees to that.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import msgspec
import numpy as np

from ..run import Recovery, Run
from ..telemetry import configure_logging
from .digits import Classifier, Floats
from .scenario import DATASET, RunFiles, Scenario
from .timeline import StepNote

KEEP_ALL = 1_000_000
BARRIER_MS = 60_000


def train(plan: Scenario, files: RunFiles) -> None:
    """Train all epochs together with the others."""
    model = Classifier.initial(plan.hidden, plan.seed)
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
        track={"model": model},
    )
    samples = 0
    with run:
        for batch in run:
            with run.guard():
                gradient, loss_sum = model.gradient(batch)
                counts = np.array([loss_sum, len(batch["label"])], np.float32)
                total = sum_over_workers(run, files.exchange, np.concatenate([gradient, counts]))
                mean = total[:-1] / total[-1]
                model.step(mean[:-1], plan.rate)
                samples += len(batch["label"])
                note_step(run, files, batch["sample_id"].tolist(), loss=float(mean[-1]))
                run.report(loss=float(mean[-1]), samples=samples)
    if run.ending == "finished":
        np.save(files.root / f"weights-{run.rank}.npy", model.parameters)


def sum_over_workers(run: Run, folder: Path, vector: Floats) -> Floats:
    """The sum of all workers' vectors, which NCCL or gloo compute where there is torch.

    All add in the order of the ranks and so get the same sum, bit for bit. Raises `SyncError` when
    a worker is lost meanwhile.
    """
    assert run.orchestrator is not None

    def path(step: int, rank: int) -> Path:
        # A worker that is falsely believed dead must not change what the next crew reads.
        return folder / f"crew-{run.crew.generation}.step-{step}.rank-{rank}.npy"

    step = run.step + 1
    np.save(path(step, run.rank), vector)
    run.orchestrator.barrier(f"step-{step}", timeout_ms=BARRIER_MS)
    total: Floats = np.load(path(step, 0))
    for rank in range(1, run.world_size):
        total += np.load(path(step, rank))
    # All have read the files of the last step before they came to the barrier of this one.
    path(step - 1, run.rank).unlink(missing_ok=True)
    return total


def note_step(run: Run, files: RunFiles, ids: list[int], loss: float) -> None:
    """Note a step in a file that outlives the process, however it ends."""
    assert run.orchestrator is not None
    note = StepNote(
        at=time.time(),
        generation=run.crew.generation,
        step=run.step + 1,
        epoch=run.epoch,
        rank=run.rank,
        loss=loss,
        ids=ids,
    )
    path = files.notes / f"{run.orchestrator.worker_id}.jsonl"
    with path.open("ab", buffering=0) as file:
        file.write(msgspec.json.encode(note) + b"\n")


def end_with_parent() -> None:
    """End this process with the one that holds its standard input."""

    def watch() -> None:
        # Not sys.stdin: its lock, held by this thread, would stop the interpreter's end.
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


if __name__ == "__main__":
    configure_logging()
    plan = Scenario.read(sys.argv[1])
    end_with_parent()
    train(plan, plan.disturbed if sys.argv[2] == "disturbed" else plan.undisturbed)
