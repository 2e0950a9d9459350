"""A worker of a run for tests: ``python run_worker.py FOLDER [key=value ...]``; no torch.

With ``hold=N`` nobody gets beyond step N before FOLDER has a file ``go``. With ``apart=1`` workers
do not wait for each other in a step. A worker with ``DIES=assembled`` in its environment dies right
after it has met the others at a roll call.
"""

import json
import os
import signal
import sys
import time
from typing import Any

import numpy as np

from dtruntime import Recovery, Run, TrainingOrchestrator
from dtruntime.run import step_agreement
from dtruntime.telemetry import configure_logging


class Sum:
    """Adds up what all workers read, so that every worker has the same state."""

    def __init__(self) -> None:
        self.total = np.zeros(1)

    def state_dict(self) -> dict[str, np.ndarray]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        self.total = state["total"].copy()


def die_when_assembled() -> None:
    original = TrainingOrchestrator.meet_async

    async def wrapped(self: TrainingOrchestrator, name: str, *args: Any, **options: Any) -> Any:
        met = await original(self, name, *args, **options)
        if name == "run:assemble":
            os.kill(os.getpid(), signal.SIGKILL)
        return met

    TrainingOrchestrator.meet_async = wrapped  # type: ignore[method-assign]


def main() -> None:
    if os.environ.get("DIES") == "assembled":
        die_when_assembled()
    folder = sys.argv[1]
    given = dict(argument.split("=") for argument in sys.argv[2:])
    configure_logging()
    if "ask_seconds" in given:
        step_agreement.ASK_SECONDS = float(given["ask_seconds"])
    hold = int(given.get("hold", 0))
    model = Sum()
    run = Run(
        f"{folder}/checkpoints",
        data=int(given.get("samples", 4000)),
        global_batch_size=int(given.get("batch", 40)),
        epochs=int(given.get("epochs", 1)),
        save_steps=int(given.get("save_steps", 10)),
        save_seconds=float(given["save_seconds"]) if "save_seconds" in given else None,
        recovery=Recovery(
            wait_seconds=float(given.get("wait", 30)),
            min_workers=int(given.get("least", 1)),
            max_failures=int(given.get("max_failures", 20)),
        ),
        grace_seconds=float(given.get("grace", 20)),
        preemption_file=given.get("notice"),
        loader={"shard_size": 100},
        track={"model": model},
        checkpoint={"incremental": True} if "incremental" in given else None,
    )
    with run, open(f"{folder}/steps-{os.getpid()}.jsonl", "w") as trace:
        worker = run.orchestrator
        assert worker is not None
        for batch in run:
            with run.guard():
                part = f"{float(batch['sample'].sum())}".encode()
                if "apart" not in given:
                    parts = worker.exchange(
                        f"sum:{run.crew.generation}:{run.step}", part, ranks=run.crew.ranks
                    )
                    model.total += sum(float(value) for value in parts.values())
                run.report(loss=1.0 / (run.step + 1))
                entry = {"step": run.step + 1, "world": run.world_size, "rank": run.rank}
                entry["ids"] = batch["sample"].tolist()
                print(json.dumps(entry), file=trace, flush=True)
                slow = run.rank == int(given.get("slow_rank", -1))
                time.sleep(float(given.get("pause", 0.02)) * (10 if slow else 1))
                while run.step + 1 == hold and not os.path.exists(f"{folder}/go"):
                    time.sleep(0.02)
    print(json.dumps({"ending": run.ending, "step": run.step, "total": float(model.total[0])}))


if __name__ == "__main__":
    main()
