"""One contender in a process of its own, which reads the data once for each question."""

from __future__ import annotations

import math
import os
import resource
import time
from pathlib import Path
from typing import Any

from dtruntime.bench.report import package_version

from ..processes import Handler, serve
from .contenders import ENTRIES
from .contenders.base import Contender, Task
from .dataset import Dataset

TOLERANCE = 1e-6
"""How much a sum may differ by the order of its terms, per sample."""
LEAST_BATCHES = 5
"""A pass is not cut off before so many came after the first."""


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
        "batch_size": batch_size,
        "samples": samples,
        "first_samples": counts[0],
        "seconds": took,
        "cpu_seconds": cpu,
        "complete": complete,
        "first_batch_seconds": first,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _check(contender: Contender, samples: int, total: float) -> None:
    """A contender that does not read every sample once is not measured."""
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


def _prepare(order: dict[str, Any]) -> Handler:
    entry = ENTRIES[order["entry"]]
    data = Dataset(**{**order["data"], "folder": Path(order["data"]["folder"])})
    scratch = Path(order["scratch"])
    scratch.mkdir(parents=True, exist_ok=True)
    contender = entry.make(__package__, Task(data, order["converted_rows"], scratch))
    began = time.perf_counter()
    contender.prepare()
    ready = {
        "prepare_seconds": time.perf_counter() - began,
        "rows": contender.rows,
        "version": package_version(entry.package) if entry.package else "",
    }

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        return measure(contender, **question) if question else ready

    return answer


if __name__ == "__main__":
    serve(_prepare)
