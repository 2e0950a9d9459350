"""How long a save keeps a GPU's training waiting: ``python -m benchmarks.checkpoint_gpu``.

Needs a GPU. Measures, for the same tensors in the same process and in turns: a bare copy into
pinned memory, a copy on the device, a save by Strata with and without a copy on the device, and
torch's asynchronous distributed checkpoint with its defaults and with its faster settings.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dtruntime.checkpoint import CheckpointManager
from dtruntime.checkpoint.save import cuda

GIB = 2**30
TENSOR = 64 * 2**20


def make_state(size: int) -> dict[str, Any]:
    count = size // TENSOR
    return {
        f"layer{i}": torch.randn(TENSOR // 2, device="cuda", dtype=torch.bfloat16)
        for i in range(count)
    }


@dataclass
class Contender:
    """Something whose stall is measured; `settle` waits until all of it is done."""

    name: str
    stall: Callable[[], Any]
    settle: Callable[[], Any]
    stalls: list[float] = field(default_factory=list)
    totals: list[float] = field(default_factory=list)

    def round(self) -> None:
        torch.cuda.synchronize()
        start = time.perf_counter()
        self.stall()
        self.stalls.append(time.perf_counter() - start)
        self.settle()
        torch.cuda.synchronize()
        self.totals.append(time.perf_counter() - start)


def bare(state: dict[str, Any]) -> list[Contender]:
    pinned = [torch.empty_like(t, device="cpu", pin_memory=True) for t in state.values()]
    clones: list[Any] = []

    def copy() -> None:
        for host, tensor in zip(pinned, state.values(), strict=True):
            host.copy_(tensor, non_blocking=True)
        torch.cuda.synchronize()

    def clone() -> None:
        clones[:] = [tensor.clone() for tensor in state.values()]
        torch.cuda.synchronize()

    return [
        Contender("bare copy into pinned memory", copy, lambda: None),
        Contender("bare copy on the device", clone, clones.clear),
    ]


def strata(state: dict[str, Any], folder: Path, size: int) -> list[Contender]:
    budget = max(size + GIB, 4 * GIB)
    made = []
    steps = iter(range(1, 10**6))
    for name, spare in (("Strata, copy on the device", 2**30), ("Strata, pinned copy", 2**50)):
        manager = CheckpointManager(folder / name, keep_count=1, memory_budget=budget)

        def save(manager: CheckpointManager = manager, spare: int = spare) -> None:
            cuda.SPARE_BYTES = spare
            manager.save(state, next(steps))

        made.append(Contender(name, save, manager.wait))
    return made


def dcp(state: dict[str, Any], folder: Path) -> list[Contender]:
    import torch.distributed as dist
    import torch.distributed.checkpoint as checkpoint

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29517")
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1)
    futures: list[Any] = []
    steps = iter(range(1, 10**6))

    def settle() -> None:
        for future in futures:
            getattr(future, "upload_completion", future).result()
        futures.clear()
        for old in sorted(folder.glob("dcp-*"))[:-1]:
            shutil.rmtree(old, ignore_errors=True)

    def save(**options: Any) -> None:
        target = folder / f"dcp-{next(steps)}"
        futures.append(checkpoint.async_save(state, checkpoint_id=target, **options))

    from torch.distributed.checkpoint.staging import (
        BlockingAsyncStager,
        DefaultStager,
        StagingOptions,
    )
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    cached = BlockingAsyncStager(cache_staged_state_dict=True)
    pinned = StagingOptions(
        use_pinned_memory=True,
        use_shared_memory=True,
        use_async_staging=False,
        use_non_blocking_copy=True,
    )
    process = AsyncCheckpointerType.PROCESS
    saves: dict[str, Callable[[], None]] = {
        "defaults": save,
        "cached pinned staging": lambda: save(async_stager=cached),
        # A new one for each save: torch before 2.13 closes it after the first.
        "process and pinned stager": lambda: save(
            async_checkpointer_type=process, async_stager=DefaultStager(pinned)
        ),
    }
    return [Contender(f"torch DCP async_save, {name}", run, settle) for name, run in saves.items()]


def kernels_while_draining(state: dict[str, Any], folder: Path, size: int) -> dict[str, float]:
    """How much slower matrix products are while a save is fetched from the device."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def products() -> float:
        start = time.perf_counter()
        for _ in range(50):
            a @ a
        torch.cuda.synchronize()
        return time.perf_counter() - start

    products()
    alone = products()
    with CheckpointManager(folder / "drain", keep_count=1, memory_budget=size + GIB) as manager:
        cuda.SPARE_BYTES = GIB
        manager.save(state, 1).wait()
        handle = manager.save(state, 2)
        during = products()
        handle.wait()
    return {"alone_seconds": alone, "during_seconds": during, "slowdown": during / alone}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=8)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--output", type=Path, default=Path("checkpoint_gpu.json"))
    parser.add_argument("--without-dcp", action="store_true")
    options = parser.parse_args()
    size = int(options.gib * GIB)
    state = make_state(size)
    folder = Path(tempfile.mkdtemp())
    contenders = [*bare(state), *strata(state, folder, size)]
    if not options.without_dcp:
        contenders += dcp(state, folder)
    for number in range(options.rounds + 1):
        for contender in contenders:
            try:
                contender.round()
            except Exception as exc:
                print(f"{contender.name}: {type(exc).__name__}: {exc}", flush=True)
                continue
            print(number, contender.name, f"{contender.stalls[-1] * 1e3:.1f} ms", flush=True)
    results = {
        c.name: {
            "first_stall_ms": c.stalls[0] * 1e3,
            "stall_ms": statistics.median(c.stalls[1:]) * 1e3,
            "total_s": statistics.median(c.totals[1:]),
        }
        for c in contenders
        if len(c.stalls) > 1
    }
    results["kernels"] = kernels_while_draining(state, folder, size)
    options.output.write_text(json.dumps({"gib": options.gib, "results": results}, indent=2))
    print(json.dumps(results, indent=2))
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
