"""Strata's checkpoint manager."""

from __future__ import annotations

from typing import Any

from dtruntime import CheckpointManager

from .. import states
from .base import Contender, Task


class _Strata(Contender):
    state: Any

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


class StrataBytes(_Strata):
    """Bytes, which are saved where they lie."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.state = states.make_bytes(task.size)

    def load(self) -> bytes:
        return self.manager.load_bytes(self.number)

    def check(self, loaded: object) -> None:
        if loaded != self.state:
            raise ValueError("other bytes came back")


class StrataTensors(_Strata):
    """A state dict, which is copied."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.state = {**states.make_tensors(task.size), "step": 1}

    def load(self) -> dict[str, Any]:
        loaded: dict[str, Any] = self.manager.load_state(self.number)
        return loaded

    def check(self, loaded: Any) -> None:
        states.check_tensors(loaded, {k: v for k, v in self.state.items() if k != "step"})
