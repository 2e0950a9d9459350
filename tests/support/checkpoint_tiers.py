"""A run with a local tier and a main storage, for tests to disturb."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtruntime.checkpoint.manager import CheckpointManager
from dtruntime.checkpoint.store import checkpoint_store
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

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.main = folder / "main"
        self.local = folder / "local"
        self._monkeypatch = monkeypatch

    def manager(self, **options: Any) -> CheckpointManager:
        return CheckpointManager(self.main, local_tier=self.local, **options)

    def wrap_main(self, make: Make) -> None:
        """Put something in front of the main storage of managers that are made from here on."""

        def opened(url: str, **options: Any) -> StorageBackend:
            backend = open_backend(url, **options)
            return make(backend) if str(url) == str(self.main) else backend

        self._monkeypatch.setattr(checkpoint_store, "open_backend", opened)

    def unwrap_main(self) -> None:
        """Put nothing in front of it any more."""
        self._monkeypatch.setattr(checkpoint_store, "open_backend", open_backend)

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
