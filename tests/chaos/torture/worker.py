"""A worker that the torture kills: ``python -m tests.chaos.torture.worker OPTIONS``, as JSON.

It leaves a trace: when it was up, and every step that it did, with its samples.
"""

import json
import os
import sys
import time
from typing import Any, TextIO

from dtruntime import Recovery, Run
from dtruntime.telemetry import configure_logging
from tests.chaos.torture.model import Fold, value_of

EXCHANGE_MS = 120_000


def main() -> None:
    options = json.loads(sys.argv[1])
    configure_logging()
    with open(f"{options['traces']}/{os.getpid()}.jsonl", "w") as trace:
        note(trace, event="up")
        model = Fold()
        run = Run(
            **options["run"],
            recovery=Recovery(**options["recovery"]),
            track={"model": model},
        )
        with run:
            train(run, model, trace, options["pause"])
    print(json.dumps({"ending": run.ending, "step": run.step, "digest": model.digest}))


def train(run: Run, model: Fold, trace: TextIO, pause: float) -> None:
    worker = run.orchestrator
    assert worker is not None
    for batch in run:
        with run.guard():
            samples, epoch = batch["sample"], run.epoch
            parts = worker.exchange(
                f"step:{run.crew.generation}:{run.step}",
                f"{value_of(samples, epoch):x}".encode(),
                timeout_ms=EXCHANGE_MS,
                ranks=run.crew.ranks,
            )
            model.step(run.step, sum(int(part, 16) for part in parts.values()))
            crew = {"crew": run.crew.generation, "place": run.rank, "world": run.world_size}
            note(trace, step=run.step + 1, epoch=epoch, **crew, samples=samples.tolist())
            time.sleep(pause)


def note(trace: TextIO, **fields: Any) -> None:
    print(json.dumps({"at": time.monotonic(), **fields}), file=trace, flush=True)


if __name__ == "__main__":
    main()
