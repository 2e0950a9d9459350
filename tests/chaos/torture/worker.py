"""A worker that the torture kills: ``python -m tests.chaos.torture.worker OPTIONS``, as JSON.

It leaves a trace: when it was up, and every step that it did, with its samples.
"""

import json
import os
import sys
import time
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any, TextIO

from dtruntime import Recovery, Run
from dtruntime.telemetry import configure_logging
from tests.chaos.torture.collective import Collective
from tests.chaos.torture.forming import die_where_told
from tests.chaos.torture.model import Fold, value_of

EXCHANGE_MS = 120_000


def main() -> None:
    options = json.loads(sys.argv[1])
    configure_logging()
    with open(f"{options['traces']}/{os.getpid()}.jsonl", "w") as trace:
        note(trace, event="up")
        die_where_told(Path(options["traces"]))
        model = Fold()
        run = Run(
            **options["run"],
            recovery=Recovery(**options["recovery"]),
            track={"model": model},
        )
        folder = options.get("sockets")
        direct = Collective(run, Path(folder)) if folder else None
        with run, closing(direct) if direct else nullcontext():
            train(run, model, trace, options["pause"], direct)
    print(json.dumps({"ending": run.ending, "step": run.step, "digest": model.digest}))


def train(run: Run, model: Fold, trace: TextIO, pause: float, direct: Collective | None) -> None:
    for batch in run:
        with run.guard():
            samples, epoch = batch["sample"], run.epoch
            value = value_of(samples, epoch)
            total = exchange(run, value) if direct is None else direct.sum(value)
            model.step(run.step, total)
            crew = {"crew": run.crew.generation, "place": run.rank, "world": run.world_size}
            note(trace, step=run.step + 1, epoch=epoch, **crew, samples=samples.tolist())
            time.sleep(pause)


def exchange(run: Run, value: int) -> int:
    """The sum over the crew, through the coordinator."""
    assert run.orchestrator is not None
    parts = run.orchestrator.exchange(
        f"step:{run.crew.generation}:{run.step}",
        f"{value:x}".encode(),
        timeout_ms=EXCHANGE_MS,
        ranks=run.crew.ranks,
    )
    return sum(int(part, 16) for part in parts.values())


def note(trace: TextIO, **fields: Any) -> None:
    print(json.dumps({"at": time.monotonic(), **fields}), file=trace, flush=True)


if __name__ == "__main__":
    main()
