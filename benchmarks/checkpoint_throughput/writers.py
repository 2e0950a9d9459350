"""Several processes that save at the same time, each to a place of its own.

All of them save once to warm up, and then at the same moment.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from dtruntime.bench.report import Announce

from ..harness import Kind
from ..processes import call, serve
from . import fio
from .race import Profile
from .results import FIO_DIRECT, STRATA_ARRAYS, Runner

WAIT_SECONDS = 300.0


def compare(profile: Profile, scratch: Path, announce: Announce) -> list[Runner]:
    """Strata beside fio with as many jobs, in turns."""
    measured = []
    size = profile.writer_bytes
    for count in profile.writers:
        ours = Runner("writers", STRATA_ARRAYS, Kind.STRATA, size * count, writers=count)
        limit = Runner("writers", FIO_DIRECT, Kind.LIMIT, size * count, writers=count)
        for number in range(profile.rounds):
            announce(f"{count} writers, round {number + 1}")
            folder = scratch / "writers"
            question = {"count": count, "size": size, "folder": str(folder)}
            ours.durables.append(call(__name__, question))
            shutil.rmtree(folder)
            if fio.version() is not None:
                os.sync()
                seconds = fio.write_seconds(scratch / "fio", size, direct=True, jobs=count)
                limit.durables.append(seconds)
        measured += [ours, limit] if limit.durables else [ours]
    return measured


def save_together(count: int, size: int, folder: str) -> float:
    """How long it takes until all have saved."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(count + 1)
    times = context.SimpleQueue()
    processes = [
        context.Process(
            target=_save, args=(Path(folder, str(i)), size, barrier, times), daemon=True
        )
        for i in range(count)
    ]
    for process in processes:
        process.start()
    barrier.wait(WAIT_SECONDS)
    os.sync()
    barrier.wait(WAIT_SECONDS)
    spans: list[tuple[float, float]] = [times.get() for _ in processes]
    for process in processes:
        process.join()
    return max(end for _, end in spans) - min(began for began, _ in spans)


def _save(folder: Path, size: int, barrier: Barrier, times: Any) -> None:
    from dtruntime import CheckpointManager

    from .contenders.base import make_arrays

    state = make_arrays(size)
    with CheckpointManager(folder, keep_count=1000, memory_budget=size + 2**28) as manager:
        manager.save(state, 1).wait()
        barrier.wait(WAIT_SECONDS)
        barrier.wait(WAIT_SECONDS)
        began = time.perf_counter()
        manager.save(state, 2).wait()
        times.put((began, time.perf_counter()))


if __name__ == "__main__":
    serve(lambda order: lambda question: save_together(**question))
