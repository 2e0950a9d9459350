"""One turn of one contender, in a process of its own: an order as JSON, an answer as JSON."""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from ..data_loading.isolated import call
from .contenders import Contender, Task, entry
from .memory import peak_growth


def take(name: str, size: int, folder: Path, **wanted: Any) -> dict[str, Any]:
    """Let a contender save ``saves`` times, then load; see `_measure` for the answer.

    Nothing of it is left in the folder.
    """
    order = {"name": name, "size": size, "folder": str(folder), **wanted}
    return call(Path(sys.executable), __name__, json.dumps(order), seconds=1800)


def _measure(contender: Contender, order: dict[str, Any]) -> dict[str, Any]:
    stalls, durables = [], []
    with peak_growth() as peak:
        for _ in range(order["saves"]):
            stall, durable = timed_save(contender)
            stalls.append(stall)
            durables.append(durable)
            peak()  # of the first save only: later ones use what it has allocated
    warm, cold = [], []
    if order.get("loads"):
        contender.check(contender.load())
        warm = [timed_load(contender) for _ in range(order["loads"])]
    for _ in range(order.get("cold_loads", 0)):
        _drop_cached(contender)
        cold.append(timed_load(contender))
    return {
        "stalls": stalls,
        "durables": durables,
        "warm_loads": warm,
        "cold_loads": cold,
        "peak_bytes": peak(),
    }


def timed_save(contender: Contender) -> tuple[float, float]:
    """Save once: how long the caller was kept, and until it was durable."""
    os.sync()  # nobody pays for what others have left to write
    began = time.perf_counter()
    contender.save()
    stalled = time.perf_counter()
    contender.settle()
    durable = time.perf_counter()
    contender.rest()
    return stalled - began, durable - began


def timed_load(contender: Contender) -> float:
    """Load once, and look at all of it."""
    os.sync()  # a server may still have to write what was saved
    began = time.perf_counter()
    loaded = contender.load()
    _touch(loaded)
    took = time.perf_counter() - began
    del loaded
    return took


def _touch(loaded: Any) -> None:
    """Look at every page: what is only mapped has not been loaded yet."""
    values = loaded.values() if isinstance(loaded, dict) else [loaded]
    for value in values:
        if not isinstance(value, int):
            memory = value.numpy() if hasattr(value, "numpy") else value
            np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE].sum()


def _drop_cached(contender: Contender) -> None:
    """Let the system forget what it has read or written of the files."""
    for path in contender.files():
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def ordered(order: dict[str, Any]) -> Contender:
    """The contender that an order is for."""
    os.environ.update(order.get("environment", {}))
    folder = Path(order["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    return entry(order["name"]).make(Task(order["size"], folder, order.get("bucket", "")))


def main() -> None:
    """Follow the order in the first argument."""
    order = json.loads(sys.argv[1])
    contender = ordered(order)
    answer = _measure(contender, order)
    contender.close()
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
