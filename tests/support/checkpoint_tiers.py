"""A run with a local tier and a main storage, for tests to disturb."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dtruntime.checkpoint.manager import CheckpointManager
from dtruntime.storage import StorageBackend, open_backend
from dtruntime.testing import RecordingBackend

Make = Callable[[StorageBackend], StorageBackend]


def state(step: int) -> dict[str, Any]:
    frozen = np.random.default_rng(0).standard_normal(150_000)
    return {"frozen": frozen, "head": np.random.default_rng(step).random(500), "step": step}


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left["step"] == right["step"] and all(
        np.array_equal(left[key], right[key]) for key in ("frozen", "head")
    )


class Run:
    """The two folders of a run."""

    def __init__(self, folder: Path) -> None:
        self.main = folder / "main"
        self.local = folder / "local"
        self._make: Make | None = None

    def manager(self, **options: Any) -> CheckpointManager:
        main = self.main if self._make is None else self._make(open_backend(self.main))
        return CheckpointManager(main, local_tier=self.local, **options)

    def wrap_main(self, make: Make) -> None:
        """Put something in front of the main storage of managers that are made from here on."""
        self._make = make

    def unwrap_main(self) -> None:
        """Put nothing in front of it any more."""
        self._make = None

    def steps(self, where: Path) -> list[int]:
        """What is in one of the places; everything that is listed loads and is right."""
        self.unwrap_main()
        with CheckpointManager(where) as reader:
            for step in reader.steps():
                assert same(reader.load_state(step), state(step)), step
            return reader.steps()


class Gate(RecordingBackend):
    """Lets nobody look for packs or write before it is opened."""

    def __init__(self, inner: StorageBackend) -> None:
        super().__init__(inner)
        self.open = threading.Event()
        self.waiting = threading.Event()

    def record(self, operation: str, name: str, size: int = 0) -> None:
        super().record(operation, name, size)
        if operation in ("create", "writer") or (operation, name) == ("list", "packs"):
            self.waiting.set()
            assert self.open.wait(30)
