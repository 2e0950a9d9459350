"""One contender in a process of its own: a line of JSON in, a line of JSON out."""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any, TextIO

from ..machine import package_version
from .contenders import ENTRIES, Contender, Task
from .dataset import Dataset

TOLERANCE = 1e-6
"""How much a sum may differ by the order in which it was added up, per sample."""
LEAST_BATCHES = 5
"""No pass is cut off before so many came after the first."""


def measure(contender: Contender, batch_size: int, seconds: float) -> dict[str, Any]:
    """One pass, cut off ``seconds`` after its first batch."""
    counts, total, cut = [], 0.0, False
    with contender.open(batch_size) as batches:
        cpu = _cpu_seconds()
        began = time.perf_counter()
        first = 0.0
        for count, value in batches:
            counts.append(count)
            total += value
            elapsed = time.perf_counter() - began
            first = first or elapsed
            if elapsed - first > seconds and len(counts) > LEAST_BATCHES:
                cut = True
                break
        took = time.perf_counter() - began
        cpu = _cpu_seconds() - cpu
    samples = sum(counts)
    complete = not cut or samples == contender.rows
    if complete:
        _check(contender, samples, total)
    return {
        "samples": samples,
        "first_samples": counts[0],
        "seconds": took,
        "cpu_seconds": cpu,
        "complete": complete,
        "first_batch_seconds": first,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _check(contender: Contender, samples: int, total: float) -> None:
    """Whoever does not read every sample once is not measured."""
    if samples != contender.rows:
        raise ValueError(f"read {samples:,} samples of {contender.rows:,}")
    data = contender.task.data
    if contender.rows == data.rows and not math.isnan(total):
        wrong = abs(total - data.touched_sum)
        if wrong > TOLERANCE * data.rows:
            raise ValueError(f"read other values: the sum is off by {wrong:g}")


def _cpu_seconds() -> float:
    """Of this process and the children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _serve(order: dict[str, Any], out: TextIO) -> None:
    entry = ENTRIES[order["entry"]]
    data = Dataset(**{**order["data"], "folder": Path(order["data"]["folder"])})
    scratch = Path(order["scratch"])
    scratch.mkdir(parents=True, exist_ok=True)
    contender = entry.make(Task(data, order["converted_rows"], scratch))
    began = time.perf_counter()
    contender.prepare()
    took = time.perf_counter() - began
    version = package_version(entry.package) if entry.package else None
    _say(out, {"prepare_seconds": took, "rows": contender.rows, "version": version})
    for line in sys.stdin:
        wanted = json.loads(line)
        _say(out, measure(contender, wanted["batch_size"], wanted["seconds"]))


def _say(out: TextIO, answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=out, flush=True)


def main() -> None:
    """Serve until the input ends; the last line says what went wrong, if anything did."""
    # Libraries print: only answers may go to the real standard output.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    try:
        _serve(json.loads(sys.stdin.readline()), out)
    except Exception as exc:
        traceback.print_exc()
        _say(out, {"error": f"{type(exc).__name__}: {exc}".splitlines()[0][:300]})
        sys.exit(1)


if __name__ == "__main__":
    main()
