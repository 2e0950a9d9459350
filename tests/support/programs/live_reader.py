"""A worker that reads with a live loader and writes down what it has committed."""

import sys
from typing import Any

import numpy as np

from dtruntime import DatasetRegistry, TrainingOrchestrator

name, output, commit_every = sys.argv[1], sys.argv[2], int(sys.argv[3])

with TrainingOrchestrator(worker_id=name) as worker:
    worker.register()
    print("registered", flush=True)
    sys.stdin.readline()
    loader = DatasetRegistry().live_loader("rows", 20, window=2)
    pending: list[int] = []
    claim = loader._ledger.claim

    def claim_aloud(*question: Any) -> Any:
        if question[5]:
            print("waits for the others", flush=True)
        return claim(*question)

    loader._ledger.claim = claim_aloud  # type: ignore[assignment, method-assign]
    with open(output, "ab", buffering=0) as committed:

        def commit() -> None:
            loader.commit()
            committed.write(np.array(pending, "<i8").tobytes())
            pending.clear()

        for number, batch in enumerate(loader, 1):
            pending += batch["id"].tolist()
            if number == 1 and "hold" in sys.argv[4:]:
                print("holds a batch", flush=True)
                sys.stdin.readline()
            if number % commit_every == 0:
                commit()
                print(f"committed {number}", flush=True)
                if sys.stdin.readline() == "":
                    break
        commit()
        print("done", flush=True)
