"""What every contender does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from ..dataset import Dataset

Touched = tuple[int, float]
"""How many samples a batch has, and what its touched column adds up to."""
Batches = Iterator[Touched]


@dataclass(frozen=True, slots=True)
class Task:
    """What to read, and where there is room for a copy of it."""

    data: Dataset
    converted_rows: int
    """For those that convert sample by sample: how many rows to convert."""
    scratch: Path


class Contender(ABC):
    """Reads a dataset in batches."""

    def __init__(self, task: Task) -> None:
        self.task = task

    @property
    def rows(self) -> int:
        """How many samples a whole pass has."""
        return self.task.data.rows

    def prepare(self) -> None:  # noqa: B027 - most have nothing to prepare
        """Index or convert the data: once, before the first pass."""

    @abstractmethod
    def open(self, batch_size: int) -> AbstractContextManager[Batches]:
        """Make ready for a pass; what is measured is the iteration."""
