"""Counts how often each sample was trained; all workers keep the same counts."""

import argparse
import os
import time
from pathlib import Path

import numpy as np

from dtruntime import Recovery, Run
from dtruntime.telemetry import configure_logging

SAMPLES, BATCH, EPOCHS = 1200, 20, 2
STEPS = EPOCHS * SAMPLES // BATCH


def new_run(folder: Path, wait_seconds: float = 60.0) -> Run:
    """The run; opened without a coordinator after its end, it has what was stored."""
    return Run(
        folder / "checkpoints",
        data=SAMPLES,
        global_batch_size=BATCH,
        epochs=EPOCHS,
        save_steps=10,
        keep_count=100,
        recovery=Recovery(wait_seconds=wait_seconds),
        state={"times": np.zeros(SAMPLES, np.int64)},
    )


def count(run: Run, mine: np.ndarray) -> None:
    """Count this worker's samples and those of all others."""
    assert run.orchestrator is not None
    parts = run.orchestrator.exchange(f"step-{run.step}", mine.astype(np.int64).tobytes())
    times = run.state["times"].copy()
    np.add.at(times, np.frombuffer(b"".join(parts.values()), np.int64), 1)
    run.state["times"] = times


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="in the first start")
    parser.add_argument("--wait-seconds", type=float, default=60.0)
    parser.add_argument("--fail-at", type=int)
    parser.add_argument("--fail-afterwards", action="store_true")
    options = parser.parse_args()
    configure_logging()
    pause = 0.0 if "SLURM_RESTART_COUNT" in os.environ else options.step_seconds
    with new_run(options.folder, options.wait_seconds) as run:
        place = f"{run.rank} of {run.world_size} on {os.environ['SLURMD_NODENAME']}"
        print(f"worker {place} begins after step {run.step}, process {os.getpid()}\n", end="")
        for batch in run:
            with run.guard():
                count(run, batch["sample"])
            if run.step == options.fail_at:
                raise ZeroDivisionError("a mistake in the program")
            if run.rank == 0:
                print(f"step {run.step}\n", end="", flush=True)
            time.sleep(pause)
        if run.rank == 0 and run.ending == "finished":
            print("exact epochs:", sum(proof.exact for proof in run.coverage()), flush=True)
    if options.fail_afterwards and run.orchestrator and run.orchestrator.rank == 0:
        raise ZeroDivisionError("a mistake in the export")


if __name__ == "__main__":
    main()
