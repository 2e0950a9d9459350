"""What a worker that joins costs those who train: their longest pause, beside loading the state.

`python -m benchmarks.joins [--joins 8] [--mib 64]`
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from rich.console import Console

from dtruntime import CheckpointManager, Recovery, Run
from dtruntime.bench.tables import table
from dtruntime.client.observer import Observer
from dtruntime.testing import LocalCoordinator, eventually

from .harness import environment, save_results

STEP_SECONDS = 0.02
SETTLED_STEPS = 25
"""So many steps are done with each crew before the next worker joins."""
PATIENCE = 120.0


class Weights:
    """A state of some size, the same on all workers, that counts how long it is being loaded."""

    def __init__(self, mib: int) -> None:
        self.values = np.ones(mib * 2**17)
        self.loading = 0.0
        """Seconds since this was read last."""
        load_state = CheckpointManager.load_state

        def timed(*args: Any, **options: Any) -> Any:
            began = time.monotonic()
            state = load_state(*args, **options)
            self.loading += time.monotonic() - began
            return state

        CheckpointManager.load_state = timed  # type: ignore[method-assign]

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        began = time.monotonic()
        self.values = state["values"].copy()
        self.loading += time.monotonic() - began


def train(folder: Path, mib: int) -> None:
    """A worker: it trains in step with the others until it is told to stop."""
    weights = Weights(mib)
    with (
        Run(
            folder / "checkpoints",
            data=10_000_000,
            global_batch_size=64,
            save_steps=10**9,
            keep_count=2,
            recovery=Recovery(wait_seconds=30),
            track={"weights": weights},
        ) as run,
        (folder / f"{os.getpid()}.jsonl").open("w") as trace,
    ):
        assert run.orchestrator is not None
        for _ in run:
            with run.guard():
                name = f"step:{run.crew.generation}:{run.step}"
                run.orchestrator.exchange(name, b"", ranks=run.crew.ranks)
                time.sleep(STEP_SECONDS)
                done = {"at": time.monotonic(), "world": run.world_size}
                print(json.dumps({**done, "loading": weights.loading}), file=trace, flush=True)
                weights.loading = 0.0


def steps(folder: Path, pid: int) -> list[dict[str, Any]]:
    """When a worker did steps, and with how many."""
    path = folder / f"{pid}.jsonl"
    lines = path.read_text().splitlines()[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def pause_of(trace: list[dict[str, Any]], world: int) -> float:
    """The longest time without a step around the first step of a crew of so many."""
    first = next(n for n, step in enumerate(trace) if step["world"] == world)
    around = [step["at"] for step in trace[max(0, first - 10) : first + SETTLED_STEPS]]
    return max(b - a for a, b in pairwise(around)) - STEP_SECONDS


def measure(folder: Path, joins: int, mib: int) -> list[tuple[float, float]]:
    """The longest pause of each join, and how long the slowest worker loaded in it."""
    pauses = []
    with LocalCoordinator(folder / "coordinator") as coordinator:
        command = [sys.executable, "-m", "benchmarks.joins", "--train", str(folder)]
        command += ["--mib", str(mib)]
        environment = {**os.environ, "COORDINATOR_URL": coordinator.url, "STRATA_JOB": "joins"}
        workers: list[subprocess.Popen[bytes]] = []
        try:
            for world in range(1, joins + 2):
                workers.append(subprocess.Popen(command, env=environment))
                settle(folder, workers[0].pid, world)
                if world > 1:
                    traces = [steps(folder, worker.pid) for worker in workers]
                    firsts = [next((s for s in t if s["world"] == world), None) for t in traces]
                    loading = max(step["loading"] for step in firsts if step)
                    pauses.append((pause_of(traces[0], world), loading))
            with Observer(coordinator.url) as observer:
                observer.request_action("joins", "stop", "", "measured")
            for worker in workers:
                worker.wait(PATIENCE)
        finally:
            for worker in workers:
                worker.kill()
    return pauses


def settle(folder: Path, pid: int, world: int) -> None:
    """Wait until a crew of so many has done some steps."""

    def has_settled() -> bool:
        return sum(step["world"] == world for step in steps(folder, pid)) > SETTLED_STEPS

    eventually(has_settled, within=PATIENCE, what=f"a crew of {world}")


def main() -> None:
    """Measure, show and keep it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--joins", type=int, default=8)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train is not None:
        train(given.train, given.mib)
        return
    with TemporaryDirectory() as folder:
        joined = measure(Path(folder), given.joins, given.mib)
    rows = [
        [str(world), f"{pause:.2f}", f"{loading:.2f}", f"{pause - loading:.2f}"]
        for world, (pause, loading) in enumerate(joined, start=2)
    ]
    title = f"joins, with a state of {given.mib} MiB; seconds"
    headings = ["workers then", "longest pause", "loading in it", "beyond loading"]
    Console().print(table(headings, rows, title))
    here = environment(["dtruntime", "numpy"])
    save_results({"joins": joined, "mib": given.mib, "environment": here}, "joins")


if __name__ == "__main__":
    main()
