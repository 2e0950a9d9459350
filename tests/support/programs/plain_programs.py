"""The plainest programs that use the SDK without `Run`; each goes on when it gets a line."""

ORCHESTRATOR = """
from dtruntime import TrainingOrchestrator

worker = TrainingOrchestrator()
print("registered", worker.register(), flush=True)
while input():
    worker.barrier("step")
    print("passed", flush=True)
"""

LOADER = """
import time
from dtruntime import DatasetRegistry, TrainingOrchestrator

worker = TrainingOrchestrator()
registry = DatasetRegistry()
print("registered", worker.register(), flush=True)
registry.register_dataset("numbers", 400, 40, shuffle=False)


def slow(batch):
    time.sleep(0.05)
    return batch


loader = registry.loader("numbers", batch_size=20, transform=slow)
for epoch in range(2):
    input()
    for batch in loader:
        if not input():
            break
        print("trained", flush=True)
    print("epoch", epoch, flush=True)
input()
"""

MANAGER = """
import os
import sys
import time
from pathlib import Path

from dtruntime import CheckpointManager, TrainingOrchestrator

sync, folder = os.fsync, Path(sys.argv[1])


def fsync(handle):  # a disk that takes its time
    while not (folder / "disk").exists():
        time.sleep(0.02)
    sync(handle)


os.fsync = fsync
worker = TrainingOrchestrator()
worker.register()
manager = CheckpointManager(folder / "checkpoints")
print("registered", flush=True)
for step in range(1, 100):
    if not input():
        break
    worker.report(step=step)
    manager.save(b"w" * 3_000_000, step).wait()
    print("saved", step, flush=True)
input()
"""
