"""A program that forks processes which save checkpoints until they are killed.

What a checkpoint has is derived from its step, so that whoever loads it can tell whether it is
right. A line on stdin is ``{"name": FUNCTION, ...}``: the program forks, says ``started PID``, and
the child calls that function with the rest; or ``reap PID``: it waits for the child's end and says
``ended PID CODE``. What children say begins with their number. Forked from a program that has
imported everything, a child lives milliseconds after it is wanted.
"""

import json
import os
import signal
import sys
from typing import Any

import numpy as np
from numpy.random import default_rng

from dtruntime import TrainingOrchestrator
from dtruntime.checkpoint.manager import CheckpointManager
from dtruntime.checkpoint.save import commit
from dtruntime.checkpoint.store import writer_lock
from dtruntime.errors import CheckpointNotFoundError, StorageError
from dtruntime.storage import StorageBackend, open_backend
from dtruntime.testing import RecordingBackend

SETTINGS: dict[str, dict[str, Any]] = {
    "bytes": {},
    "full": {},
    "incremental": {"incremental": True},
    "compressed": {"compression": "zstd"},
    "compressed-incremental": {"compression": "gzip", "incremental": True},
    "delta": {"delta": True},
}
MODES = tuple(SETTINGS)
KEEP = {mode: 3 if mode in ("full", "incremental") else 2 for mode in MODES}


def content(mode: str, step: int, rank: int = 0) -> Any:
    """What is saved at a step."""
    noise = default_rng([step, rank])
    if mode == "bytes":
        return noise.bytes(300_000 + 1000 * (step % 7))
    base = default_rng(rank).standard_normal(300_000).astype(np.float32)
    state: dict[str, Any] = {"step": step, "rank": rank, "name": f"{mode} {step}"}
    if mode == "delta":
        return state | {"w": base * np.float32(1 - step * 2**-18)}
    if mode == "compressed":
        return state | {"w": np.repeat(noise.integers(0, 9, 400_000), 2), "noise": noise.random(9)}
    return state | {"frozen": base, "head": noise.random(2000), "empty": np.empty((0, 3))}


def same(left: Any, right: Any) -> bool:
    """Whether two contents are the same to the last bit."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    return type(left) is type(right) and bool(left == right)


def load(manager: CheckpointManager, mode: str, step: int | None = None) -> Any:
    return manager.load_bytes(step) if mode == "bytes" else manager.load_state(step)


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, (os.getpid(), *words))) + "\n").encode())


class DyingBackend(RecordingBackend):
    """Kills this process just before the n-th thing that is asked of it."""

    left = 0

    def record(self, operation: str, name: str, size: int = 0) -> None:
        self.left -= 1
        if not self.left:
            say("dies", "before", operation, name)
            os.kill(os.getpid(), signal.SIGKILL)


def place(url: str, operation: int) -> StorageBackend | str:
    """A place before whose n-th operation this process dies; 0 for one that is harmless."""
    if not operation:
        return url
    backend = DyingBackend(open_backend(url))
    backend.left = operation
    return backend


AT_ONCE = -1.0
"""Who starts here is alone: what others left is theirs no more. Stores tell times in seconds, so
that a file of a process killed just now is as old as the newest."""


def save_on(url: str, mode: str, step: int, *, saves: int, operation: int = 0) -> None:
    """Save one step after the other, two at a time; say which are committed."""
    writer_lock.ORPHAN_SECONDS = AT_ONCE
    with CheckpointManager(
        place(url, operation), keep_count=KEEP[mode], **SETTINGS[mode]
    ) as manager:
        before = None
        for number in range(step, step + saves):
            handle = manager.save(content(mode, number), number)
            if before is not None:
                say("committed", before.wait().step)
            before = handle
        if before is not None:
            say("committed", before.wait().step)
    say("done")


def save_tiers(
    url: str, local: str, mode: str, step: int, *, saves: int, operation: int = 0
) -> None:
    """Save to a local tier while the main storage gets copies; die at its n-th operation."""
    writer_lock.ORPHAN_SECONDS = AT_ONCE
    options = {"keep_count": KEEP[mode], **SETTINGS[mode]}
    main = place(url, operation)
    with CheckpointManager(main, local_tier=local, upload_every=2, **options) as manager:
        for number in range(step, step + saves):
            handle = manager.save(content(mode, number), number)
            say("committed", handle.wait().step)
            if number % 3 == 0:
                say("uploaded", handle.wait_uploaded().step)
    say("done")


def save_rank(
    url: str, coordinator: str, rank: int, world: int, mode: str, *, die_before_manifest: bool
) -> None:
    """Check everything that is listed, then save together with the other ranks, for ever."""
    writer_lock.ORPHAN_SECONDS = 3600.0
    orchestrator = TrainingOrchestrator(
        coordinator_url=coordinator, world_size=world, rank=rank, worker_id=f"worker-{rank}"
    )
    orchestrator.register()
    options = {**SETTINGS[mode], "keep_count": KEEP[mode], "orchestrator": orchestrator}
    manager = CheckpointManager(url, sharded=True, **options)
    steps = manager.steps()
    for step in steps:
        try:
            right = same(load(manager, mode, step), content(mode, step, rank))
        except CheckpointNotFoundError:
            # Ranks that do not know yet that one is lost drop what they need not keep.
            right = step not in manager.steps() and step != steps[-1]
        if not right:
            say("wrong", step)
    say("found", json.dumps(steps))
    orchestrator.barrier("all have looked")
    if die_before_manifest:
        commit.SharedCommitter.write_manifest = _die  # type: ignore[assignment]
    number = max(steps, default=0)
    while True:
        number += 1
        metrics = {"loss": 1 / number}
        saved = manager.save(content(mode, number, rank), number, metrics=metrics).wait()
        say("committed", saved.step)


def look_as_nobody(url: str, mode: str, step: int) -> None:
    """Load and save as a user who may only read."""
    with CheckpointManager(url) as manager:
        load(manager, mode, step)  # so that everything is imported
    if not os.getuid():
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    with CheckpointManager(url) as manager:
        say("right" if same(load(manager, mode, step), content(mode, step)) else "wrong")
        try:
            manager.save(content(mode, step + 1), step + 1).wait()
        except StorageError as exc:
            say("refused", type(exc).__name__, exc)
        say("found", json.dumps(manager.steps()))


def _die(self: Any, checkpoint_id: str, *_: Any) -> None:
    say("dies", "before the manifest of", checkpoint_id)
    os.kill(os.getpid(), signal.SIGKILL)


def serve() -> None:
    for line in sys.stdin:
        if line.startswith("reap "):
            pid = int(line.split()[1])
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            os.write(1, f"ended {pid} {code}\n".encode())
            continue
        call = json.loads(line)
        pid = os.fork()
        if not pid:
            _run_child(call)
        os.write(1, f"started {pid}\n".encode())


def _run_child(call: dict[str, Any]) -> None:
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        globals()[call.pop("name")](**call)
        code = 0
    except BaseException as exc:
        say("failed", type(exc).__name__, exc)
    finally:
        os._exit(code)


if __name__ == "__main__":
    serve()
