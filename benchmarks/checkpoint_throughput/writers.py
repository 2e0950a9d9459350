"""Several processes that save at the same time, each to a place of its own.

Run as a module it starts them, lets all of them save once to warm up and then at the same moment,
and prints JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from ..data_loading.isolated import call
from . import fio
from .contenders.base import Kind
from .profiles import Profile
from .results import FIO_DIRECT, STRATA_ARRAYS, Runner

WAIT_SECONDS = 300.0


def compare(profile: Profile, scratch: Path, announce: Callable[[str], None]) -> list[Runner]:
    """Strata beside fio with as many jobs, in turns."""
    found = []
    size = profile.writer_bytes
    for count in profile.writers:
        ours = Runner("writers", STRATA_ARRAYS, Kind.STRATA, size * count, writers=count)
        limit = Runner("writers", FIO_DIRECT, Kind.LIMIT, size * count, writers=count)
        for number in range(profile.rounds):
            announce(f"{count} writers, round {number + 1}")
            folder = scratch / "writers"
            order = {"count": count, "size": size, "folder": str(folder)}
            answer = call(Path(sys.executable), __name__, json.dumps(order))
            shutil.rmtree(folder)
            ours.durables.append(answer["seconds"])
            if fio.version() is not None:
                os.sync()
                seconds = fio.write_seconds(scratch / "fio", size, direct=True, jobs=count)
                limit.durables.append(seconds)
        found += [ours, limit] if limit.durables else [ours]
    return found


def save_together(count: int, size: int, folder: Path) -> float:
    """How long it takes until all have saved."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(count + 1)
    times = context.SimpleQueue()
    processes = [
        context.Process(target=_save, args=(folder / str(i), size, barrier, times), daemon=True)
        for i in range(count)
    ]
    for process in processes:
        process.start()
    barrier.wait(WAIT_SECONDS)
    os.sync()
    barrier.wait(WAIT_SECONDS)
    found: list[tuple[float, float]] = [times.get() for _ in processes]
    for process in processes:
        process.join()
    return max(end for _, end in found) - min(began for began, _ in found)


def _save(folder: Path, size: int, barrier: Barrier, times: Any) -> None:
    from dtruntime import CheckpointManager

    from .states import make_arrays

    state = make_arrays(size)
    with CheckpointManager(folder, keep_count=1000, memory_budget=size + 2**28) as manager:
        manager.save(state, 1).wait()
        barrier.wait(WAIT_SECONDS)
        barrier.wait(WAIT_SECONDS)
        began = time.perf_counter()
        manager.save(state, 2).wait()
        times.put((began, time.perf_counter()))


if __name__ == "__main__":
    wanted = json.loads(sys.argv[1])
    took = save_together(wanted["count"], wanted["size"], Path(wanted["folder"]))
    print(json.dumps({"seconds": took}))
