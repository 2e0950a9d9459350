"""A program that forks workers which train with torch, and die while their process group forms.

A line on stdin is ``{"environment": {...}, "folder": ..., "dies": POINT}``: the program forks, says
``started PID``, and the child trains; or ``reap PID``: it waits for the child's end and says
``ended PID CODE``. Forked from a program that has imported torch, a worker starts at once.

The points at which a worker can die, in their order: ``assembled``, when all have been at the roll
call and nobody has said anything since; ``connecting`` to the store through which the
group forms, or about to open it; ``connected``; ``entering`` torch's function; ``published``, when
the others know its address and it has not reached any of them; ``formed``, before anybody was told;
``stepping``, in the first step.
"""

import gc
import json
import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from dtruntime import Recovery, Run, TrainingOrchestrator
from dtruntime.telemetry import configure_logging

POINTS = ("assembled", "connecting", "connected", "entering", "published", "formed", "stepping")
SAMPLES, BATCH = 120, 12


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def around(name: str, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Do something before and after each call of a function of torch."""
    original = getattr(dist, name)

    def wrapped(*args: Any, **options: Any) -> Any:
        before()
        found = original(*args, **options)
        after()
        return found

    setattr(dist, name, wrapped)


def around_meeting(act: Callable[[], None]) -> None:
    """Do something after each roll call."""
    original = TrainingOrchestrator.meet_async

    async def wrapped(self: TrainingOrchestrator, name: str, *args: Any, **options: Any) -> Any:
        met = await original(self, name, *args, **options)
        if name == "run:assemble":
            act()
        return met

    TrainingOrchestrator.meet_async = wrapped  # type: ignore[method-assign]


class Publishing(dist.Store):
    """Keeps what its owner publishes, and acts when it asks for something of another."""

    def __init__(self, store: dist.Store, act: Callable[[], None]) -> None:
        super().__init__()
        self._store = store
        self._act = act

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return bytes(self._store.get(key))

    def add(self, key: str, value: int) -> int:
        return int(self._store.add(key, value))

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._act()
        self._store.wait(keys, timeout or timedelta(seconds=60))


def publish_only(act: Callable[[], None]) -> None:
    original = dist.init_process_group

    def wrapped(backend: str, *, store: dist.Store, **options: Any) -> None:
        # The name that torch gives to the default group stands before all keys.
        original(backend, store=Publishing(store, act), **options)

    dist.init_process_group = wrapped


def at(point: str, act: Callable[[], None]) -> Callable[[], None]:
    """Act at a point; returns what is to be called in the first step."""

    def nothing() -> None:
        return None

    if point == "assembled":
        around_meeting(act)
    elif point in ("connecting", "connected"):
        around("TCPStore", *((act, nothing) if point == "connecting" else (nothing, act)))
    elif point in ("entering", "formed"):
        around("init_process_group", *((act, nothing) if point == "entering" else (nothing, act)))
    elif point == "published":
        publish_only(act)
    return act if point == "stepping" else nothing


def train(folder: Path, stepping: Callable[[], None], **options: Any) -> None:
    """Train; leaves its weights, and how many workers there were in each step."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    worlds = {}
    with Run(
        folder / "checkpoints",
        data=SAMPLES,
        global_batch_size=BATCH,
        loader={"output": "torch", "streams": 3, "shard_size": 20},
        save_steps=4,
        process_group="auto",
        recovery=Recovery(**options),
        track={"model": model, "optimizer": optimizer},
    ) as run:
        for batch in run:
            stepping()
            with run.guard():
                x = batch["sample"].float().unsqueeze(1) / SAMPLES
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), torch.sin(6 * x)).backward()
                optimizer.step()
                worlds[str(run.step + 1)] = run.world_size
    weights = {key: value.numpy() for key, value in model.state_dict().items()}
    np.savez(folder / f"weights-{os.getpid()}.npz", **weights)
    (folder / f"worlds-{os.getpid()}.json").write_text(json.dumps(worlds))


def run_child(environment: dict[str, str], folder: str, dies: str = "", **options: Any) -> None:
    os.environ.update(environment)
    log = os.open(f"{folder}/{os.getpid()}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    configure_logging()
    train(Path(folder), at(dies, die), **options)


def warm_up() -> None:
    """Import what torch imports when it is used: forked workers have it then."""
    weight = nn.Parameter(torch.ones(1))
    (weight**2).sum().backward()
    torch.optim.Adam([weight]).step()


def serve() -> None:
    torch.set_num_threads(1)
    warm_up()
    gc.freeze()  # so that children do not look through all of it when they end
    for line in sys.stdin:
        if line.startswith("reap "):
            pid = int(line.split()[1])
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            os.write(1, f"ended {pid} {code}\n".encode())
            continue
        call = json.loads(line)
        pid = os.fork()
        if not pid:
            run_child(**call)
            return
        os.write(1, f"started {pid}\n".encode())


if __name__ == "__main__":
    serve()
