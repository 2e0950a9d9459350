#!/usr/bin/env python3
"""Record which files and functions of the package five ordinary operations visit.

`record-walks.py` prints, for a heartbeat, a durable save, a load, the first batch of a parquet
file and the death of a worker, each file in the order of its first visit with its functions;
`--json` prints the same for programs. All threads of the process are recorded, the coordinator's
among them where the walk needs one. docs/architecture.md tells the walks in words.
"""

import argparse
import asyncio
import inspect
import json
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import dtruntime
from dtruntime import CheckpointManager, TrainingOrchestrator
from dtruntime.config import CoordinatorConfig
from dtruntime.coordinator.server import CoordinatorServer
from dtruntime.data import Loader, build_index
from dtruntime.errors import SyncError
from dtruntime.testing import WorkerProcess

SOURCE = Path(dtruntime.__file__).resolve().parent
WAIT_SECONDS = 60.0
HEARTBEAT_MS = 60_000
"""Longer than a recording: the only heartbeat in it is the one that is asked for."""

Walk = dict[str, list[str]]
"""The functions visited by file, both in the order of the first visit."""


class Recorder:
    """What every thread that starts after `install` calls between `begin` and `end`."""

    def __init__(self) -> None:
        self._walk: Walk | None = None
        self._skipped: set[str] = set()
        self._lock = threading.Lock()
        self._state = threading.local()

    def install(self) -> None:
        """Profile this thread and all that start later."""
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    @contextmanager
    def recording(self, *, without: tuple[str, ...] = ()) -> Iterator[Walk]:
        """Record until the block ends, except what functions named ``without`` call."""
        walk: Walk = {}
        self._skipped = set(without)
        self._walk = walk
        try:
            yield walk
        finally:
            self._walk = None

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "return" and getattr(self._state, "skips", None) is frame:
            self._state.skips = None
        if event != "call" or self._walk is None or getattr(self._state, "skips", None):
            return
        code = frame.f_code
        if not code.co_flags & inspect.CO_OPTIMIZED or not code.co_filename.startswith(str(SOURCE)):
            return
        if code.co_name in self._skipped:
            self._state.skips = frame
            return
        self._visit(str(Path(code.co_filename).relative_to(SOURCE)), code.co_qualname)

    def _visit(self, file: str, qualified: str) -> None:
        name = re.sub(r"(\.<locals>)?\.?<\w+>$", "", qualified).replace(".<locals>", "")
        walk = self._walk
        if walk is None:
            return
        with self._lock:
            functions = walk.setdefault(file, [])
            if name and name not in functions:
                functions.append(name)


RECORDER = Recorder()


@contextmanager
def coordinator(folder: str, timeout_ms: int) -> Iterator[str]:
    """A coordinator on a thread of this process; gives its URL."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="coordinator")
    thread.start()

    async def started() -> CoordinatorServer:
        config = CoordinatorConfig(
            address="127.0.0.1:0",
            http_address="",
            data_dir=folder,
            heartbeat_interval_ms=min(HEARTBEAT_MS, timeout_ms // 3),
            heartbeat_timeout_ms=timeout_ms,
        )
        server = CoordinatorServer(config)
        await server.start()
        return server

    def wait(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(WAIT_SECONDS)

    server = wait(started())
    try:
        yield f"http://{server.address}"
    finally:
        wait(server.stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(WAIT_SECONDS)
        loop.close()


def heartbeat(folder: str) -> Walk:
    """From the worker's call to the coordinator's machine, and back."""
    with (
        coordinator(folder, 3 * HEARTBEAT_MS) as url,
        TrainingOrchestrator(coordinator_url=url) as worker,
    ):
        worker.register()
        asyncio.run(worker.heartbeat())
        with RECORDER.recording(without=("_every",)) as walk:
            asyncio.run(worker.heartbeat())
    return walk


def state() -> dict[str, Any]:
    """A small state dict: arrays, numbers, a list."""
    weights = {"weight": np.arange(12.0).reshape(3, 4), "bias": np.ones(3)}
    return {"model": weights, "step": 7, "losses": [0.5, 0.25]}


def save(folder: str) -> Walk:
    """From `save()` until the background part has committed."""
    for name in ("other", "this"):
        with CheckpointManager(f"{folder}/{name}") as manager, RECORDER.recording() as walk:
            manager.save(state(), 7).wait()
    return walk


def load(folder: str) -> Walk:
    """`load_state()` of the newest checkpoint."""
    with CheckpointManager(folder) as manager:
        manager.save(state(), 7).wait()
    for _ in range(2):
        with CheckpointManager(folder) as manager, RECORDER.recording() as walk:
            manager.load_state()
    return walk


def first_batch(folder: str) -> Walk:
    """`next(iter(loader))` over a local parquet file."""
    path = Path(folder) / "train.parquet"
    pq.write_table(pa.table({"x": np.arange(1000.0), "y": np.arange(1000)}), path)
    for _ in range(2):
        loader = Loader(build_index(path, "parquet"), 100)
        with RECORDER.recording() as walk:
            next(iter(loader))
    return walk


WORKER = """
from dtruntime import TrainingOrchestrator
with TrainingOrchestrator() as orchestrator:
    orchestrator.register()
    print("registered", flush=True)
    orchestrator.barrier("start")
    print("started", flush=True)
    input()
"""

ELSEWHERE = ("housekeep", "_keep_beating")
"""What goes on at the same time and has no part in a death."""


def death(folder: str) -> Walk:
    """From SIGKILL of one worker until the barrier that another waits in fails."""
    with coordinator(folder, 3000) as url, TrainingOrchestrator(coordinator_url=url) as worker:
        worker.register()
        with WorkerProcess(WORKER, env={"COORDINATOR_URL": url}) as victim:
            victim.expect("registered")
            worker.barrier("start")
            victim.expect("started")
            victim.kill()
            with RECORDER.recording(without=ELSEWHERE) as walk:
                try:
                    worker.barrier("step")
                except SyncError:
                    return walk
    raise SystemExit("the barrier went on without the worker that was killed")


WALKS: dict[str, Callable[[str], Walk]] = {
    "heartbeat": heartbeat,
    "save": save,
    "load": load,
    "first_batch": first_batch,
    "death": death,
}


def shown(name: str, walk: Walk) -> str:
    functions = sum(map(len, walk.values()))
    lines = [f"{name}: {len(walk)} files, {functions} functions"]
    return "\n".join(lines + [f"  {file}: {', '.join(names)}" for file, names in walk.items()])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("walk", nargs="*", help=f"{', '.join(WALKS)}; all of them if none is named")
    parser.add_argument("--json", action="store_true", help="for programs")
    arguments = parser.parse_args()
    if unknown := set(arguments.walk) - set(WALKS):
        parser.error(f"no such walk: {', '.join(sorted(unknown))}")
    RECORDER.install()
    walks = {}
    for name in arguments.walk or WALKS:
        with tempfile.TemporaryDirectory(prefix="strata-walk-") as folder:
            walks[name] = WALKS[name](folder)
    if arguments.json:
        print(json.dumps({name: {"files": len(w), "visits": w} for name, w in walks.items()}))
    else:
        print("\n\n".join(shown(name, walk) for name, walk in walks.items()))


if __name__ == "__main__":
    main()
