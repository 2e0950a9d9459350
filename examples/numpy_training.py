"""Train with numpy on several workers that share nothing but their checkpoints.

    strata coordinator 127.0.0.1:50051 &
    export COORDINATOR_URL=http://127.0.0.1:50051 WORLD_SIZE=4
    for i in 1 2 3 4; do python examples/numpy_training.py --checkpoints /tmp/run & done

This is what the containers of ``docker-compose.yml`` run: it needs neither torch nor data files,
and ``--checkpoints s3://bucket/run`` needs no shared folder either. Kill a worker with ``kill -9``
and start another: at the end the weights are those of a run that nobody disturbed.
"""

import argparse
import hashlib
import time

import numpy as np

from dtruntime import Recovery, Run
from dtruntime.telemetry import configure_logging

FEATURES, CLASSES = 16, 8
RATE = np.float32(0.5)


def samples_of(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Points and their classes, made from the numbers of the samples."""
    phases = np.random.default_rng(0).uniform(0.1, 3.0, FEATURES)
    truth = np.random.default_rng(1).standard_normal((FEATURES, CLASSES))
    points = np.sin(numbers[:, None] * phases)
    return points.astype(np.float32), (points @ truth).argmax(1)


def gradient_of(weights: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """The sum of the samples' gradients, then the sum of their losses and their number."""
    points, labels = samples_of(numbers)
    logits = points @ weights
    logits -= logits.max(1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(1, keepdims=True))
    rows = np.arange(len(labels))
    loss = -logits[rows, labels].sum()
    error = np.exp(logits)
    error[rows, labels] -= 1
    return np.append(points.T @ error, [loss, len(labels)]).astype(np.float32)


def sum_over_workers(run: Run, mine: np.ndarray) -> np.ndarray:
    """Added in the order of the ranks, so that all have the same sum, bit for bit."""
    worker = run.orchestrator
    if worker is None:
        return mine
    values = worker.exchange(f"step-{run.step + 1}", mine.tobytes(), timeout_ms=60_000)
    total = np.zeros_like(mine)
    for value in values.values():
        total += np.frombuffer(value, np.float32)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoints", default="numpy-training", help="a folder or a URL")
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=200, help="of all workers together")
    parser.add_argument("--save-steps", type=int, default=20)
    parser.add_argument("--min-workers", type=int, default=1, help="wait for at least so many")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="make steps this slow")
    options = parser.parse_args()
    configure_logging()

    run = Run(
        options.checkpoints,
        data=options.samples,
        global_batch_size=options.batch_size,
        epochs=options.epochs,
        save_steps=options.save_steps,
        recovery=Recovery(min_workers=options.min_workers),
        state={"weights": np.zeros((FEATURES, CLASSES), np.float32)},
    )
    with run:
        print(f"worker {run.rank} of {run.world_size} begins after step {run.step}", flush=True)
        for batch in run:
            with run.guard():
                mine = gradient_of(run.state["weights"], batch["sample"])
                total = sum_over_workers(run, mine)
                mean = total[:-1] / total[-1]
                step = RATE * mean[:-1].reshape(FEATURES, CLASSES)
                run.state["weights"] = run.state["weights"] - step
                run.report(loss=float(mean[-1]))
                time.sleep(options.step_seconds)
                if run.rank == 0 and (run.step + 1) % options.save_steps == 0:
                    print(f"step {run.step + 1}: loss {mean[-1]:.4f}", flush=True)
        if run.rank == 0 and run.ending == "finished" and run.orchestrator is not None:
            for proof in run.coverage():
                print(f"epoch {proof.epoch}: {'every sample once' if proof.exact else proof}")
    digest = hashlib.sha256(run.state["weights"].tobytes()).hexdigest()
    print(f"{run.ending} after step {run.step}, weights {digest[:16]}", flush=True)


if __name__ == "__main__":
    main()
