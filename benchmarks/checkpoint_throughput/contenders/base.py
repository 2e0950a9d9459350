"""What saves and loads, and what it is told."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Kind(StrEnum):
    """Who is measured."""

    STRATA = "strata"
    PEER = "peer"
    LIMIT = "limit"


@dataclass(frozen=True, slots=True)
class Task:
    """How much is saved, and where."""

    size: int
    folder: Path
    bucket: str = ""
    """With objects: where they go; the environment says how to get there."""


class Contender(ABC):
    """Saves one state again and again, in a process of its own.

    The state is made by the constructor, and does not change.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.number = 0

    @abstractmethod
    def save(self) -> None:
        """Begin a save; returns when the state may be changed."""

    def settle(self) -> None:  # noqa: B027
        """Return when what was saved is durable."""

    def rest(self) -> None:  # noqa: B027
        """Return when nothing goes on any more; not measured, as training goes on meanwhile."""

    def load(self) -> object:
        """Load what was saved last."""
        raise NotImplementedError

    def check(self, loaded: object) -> None:  # noqa: B027
        """Raise ``ValueError`` when that is not what was saved."""

    def close(self) -> None:  # noqa: B027
        """Release everything."""

    def next_path(self, suffix: str = "") -> Path:
        """Where the next save goes."""
        self.number += 1
        return self.path(suffix)

    def path(self, suffix: str = "") -> Path:
        """Where the last save went."""
        return self.task.folder / f"save-{self.number}{suffix}"

    def files(self) -> list[Path]:
        """Everything it has written."""
        return [path for path in self.task.folder.rglob("*") if path.is_file()]


def flush(path: Path) -> None:
    """Bring a file and its name to the disk."""
    for each in (path, path.parent):
        handle = os.open(each, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
