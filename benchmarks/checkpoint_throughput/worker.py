"""A contender in a process of its own, which saves or loads once for each question."""

from __future__ import annotations

import atexit
import ctypes
import gc
import mmap
import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np

from dtruntime.bench.raw_storage import drop_cached

from ..processes import Handler, serve
from .contenders import ENTRIES
from .contenders.base import Contender, Task

_RESET_PEAK = "5"
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
"""Of mallopt(3)."""


def timed_save(contender: Contender) -> list[float]:
    """Save once: how long the caller was kept, until it was durable, and the growth of memory."""
    before = _reset_peak() if contender.number == 0 else 0
    os.sync()  # so that nobody pays for what others have left to write
    began = time.perf_counter()
    contender.save()
    stalled = time.perf_counter()
    contender.settle()
    durable = time.perf_counter()
    contender.rest()
    return [stalled - began, durable - began, _memory("VmHWM") - before]


def timed_load(contender: Contender) -> float:
    """Load once, and look at every page: what is only mapped has not been loaded yet."""
    os.sync()  # a server may still have to write what was saved
    began = time.perf_counter()
    loaded: Any = contender.load()
    for value in loaded.values() if isinstance(loaded, dict) else [loaded]:
        memory = value.numpy() if hasattr(value, "numpy") else value
        np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE].sum()
    took = time.perf_counter() - began
    del loaded
    return took


def _keep_memory() -> None:
    """Let what this process frees be used again by it, instead of going back to the system."""
    set_option = ctypes.CDLL(None).mallopt
    for option, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_ARENA_MAX, 1)):
        if not set_option(option, value):
            raise OSError(f"mallopt refuses option {option}")


def _reset_peak() -> int:
    """Let the kernel, which misses no moment, count the peak anew; the memory until now."""
    gc.collect()
    # What was freed before could be used again without showing.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    return _memory("VmRSS")


def _memory(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    match = re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024


def _prepare(order: dict[str, Any]) -> Handler:
    os.environ.update(order.pop("environment", {}))
    if order.pop("keeps_memory", False):
        _keep_memory()
    entry = next(entry for entry in ENTRIES if entry.name == order["name"])
    folder = Path(order["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    task = Task(order["size"], folder, order.get("bucket", ""), order.get("is_tiny", False))
    contender: Contender = entry.make(__package__, task)
    atexit.register(contender.close)

    def answer(question: dict[str, Any]) -> Any:
        match question["do"]:
            case "save":
                return timed_save(contender)
            case "load":
                return timed_load(contender)
            case "load cold":
                drop_cached(folder)
                return timed_load(contender)
            case "check":
                contender.check(contender.load())
        return None

    return answer


if __name__ == "__main__":
    serve(_prepare)
