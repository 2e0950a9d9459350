"""One worker of the demonstration: ``python -m dtruntime.demo.worker``.

This is what a training program looks like on Strata. Parallelism is local SGD: each worker
learns from its part of every batch, and every few batches all workers average their parameters.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..client import DatasetRegistry, TrainingOrchestrator
from ..errors import SyncError
from ..telemetry import EventLog, configure_logging
from ..types import WorkerState
from .dataset import held_out, samples_of
from .files import Exchange, save_checkpoint, write_whole
from .model import Classifier, Score
from .plan import DATASET, JOB, Plan, WorkerResult

if TYPE_CHECKING:
    from ..data.loading import Loader

log = EventLog("demo")

BARRIER_MS = 60_000
LOST_A_PEER = 4
"""Exit code of a worker that stopped because another one did."""


class Trainer:
    """A worker's training run."""

    def __init__(self, plan: Plan, orchestrator: TrainingOrchestrator) -> None:
        self._plan = plan
        self._orchestrator = orchestrator
        self._rank = orchestrator.rank
        self._registry = DatasetRegistry()
        self._model = Classifier.initial(plan.hidden, plan.seed)
        self._exchange = Exchange(plan.exchange_folder, self._rank, plan.workers)
        self._held_out = held_out(plan.seed) if self._rank == 0 else None
        self._seen: list[NDArray[np.int64]] = []
        """Ids of the samples that this epoch's steps have used."""
        self._round = self._samples = self._barriers = 0

    def run(self) -> WorkerResult:
        """Train all epochs together with the others."""
        if self._rank == 0:
            self._register_dataset()
        self._barrier("start")
        started = time.monotonic()
        score = Score()
        loader = self._registry.loader(DATASET, self._plan.batch_size)
        for epoch in range(self._plan.epochs):
            score = self._train_epoch(epoch, loader)
            if self._rank == 0:
                self._checkpoint(epoch)
        seconds = time.monotonic() - started
        self._orchestrator.report(epoch=self._plan.epochs, state=WorkerState.FINISHED)
        asyncio.run(self._orchestrator.heartbeat())
        self._barrier("finish")
        return WorkerResult(
            rank=self._rank,
            steps=self._plan.total_steps,
            samples=self._samples,
            barriers=self._barriers,
            loss=score.loss,
            accuracy=score.accuracy,
            digest=self._model.digest(),
            training_seconds=seconds,
        )

    def _register_dataset(self) -> None:
        plan = self._plan
        self._registry.register(
            DATASET,
            plan.data_folder,
            "parquet",
            shard_size=plan.shard_size,
            shuffle=True,
            seed=plan.seed,
        )

    def _train_epoch(self, epoch: int, loader: Loader) -> Score:
        plan, score = self._plan, Score()
        self._seen.clear()
        batches = iter(loader)
        for first in range(0, plan.steps_per_epoch, plan.steps_per_round):
            steps = min(plan.steps_per_round, plan.steps_per_epoch - first)
            done = epoch * plan.steps_per_epoch + first
            score += self._train_round(islice(batches, steps), epoch, done, done + steps)
        # The loader reports the epoch as consumed when it has nothing more to give.
        assert next(batches, None) is None
        ids = np.concatenate(self._seen)
        write_whole(
            plan.worker_file(self._rank, f"epoch-{epoch}.npy"), lambda file: np.save(file, ids)
        )
        self._samples += len(ids)
        log.info("demo.epoch", epoch=epoch, samples=len(ids), loss=score.loss)
        return score

    def _train_round(self, batches: Iterable[Any], epoch: int, done: int, then: int) -> Score:
        """Learn from some batches, then agree with the others on the parameters."""
        score = Score()
        self._orchestrator.report(step=done, epoch=epoch, state=WorkerState.TRAINING)
        for batch in batches:
            samples = samples_of(batch)
            score += self._model.step(samples, self._plan.rate)
            self._seen.append(samples.ids)
        self._agree(score.samples)
        self._orchestrator.report(step=then)
        if score.samples:
            self._orchestrator.report(loss=score.loss, accuracy=score.accuracy)
        return score

    def _agree(self, weight: int) -> None:
        """Take the mean of everybody's parameters."""
        self._exchange.offer(self._round, self._model.parameters, weight)
        self._barrier("average")
        mean = self._exchange.average(self._round)
        if mean is not None:
            self._model.parameters[:] = mean
        self._exchange.forget(self._round - 1)
        self._round += 1

    def _barrier(self, name: str) -> None:
        self._orchestrator.barrier(name, timeout_ms=BARRIER_MS)
        self._barriers += 1

    def _checkpoint(self, epoch: int) -> None:
        assert self._held_out is not None
        self._orchestrator.report(state=WorkerState.CHECKPOINTING)
        accuracy = self._model.score(self._held_out).accuracy
        step = (epoch + 1) * self._plan.steps_per_epoch
        path = self._plan.checkpoint_folder / f"step-{step:06d}.npz"
        size = save_checkpoint(path, self._model, step, epoch)
        self._orchestrator.commit_checkpoint(
            path.stem, step, epoch=epoch, path=str(path), size_bytes=size, accuracy=accuracy
        )
        self._orchestrator.report(held_out_accuracy=accuracy)


def main() -> int:
    """Run one worker; its exit code says how it went."""
    parser = argparse.ArgumentParser(prog="python -m dtruntime.demo.worker")
    parser.add_argument("--plan", required=True)
    parser.add_argument("--url", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--coordinator-pid", type=int, required=True)
    options = parser.parse_args()
    configure_logging()
    _end_with_parent(options.coordinator_pid)
    plan = Plan.read(options.plan)
    try:
        result = _train(plan, options.url, options.rank)
    except SyncError as exc:
        log.error("demo.worker_stopped", error=str(exc))
        return LOST_A_PEER if exc.reason == "membership_changed" else 1
    except Exception as exc:
        log.error("demo.worker_failed", error=f"{type(exc).__name__}: {exc}")
        log.debug("demo.worker_failed", traceback=traceback.format_exc())
        return 1
    path = plan.worker_file(options.rank, "json")
    write_whole(path, lambda file: file.write(msgspec.json.encode(result)))
    return 0


def _train(plan: Plan, url: str, rank: int) -> WorkerResult:
    orchestrator = TrainingOrchestrator(
        f"worker-{rank}", coordinator_url=url, world_size=plan.workers, rank=rank, job=JOB
    )
    with orchestrator:
        orchestrator.register()
        result = Trainer(plan, orchestrator).run()
        orchestrator.deregister("training complete")
    return result


def _end_with_parent(coordinator_pid: int) -> None:
    """End this process and the coordinator when the demonstration's process is gone.

    It holds the other end of our standard input and never writes: the input ends with it, also
    when it was killed in a way that it could not clean up after.
    """

    def watch() -> None:
        # Not sys.stdin: its lock, held by this thread, would stop the interpreter's end.
        os.read(0, 1)
        with contextlib.suppress(ProcessLookupError):
            os.kill(coordinator_pid, signal.SIGTERM)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
