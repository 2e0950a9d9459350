"""Strata's checkpoint manager."""

from __future__ import annotations

from typing import Any

from dtruntime import CheckpointManager

from .base import Contender, SavesBytes, SavesTensors, Task


class _Strata(Contender):
    def __init__(self, task: Task) -> None:
        super().__init__(task)
        place = f"s3://{task.bucket}/{task.folder.name}" if task.bucket else task.folder
        # Nothing is deleted meanwhile, because the others do not delete either.
        self.manager = CheckpointManager(
            place, keep_count=1000, memory_budget=max(2**30, task.size + 2**28)
        )

    def save(self) -> None:
        self.number += 1
        self.handle = self.manager.save(self.state, self.number)

    def settle(self) -> None:
        self.handle.wait()

    def rest(self) -> None:
        self.manager.wait()

    def close(self) -> None:
        self.manager.close()


class StrataBytes(_Strata, SavesBytes):
    """Bytes, which are saved where they lie."""

    def load(self) -> object:
        return self.manager.load_bytes(self.number)


class StrataTensors(_Strata, SavesTensors):
    """A state dict, which is copied."""

    def load(self) -> Any:
        return self.manager.load_state(self.number)
